"""COL: collectives, on a process group as the backend makes it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accelbridge.conformance.bench import Bench
from accelbridge.conformance.registry import case

_SIZES = (0, 1, 7, 8, 1000, 2**20 + 3)


def _mine(t: Bench, size: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What ``rank`` contributes: small integers by hash, so that a sum is exact in any order."""
    return t.integers(size, low=-8, high=8, name=f"{size}/rank{rank}", dtype=dtype)


@case("COL-001", "core", worlds=(2,))
def all_reduce_exact(t: Bench) -> None:
    """all_reduce SUM of hashed integers is exact, with the same bits on every rank."""
    for size in _SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            every = [_mine(t, size, rank, dtype) for rank in range(t.world.size)]
            x = t.put(every[t.world.rank])
            t.run(dist.all_reduce, x)
            t.equal(x, torch.stack(every).double().sum(0).to(dtype), name=f"{size} {dtype}")
