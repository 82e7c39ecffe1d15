"""MM: dense products. Bounds: docs/conformance.md."""

from __future__ import annotations

import torch

from accelbridge.conformance.bench import Bench
from accelbridge.conformance.registry import case


@case("MM-007", "core")
def empty_dimensions(t: Bench) -> None:
    """K = 0 gives zeros; M = 0 or N = 0 gives an empty result."""
    matmul = t.backend.matmul.matmul
    for m, k, n in ((4, 0, 5), (0, 3, 5), (4, 3, 0)):
        for dtype in (torch.float32, torch.bfloat16):
            a, b = t.normal(m, k, name="a", dtype=dtype), t.normal(k, n, name="b", dtype=dtype)
            t.equal(t.run(matmul, t.put(a), t.put(b)), torch.zeros(m, n, dtype=dtype), name=f"{m}x{k}x{n} {dtype}")
    # One product that is not constant, or a result that is always 0 would do.
    a, b = t.integers(4, 3, name="a"), t.integers(3, 5, name="b")
    t.equal(t.run(matmul, t.put(a), t.put(b)), (a.double() @ b.double()).float(), name="4x3x5")
