"""Defects of dense products."""

from __future__ import annotations

from typing import Any

import torch

from accelbridge.conformance.mutants import Patch, mutant
from accelbridge.portable.matmul import PortableMatmul


@mutant("G11", "K=0 leaves garbage", {"MM-007": "EXACT", "MEM-006": "EXACT"})
def garbage_at_k0(patch: Patch) -> None:
    def matmul(inner: Any, self: Any, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> Any:
        out = inner(self, a, b, out_dtype)
        return torch.full_like(out, 7.0) if a.shape[-1] == 0 else out

    patch(PortableMatmul, "matmul", matmul)
