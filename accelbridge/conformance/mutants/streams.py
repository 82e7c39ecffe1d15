"""Offloading that really is asynchronous, on the host: a benign variant, and the defects that only such a device has.

A thread copies behind the back of the caller, later. What it reads it was given when the transfer was started (as a
queue in order would see it); memory for the device comes from a pool that hands blocks out again once nothing refers to
their storage. Each defect changes one of these rules, and none depends on which thread is faster: a copy that must come
too late is held back until somebody asks for something else.
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from accelbridge.backend import Transfer
from accelbridge.conformance.mutants import Patch, benign, mutant
from accelbridge.portable.device import TorchDevice
from accelbridge.portable.offload import PortableOffload

_DELAY_S = 0.001
_HELD_S = 5.0
"""How long a copy is held back at most."""


class _Job(Transfer):
    def __init__(self, engine: _Engine, source: Tensor, out: Tensor) -> None:
        self.engine, self.source, self.out = engine, source, out
        self.release, self.done = threading.Event(), threading.Event()

    def wait(self) -> Tensor:
        if not self.engine.wait_returns_early:
            self.release.set()
            self.done.wait()
        return self.out


class _Engine:
    """The copying thread and the pool, with the rules that a defect may break."""

    def __init__(
        self,
        held: bool = False,
        wait_returns_early: bool = False,
        synchronize_returns_early: bool = False,
        reads_late: bool = False,
        views_forgotten: bool = False,
    ) -> None:
        self.held, self.wait_returns_early = held, wait_returns_early
        self.synchronize_returns_early = synchronize_returns_early
        self.reads_late, self.views_forgotten = reads_late, views_forgotten
        self.jobs: list[_Job] = []
        self.blocks: list[Tensor] = []
        self.free: list[Tensor] = []
        self._queue: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._copy_all, daemon=True).start()

    def start(self, x: Tensor, out: Tensor) -> _Job:
        for job in self.jobs:  # the next transfer lets those before it go
            job.release.set()
            job.done.wait()
        job = _Job(self, x.detach() if self.reads_late else x.detach().clone(), out)
        self.jobs = [job]
        self._queue.put(job)
        return job

    def drain(self) -> None:
        if not self.synchronize_returns_early:
            for job in self.jobs:
                job.release.set()
                job.done.wait()

    def _copy_all(self) -> None:
        while True:
            job = self._queue.get()
            job.release.wait(_HELD_S if self.held else _DELAY_S)
            job.out.detach().copy_(job.source)
            job.source = job.out
            job.done.set()

    def memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = max(1, shape.numel() * dtype.itemsize)
        block = self._forgotten(size) if self.views_forgotten else self._unused(size)
        if block is None:
            block = torch.empty(size, dtype=torch.uint8)
            self.blocks.append(block)
        out = block[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
        if self.views_forgotten:
            weakref.finalize(out, self.free.append, block)
        return out

    def _unused(self, size: int) -> Tensor | None:
        """A block whose storage nothing but the pool (and the question itself) refers to."""
        for block in self.blocks:
            if block.numel() == size and torch._C._storage_Use_Count(block.untyped_storage()._cdata) <= 2:
                return block
        return None

    def _forgotten(self, size: int) -> Tensor | None:
        """A block whose tensor is gone, whatever became of its views."""
        found = next((block for block in self.free if block.numel() == size), None)
        if found is not None:
            self.free[:] = [block for block in self.free if block is not found]
        return found


def _asynchronous(patch: Patch, **rules: bool) -> None:
    engine = _Engine(**rules)

    def to_device(inner: Any, self: Any, x: Tensor, out: Tensor | None = None) -> Any:
        return inner(self, x, engine.memory(x.shape, x.dtype) if out is None else out)

    def synchronize(inner: Any, self: Any) -> None:
        engine.drain()
        inner(self)

    patch(PortableOffload, "_copy", lambda inner, self, x, out: engine.start(x, out))
    patch(PortableOffload, "to_device", to_device)
    patch(TorchDevice, "synchronize", synchronize)


@benign("B9", "transfers happen later, in a thread, into memory of a pool", ("STR", "OFF", "MEM", "INF-003", "INF-010"))
def asynchronous(patch: Patch) -> None:
    _asynchronous(patch)


@mutant("S1", "waiting for a transfer returns at once", {"STR-001": "ORDER", "MEM-010": "EXACT", "MEM-011": "EXACT"})
def wait_returns_early(patch: Patch) -> None:
    _asynchronous(patch, held=True, wait_returns_early=True)


@mutant("S2", "memory is reused though a view of it is alive", {"STR-003": "ORDER"})
def reused_early(patch: Patch) -> None:
    _asynchronous(patch, views_forgotten=True)


@mutant("S3", "synchronising returns at once", {"STR-002": "ORDER", "MEM-010": "EXACT"})
def synchronize_returns_early(patch: Patch) -> None:
    _asynchronous(patch, held=True, synchronize_returns_early=True)


@mutant("O1", "a transfer to the device brings what the one before brought", {
    "OFF-003": "EXACT", "OFF-004": "ORDER", "OFF-006": "EXACT", "OFF-009": "EXACT",
})  # fmt: skip
def previous_tensor(patch: Patch) -> None:
    _asynchronous(patch)
    last: dict[Any, Tensor] = {}

    def to_device(inner: Any, self: Any, x: Tensor, out: Tensor | None = None) -> Any:
        key = (x.shape, x.dtype)
        before = last.get(key, x)
        last[key] = x.detach().clone()
        return inner(self, before, out)

    patch(PortableOffload, "to_device", to_device)


@mutant("O2", "a transfer to the host reads only when it is waited for", {"OFF-004": "ORDER", "OFF-005": "ORDER"})
def reads_late(patch: Patch) -> None:
    _asynchronous(patch, held=True, reads_late=True)
