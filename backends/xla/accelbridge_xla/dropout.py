"""The op dropout, with every number in it an int32 of the device."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from accelbridge.ops.keyed_dropout import dropout


def _int32(bits: Tensor, number: int) -> Tensor:
    return bits.new_full((), number)


int32_dropout = partial(dropout, constant=_int32)
"""torch_xla 2.9.0 promotes int32 to 64 bits where a Python number is an operand, and casts back only what leaves the
graph: products then don't wrap, and the masks are others than those of every other device, without an error."""
