"""Corrupted outputs: a test that passed is run again on them and must fail, or its pass meant nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MODES = ("nan_element", "lowest_bit", "zero_tail", "roll", "double")
"""In the order in which they are tried. What is not a tensor is replaced by NaN or by something unequal, and an
expected error is kept back, under every mode."""


def corrupt(x: Tensor, mode: str) -> Tensor:
    """A copy of a host tensor with one defect. Empty tensors come back with one element more."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=x.dtype)
    x = x.detach().clone(memory_format=torch.contiguous_format)
    flat = x.reshape(-1)
    raw = flat.view(torch.uint8) if not x.is_complex() else torch.view_as_real(flat).reshape(-1).view(torch.uint8)
    if mode == "nan_element" and x.is_floating_point() and x.dtype.itemsize > 1:
        flat[flat.numel() // 2] = math.nan
    elif mode in ("nan_element", "lowest_bit"):
        raw[(raw.numel() // x.element_size() // 2) * x.element_size()] ^= 1
    elif mode == "zero_tail":
        raw[-max(x.element_size(), raw.numel() // 8 // x.element_size() * x.element_size()) :] = 0
    elif mode == "roll":
        flat.copy_(flat.roll(1))
    else:
        flat.copy_((flat.float() * 2.0).to(x.dtype) if x.dtype.itemsize == 1 else flat + flat)
    return x
