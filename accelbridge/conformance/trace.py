"""Which ops really run, and on which kind of device: what a result's place alone does not show.

    with Trace() as trace:
        out = call(...)
    trace.ops       # {"aten::mm", ...}
    trace.foreign("acme")   # ("aten::mm on cpu", ...)

Torch's dispatcher tells it of every op below autograd that Python code calls in this thread. What a kernel does
inside, and the backward pass of devices whose autograd has threads of its own, it does not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MADE_NOWHERE = frozenset({"meta"})
_NO_WORK = frozenset({"aten::detach", "aten::alias", "aten::empty.memory_format", "aten::empty_strided",
                      "aten::promote_types", "aten::lift_fresh"})  # fmt: skip
"""Ops that touch no element."""


class Trace(TorchDispatchMode):
    """Records ops while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()
        self._seen: set[tuple[str, frozenset[str]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        self.ops.add(name)
        if name not in _NO_WORK:
            places = {x.device.type for x in _tensors((args, kwargs or {}, out)) if x.dim() > 0}
            self._seen.add((name, frozenset(places - _MADE_NOWHERE)))
        return out

    def foreign(self, device_type: str) -> tuple[str, ...]:
        """Ops that worked on tensors of another device than ``device_type``, copies to and from it among them. Tensors
        without dimensions don't count: torch keeps numbers on the host."""
        found = ((name, place) for name, places in self._seen for place in places - {device_type})
        return tuple(sorted(f"{name} on {place}" for name, place in found))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _tensors(tuple(tree.values()))
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _tensors(part)
