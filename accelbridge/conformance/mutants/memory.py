"""Defects of copies, of layouts and of memory, in the portable pieces that the host's device uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelbridge.conformance.mutants import Patch, benign, mutant
from accelbridge.cpu.device import CpuDevice
from accelbridge.portable.matmul import PortableMatmul
from accelbridge.portable.offload import PortableOffload


@mutant("M1", "transfers to the host return what the one before returned", {"MEM-001": "EXACT", "MEM-011": "EXACT"})
def stale_host_copy(patch: Patch) -> None:
    last: dict[Any, Tensor] = {}

    def to_host(inner: Any, self: Any, x: Tensor, out: Tensor | None = None) -> Any:
        key = (x.shape, x.dtype)
        before = last.get(key, torch.zeros_like(x))
        last[key] = x.clone()
        return inner(self, before, out)

    patch(PortableOffload, "to_host", to_host)


def _memory_of(x: Tensor, count: int, offset: Any) -> Tensor:
    """``count`` elements of the memory behind ``x`` in their order there, from element ``offset`` on."""
    whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    return whole.reshape(-1)[offset : offset + count]


@mutant("M2", "copies ignore strides", {"MEM-002": "EXACT", "OFF-010": "EXACT"})
def strides_ignored(patch: Patch) -> None:
    def copy(inner: Any, self: Any, x: Tensor, out: Tensor) -> Any:
        dense = _memory_of(x, x.numel(), x.storage_offset())
        if dense.numel() == x.numel():
            x = dense.view(x.shape)
        return inner(self, x, out)

    patch(PortableOffload, "_copy", copy)


@mutant("M3", "copies drop the bytes after the last 16", {"MEM-001": "EXACT", "OFF-001": "EXACT"})
def tail_dropped(patch: Patch) -> None:
    def copy(inner: Any, self: Any, x: Tensor, out: Tensor) -> Any:
        tail = x.numel() * x.element_size() % 16 // x.element_size()
        done = inner(self, x, out)
        if tail and out.is_contiguous():
            _memory_of(out, tail, out.storage_offset() + out.numel() - tail).view(torch.uint8).zero_()
        return done

    patch(PortableOffload, "_copy", copy)


@mutant("M4", "transfers write 16 bytes past the end", {"MEM-004": "CANARY"})
def past_the_end(patch: Patch) -> None:
    def copy(inner: Any, self: Any, x: Tensor, out: Tensor) -> Any:
        done = inner(self, x, out)
        count = 16 // out.element_size()
        _memory_of(out, count, out.storage_offset() + out.numel()).zero_()
        return done

    patch(PortableOffload, "_copy", copy)


@mutant("M4b", "products write 16 bytes before their second operand", {"MEM-004": "CANARY"})
def before_an_operand(patch: Patch) -> None:
    def matmul(inner: Any, self: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        count = min(16 // b.element_size(), int(b.storage_offset()))
        _memory_of(b, count, b.storage_offset() - count).zero_()
        return inner(self, a, b, out_dtype)

    patch(PortableMatmul, "matmul", matmul)


@mutant("M5", "views are read from the start of their memory", {"MEM-002": "EXACT", "MEM-005": "EXACT"})
def offset_ignored(patch: Patch) -> None:
    def start(x: Tensor) -> Tensor:
        return x.as_strided(x.shape, x.stride(), 0)

    def copy(inner: Any, self: Any, x: Tensor, out: Tensor) -> Any:
        return inner(self, start(x.detach()), out)

    patch(PortableOffload, "_copy", copy)


@mutant("M5b", "products read their operands from the start of the memory", {"MEM-005": "EXACT"})
def offset_ignored_in_products(patch: Patch) -> None:
    def matmul(inner: Any, self: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return inner(self, a, b.as_strided(b.shape, b.stride(), 0), out_dtype)

    patch(PortableMatmul, "matmul", matmul)


@mutant("M6", "operands stay in memory when a product runs out of it", {"MEM-007": "LEAK", "MEM-008": "LEAK"})
def leak_after_failure(patch: Patch) -> None:
    held: list[Any] = []

    def matmul(inner: Any, self: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        try:
            return inner(self, a, b, out_dtype)
        except RuntimeError:
            held.append((a, b))
            raise

    patch(PortableMatmul, "matmul", matmul)


@mutant("M7", "tensors without elements are refused", {"MEM-001": "RAISED", "MEM-006": "RAISED", "OFF-010": "RAISED"})
def empty_refused(patch: Patch) -> None:
    def copy(inner: Any, self: Any, x: Tensor, out: Tensor) -> Any:
        if not x.numel():
            raise RuntimeError("invalid configuration argument")
        return inner(self, x, out)

    patch(PortableOffload, "_copy", copy)


@mutant("M8", "memory statistics never change", {"MEM-009": "MEMORY"})
def constant_statistics(patch: Patch) -> None:
    first: dict[str, Mapping[str, int | None]] = {}

    def memory(inner: Any, self: Any) -> Mapping[str, int | None]:
        return first.setdefault("memory", inner(self))

    patch(CpuDevice, "memory", memory)


@mutant("M9", "overlapping copies run over their own source", {"MEM-003": "EXACT"})
def overlap_unnoticed(patch: Patch) -> None:
    def copy_(inner: Any, self: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        same = self.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        if not same or self.dim() < 2:
            return inner(self, source, *args, **kwargs)
        for to, of in zip(self, source, strict=True):
            inner(to, of.clone())
        return self

    patch(torch.Tensor, "copy_", copy_)


@benign("B8", "memory is handed out in granules of 512 bytes", ("MEM", "OFF", "INF-010"))
def padded_allocator(patch: Patch) -> None:
    def padded(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        count, granule = shape.numel(), 512 // dtype.itemsize
        whole = torch.empty((count // granule + 2) * granule, dtype=dtype)
        return whole[granule : granule + count].view(shape)

    def to_device(inner: Any, self: Any, x: Tensor, out: Tensor | None = None) -> Any:
        return inner(self, x, padded(x.shape, x.dtype) if out is None else out)

    def matmul(inner: Any, self: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        out = inner(self, a, b, out_dtype)
        return padded(out.shape, out.dtype).copy_(out)

    def memory(inner: Any, self: Any) -> dict[str, int | None]:
        return {key: value and value // 512 * 512 for key, value in inner(self).items()}

    patch(PortableOffload, "to_device", to_device)
    patch(PortableOffload, "host_empty", lambda inner, self, shape, dtype: padded(shape, dtype))
    patch(PortableMatmul, "matmul", matmul)
    patch(CpuDevice, "memory", memory)
