"""Collectives of the CPU backend: gloo, with what it gets wrong put right.

Seen on torch 2.13 with 2 to 4 processes (``tests/test_lowerings.py`` shows each one on raw gloo). What it
does right has no lowering here: AVG in all forms (since torch 2.8, pytorch/pytorch#149781), uneven and empty
splits of all_to_all_single.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from accelbridge.backend import Lowering, World
from accelbridge.portable.collectives import TorchCollectives

CPU_LOWERINGS = (
    Lowering(
        "contiguous",
        applies="tensors that are not contiguous, or conjugated lazily",
        into="contiguous copies, written back afterwards",
        reason="gloo takes strided memory as if it were dense: silently wrong values in all_reduce, "
        "broadcast, reduce, scatter, reduce_scatter over lists and the output of all_to_all_single; an error "
        "in its input, in send and in recv",
    ),
    Lowering(
        "float32_reduce",
        applies="SUM, AVG, PREMUL_SUM and PRODUCT over bfloat16 and float16",
        into="the same over float32, rounded once at the end",
        reason="gloo adds in the tensors' dtype and rounds at every addition: at 3 ranks bfloat16 is some "
        "250 times the error bound of a float32 sum off",
    ),
    Lowering(
        "premul_as_sum",
        applies="PREMUL_SUM",
        into="SUM of inputs multiplied with the factor",
        reason="gloo has no PREMUL_SUM",
    ),
    Lowering(
        "nan_minmax",
        applies="MIN and MAX over floats",
        into="the same over order-preserving integers, where a NaN wins",
        reason="gloo keeps or drops a NaN depending on which rank holds it",
    ),
    Lowering(
        "fp8_bytes",
        applies="float8 tensors",
        into="uint8 views for movement; a reduction is refused",
        reason="gloo refuses float8 in everything but send and recv",
    ),
    Lowering(
        "int16_as_int32",
        applies="int16 tensors",
        into="the same over int32",
        reason='gloo has no 16-bit integers ("Invalid scalar type", a bare RuntimeError)',
    ),
    Lowering(
        "list_all_to_all",
        applies="all_to_all over lists of tensors",
        into="all_to_all_single over their concatenation",
        reason="gloo has it since torch 2.12 only (pytorch/pytorch#165435); 2.9 does not",
    ),
)


class CpuCollectives(TorchCollectives):
    """gloo; a run that stays on one host keeps to the loopback interface."""

    def __init__(self) -> None:
        super().__init__("gloo", CPU_LOWERINGS)

    def environment(self, world: World) -> Mapping[str, str]:
        if world.local_size < world.size:
            return {}
        return {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
