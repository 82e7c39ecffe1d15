"""Functions of torch that somebody else has replaced in this process: a plugin must not change what others call."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from types import FunctionType, ModuleType

import typing_extensions

_OWNERS = (
    "torch",
    "torch.Tensor",
    "torch.autograd",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.nn.Module",
    "torch.nn.functional",
    "torch.optim.Optimizer",
    "torch.utils.checkpoint",
)


def patched_names() -> list[str]:
    """Names of public functions and methods in torch's own namespaces whose code lies elsewhere.

    torch's functions are written in C++ or in files of torch; what a backend registers through torch's own extension
    points (a device module, generated tensor methods) is one of these too.
    """
    import torch

    home = str(Path(torch.__file__).parent) + os.sep  # and not a package beside it, whose name begins in the same way
    ours = str(Path(__file__).parent) + os.sep  # the suite's own seeded defects are found by its tests, not here
    found = []
    for owner in _OWNERS:
        holder = _resolve(owner)
        for name, value in vars(holder).items():
            if type(value) is not FunctionType:
                continue  # written in C++, a class, a module
            file = value.__code__.co_filename
            if file in (contextlib.__file__, typing_extensions.__file__):  # what their decorators make of a function
                file = inspect.unwrap(value).__code__.co_filename
            if not file.startswith((home, ours, "<")) and not _from_library(value):
                found.append(f"{owner}.{name} ({file})")
    return sorted(found)


def unstated(found: Iterable[str], stated: Collection[str]) -> list[str]:
    """Those of :func:`patched_names` that ``Capabilities.replaced`` does not name."""
    return [name for name in found if name.split(" ")[0] not in stated]


def _from_library(value: object) -> bool:
    """Whether ``value`` was merely imported there from the standard library or from typing helpers."""
    module = sys.modules.get(getattr(value, "__module__", "") or "")
    name = (module.__name__ if module else "").split(".")[0]
    return name in sys.stdlib_module_names or name == "typing_extensions"


def _resolve(path: str) -> object:
    first, *rest = path.split(".")
    holder: object = sys.modules[first]
    for part in rest:
        holder = getattr(holder, part)
    assert isinstance(holder, ModuleType | type)
    return holder
