"""A device with graphs, for tests on a host: the CPU, whose graph is a tape of the ops that torch's dispatcher saw.

A replay runs the ops of the tape again, on the very tensors of the recording, and writes their results over those of
the recording: fixed addresses and fixed numbers of the host, as a device's graph has. It runs no Python of the model,
so whatever changes from step to step and does not come through those tensors is missing from its results. As on a
device, recording does nothing: what it wrote is put back, what it made holds NaN until the first replay; and what a
device cannot record (reading a value, data from the host) raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelbridge.backend import FULL, Capabilities, Graph
from accelbridge.cpu.backend import CpuBackend
from accelbridge.cpu.device import CpuDevice

REFUSED = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2",
    "aten::equal", "aten::is_nonzero", "aten::repeat_interleave", "aten::lift_fresh",
}  # fmt: skip
"""Ops for which a host waits for a device, or copies to it from memory of its own (``torch.tensor``)."""
Entry = tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor | None]]
"""An op, its arguments, and what it made: None in the place of a result that shares memory with an argument."""


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self._made: set[int] = set()
        """Storages that the recording itself has made; the tape keeps them alive."""
        self._before: list[tuple[Tensor, Tensor]] = []
        """Of others: what was written, and what it held."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._refuse(func, args)
        for tensor in _written(func, args, kwargs):
            if _storage(tensor) not in self._made:
                self._before.append((tensor, tensor.clone()))
        result = func(*args, **kwargs)
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        leaves = [
            leaf if isinstance(leaf, Tensor) and _storage(leaf) not in given else None for leaf in tree_leaves(result)
        ]
        self._made |= {_storage(leaf) for leaf in leaves if leaf is not None}
        self.entries.append((func, args, kwargs, leaves))
        return result

    def _refuse(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._schema.name
        by_mask = name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if name in REFUSED or by_mask:
            raise RuntimeError(f"{name} is not permitted while a graph is recorded")

    def undo(self) -> None:
        """Nothing was done: put back what was written, and leave no values in what was made."""
        for tensor, held in reversed(self._before):
            tensor.copy_(held)
        for tensor in (leaf for _, _, _, made in self.entries for leaf in made if leaf is not None):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TapeGraph(Graph):
    """See the module's text."""

    replays: ClassVar[int] = 0
    """Of all graphs of this process."""

    def __init__(self) -> None:
        self._entries: list[Entry] | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def record(self, run: Callable[[], None]) -> None:
        assert self._entries is None, "recorded twice"
        recording = _Recording()
        with recording:
            run()
        self._entries = recording.entries
        with torch._C._AutoDispatchBelowAutograd():
            recording.undo()

    def replay(self) -> None:
        assert self._entries, "nothing was recorded"
        TapeGraph.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, made in self._entries:
                for old, new in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                    if old is not None:
                        old.copy_(new)


class TapedDevice(CpuDevice):
    """The CPU, with graphs."""

    def graph(self) -> Graph:
        return TapeGraph()


@contextmanager
def taped_cpu() -> Iterator[None]:
    """In this process the CPU backend has graphs, and says so."""
    capabilities = CpuBackend.capabilities.__func__  # type: ignore[attr-defined]

    def able(cls: type[CpuBackend], chip: str, software: Mapping[str, str]) -> Capabilities:
        return replace(capabilities(cls, chip, software), capture=FULL)

    with (
        mock.patch.object(CpuBackend, "capabilities", classmethod(able)),
        mock.patch.object(CpuBackend, "device", property(lambda _: TapedDevice())),
    ):
        yield
