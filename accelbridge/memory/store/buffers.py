"""Aligned host memory, and the staging buffers made of it."""

from __future__ import annotations

import mmap
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGNMENT = 4096
"""Bytes. Of addresses, positions and lengths: a multiple of the logical sector of any disk (512 or 4096), which is
what O_DIRECT asks for (open(2), NOTES)."""

Allocate = Callable[[int], Tensor]
"""Makes a uint8 host tensor of so many bytes at a multiple of :data:`ALIGNMENT`, pinned where a device asks for it."""


def aligned(size: int) -> Tensor:
    """``size`` bytes, zeroed, from the kernel's pages: uint8 of shape ``(size,)``."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8, count=size)


def round_up(size: int) -> int:
    """The least multiple of the alignment that holds ``size`` bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def as_bytes(x: Tensor) -> memoryview:
    """The memory of the contiguous host tensor ``x``. Raises ``ValueError`` for any other."""
    if x.device.type != "cpu" or not x.is_contiguous() or x.is_conj() or x.is_neg():
        raise ValueError(f"a contiguous host tensor asked; found one on {x.device} with strides {tuple(x.stride())}")
    return x.detach().reshape(-1).view(torch.uint8).numpy().data


class StagingBuffers:
    """``count`` buffers of ``size`` bytes that threads take turns with."""

    def __init__(self, count: int, size: int, allocate: Allocate = aligned) -> None:
        self._memory = [allocate(size) for _ in range(count)]
        if any(buffer.data_ptr() % ALIGNMENT for buffer in self._memory):
            raise ValueError(f"staging buffers at multiples of {ALIGNMENT} bytes asked; the allocator gives others")
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for buffer in self._memory:
            self._free.put(as_bytes(buffer))

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        """A buffer of one's own; waits for one to be free."""
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)
