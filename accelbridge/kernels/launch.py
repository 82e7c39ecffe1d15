"""What launchers of all families share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from accelbridge.errors import Unsupported

MOST = 2**31 - 1
"""What an int32 holds: kernels count rows, columns and strides in them."""
FARTHEST = 2**24
"""Elements from one row, or column, to the next at most: a block of up to 128 of them is addressed in an int32."""


def run(kernel: Any, programs: int, *args: Any, **more: Any) -> None:
    """Launch ``programs`` programs of ``kernel``, a ``triton.jit`` function, on the device of its tensors, which is the
    bound one. (Type checkers take constants among the arguments of such a function for something that they are not.)"""
    kernel[(programs,)](*args, **more)


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors (compute units) of ``device``, for kernels whose programs take their work in turns; 2 where
    kernels are interpreted."""
    properties = getattr(torch.get_device_module(device.type), "get_device_properties", None)
    return getattr(properties(device), "multi_processor_count", 2) if properties is not None else 2


def check_reach(what: str, *matrices: Tensor) -> None:
    """Raise ``Unsupported`` for a matrix whose sizes or strides no kernel can count."""
    for x in matrices:
        if (
            max((*x.shape, 0)) > MOST
            or max((*(s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1), 0)) > FARTHEST
        ):
            raise Unsupported(
                f"{what} asked of a kernel, with a matrix {tuple(x.shape)} of strides {x.stride()}; sizes end at "
                f"{MOST}, strides at {FARTHEST}; split it, or bind the portable implementation"
            )
