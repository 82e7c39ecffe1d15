"""Copies on the device read all of their source before they write, as the values of a compiled graph do; the simulated
device copies as memory lies."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if source.numel() and source.device == target.device and _address(source) == _address(target):
        source = source.clone()
    torch.ops.aten._copy_from(source, target, non_blocking)
    return target


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _library.impl("copy_", copy, "PrivateUse1")
