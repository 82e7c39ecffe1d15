"""What torch_xla 2.9.0 does wrong without an error, or ends the process by, and a model may ask for: refused by name.

The backend itself calls none of it (a test reads its code). What was seen, on XLA's CPU client with four devices:

- the collectives of ``torch_xla.core.xla_model`` take the one process for one device: inside manual sharding too,
  ``all_reduce`` returns its operand, ``all_gather`` the part of one device, ``collective_permute`` aborts;
- ``torch._grouped_mm`` ends the process with a segmentation fault;
- ``place_to_host`` and ``place_to_device`` exist for TPUs alone.

A refusal of an operation is a kernel of torch's dispatcher for XLA tensors; nothing of torch or torch_xla is patched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch import nn

from accelbridge.errors import ConfigError, Unsupported
from accelbridge_xla import hardware

_COLLECTIVES = "torch_xla.core.xla_model"
COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "reduce_scatter_bucketized", "all_gather_bucketized", "all_to_all",
     "collective_permute", "collective_broadcast", "send", "recv", "reduce_gradients", "optimizer_step"}
)  # fmt: skip
"""Functions of ``torch_xla.core.xla_model`` that speak of devices as processes."""
_GROUPED = "torch_xla 2.9.0 ends the process there; multiply the groups one by one, or as one batch of padded groups"
_PLACES = "XLA's CPU client has one memory, and torch_xla 2.9.0 fails there; leave it out on virtual devices"


@cache
def refuse_operations() -> tuple[torch.library.Library, ...]:
    """From here on, in this process, what must not run on XLA tensors raises ``Unsupported``. Safe to repeat."""
    refused = [_refused("aten", "_grouped_mm", "torch._grouped_mm", _GROUPED)]
    if hardware.find().chip == hardware.VIRTUAL:
        refused += [_refused("xla", name, name, _PLACES) for name in ("place_to_host", "place_to_device")]
    return tuple(refused)


def _refused(namespace: str, operation: str, shown: str, why: str) -> torch.library.Library:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise Unsupported(f"{shown} asked of a tensor on XLA devices; {why}")

    library = torch.library.Library(namespace, "IMPL" if namespace == "aten" else "FRAGMENT")
    library.impl(operation, refuse, "XLA")
    return library


def check_model(model: nn.Module) -> None:
    """Raise ConfigError where a method of one of ``model``'s modules names a collective of torch_xla's."""
    for name, module in model.named_modules():
        for method in _methods(type(module)):
            if found := _collective(method):
                line = f"{inspect.getsourcefile(method)}:{method.__code__.co_firstlineno}"
                raise ConfigError(
                    f"module {name or type(module).__name__} calls xla_model.{found} in {method.__qualname__} "
                    f"({line}); one process drives all devices here, of which torch_xla 2.9.0 sees one, and returns "
                    "the operand without an error; leave it out: tensors are whole, and the compiler inserts the rest"
                )


def _methods(kind: type[nn.Module]) -> Iterator[FunctionType]:
    for owner in kind.__mro__:
        if owner.__module__.split(".")[0] not in ("torch", "builtins"):
            yield from (member for member in vars(owner).values() if isinstance(member, FunctionType))


def _collective(method: Callable[..., Any]) -> str:
    """The name of a collective of torch_xla's that the code of ``method`` reads; "" for none."""
    code, known = method.__code__, method.__globals__
    read = [known[name] for name in code.co_names if name in known]
    direct = (f.__name__ for f in read if getattr(f, "__module__", "") == _COLLECTIVES and callable(f))
    modules = any(isinstance(thing, ModuleType) and thing.__name__.split(".")[0] == "torch_xla" for thing in read)
    names = (*direct, *(code.co_names if modules else ()))
    return next((name for name in names if name in COLLECTIVES), "")
