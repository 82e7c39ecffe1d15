"""A hash of 32-bit integers that gives equal bits on every device, for random numbers that no generator has to keep."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
_SHIFTS = (16, 15, 16)

Constant = Callable[[Tensor, int], "int | Tensor"]
"""``(bits, number)``: a 32-bit number as an operand for int32 ``bits``."""


def plain(_: Tensor, number: int) -> int:
    """The number itself, for devices that stay with 32 bits when a Python number meets int32."""
    return number


def key(text: str) -> int:
    """The first 32 bits, signed, of BLAKE2b of ``text``: made on the host, of integers of any size."""
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little", signed=True)


def lowbias32(bits: Tensor, constant: Constant = plain) -> Tensor:
    """lowbias32 of int32 ``bits``, which are overwritten.

    Published by C. Wellons, "Prospecting for Hash Functions" (2018): xor with the value shifted right by 16, times
    0x7feb352d, xor with it shifted by 15, times 0x846ca68b, xor with it shifted by 16; a bijection of 32 bits.
    int32 and in place: not every device has unsigned or 64-bit integers, a shift of signed ones is made logical by
    masking, and memory traffic is what this costs where nothing fuses. The shift is the named function: the operator
    ``>>`` is another one, which a device may run as a division that rounds negative numbers up.

    ``bits`` must come from data. Compilers of C++ take it that products of signed integers don't overflow, and from
    numbers whose range they know, such as coordinates alone, they conclude what isn't so: inductor's CPU code then
    drew other masks (torch 2.13, GCC at -O3).
    """
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        shifted = torch.bitwise_right_shift(bits, constant(bits, shift))
        bits = bits.bitwise_xor_(shifted.bitwise_and_(constant(bits, (1 << (32 - shift)) - 1)))
        if multiplier is not None:
            bits = bits.mul_(constant(bits, multiplier))
    return bits
