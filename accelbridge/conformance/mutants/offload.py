"""Defects of offloading that a host without a queue can have too; the others are in ``streams.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelbridge.conformance.mutants import Patch, mutant
from accelbridge.portable.offload import PortableOffload


@mutant("O3", "offloaded copies lose half of their bits", {"OFF-001": "EXACT", "OFF-003": "EXACT"})
def downcast(patch: Patch) -> None:
    def to_host(inner: Any, self: Any, x: Tensor, out: Tensor | None = None) -> Any:
        return inner(self, x.bfloat16().float() if x.dtype == torch.float32 else x, out)

    patch(PortableOffload, "to_host", to_host)


@mutant("O4", "host memory of transfers is never given back", {"OFF-007": "LEAK"})
def host_leak(patch: Patch) -> None:
    held: list[Tensor] = []

    def host_empty(inner: Any, self: Any, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        held.append(inner(self, shape, dtype))
        return held[-1]

    patch(PortableOffload, "host_empty", host_empty)


@mutant("O5", "the device copy is kept", {"OFF-002": "MEMORY"})
def device_copy_kept(patch: Patch) -> None:
    held: list[Tensor] = []

    def to_host(inner: Any, self: Any, x: Tensor, out: Tensor | None = None) -> Any:
        held.append(x.detach())
        return inner(self, x, out)

    patch(PortableOffload, "to_host", to_host)


@mutant("O6", "a file is copied before it is checked", {"OFF-008": "STATE"})
def read_before_checked(patch: Patch) -> None:
    def read(inner: Any, self: Any, path: Path, out: Tensor) -> Tensor:
        raw = path.read_bytes()[-out.numel() * out.element_size() :]
        if len(raw) == out.numel() * out.element_size():
            out.copy_(torch.frombuffer(bytearray(raw), dtype=out.dtype).view(out.shape))
        return inner(self, path, out)

    patch(PortableOffload, "read", read)
