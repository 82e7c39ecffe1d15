"""How the fp8 ops lie over ranks, for DTensor: what is in rows of its own stays on its rank, the rest is gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from accelbridge.precision.scalings import scaling_of

Strategies = list[tuple[list[Any], list[Any]]]
"""Placements of the outputs and of the inputs that go together; None for what is no tensor."""


def register_quantize(quantize: Any, quantize_by: Any) -> None:
    """Rules of the two ops of :mod:`.quantize`."""

    @register_sharding(quantize)
    def _(x: Any, format: str, largest: float, scaling: str) -> Strategies:
        rest = [None, None, None]
        whole = ([Replicate(), Replicate()], [Replicate(), *rest])
        rows = ([Shard(0), Shard(0)], [Shard(0), *rest])
        return [whole, rows] if scaling_of(scaling).block[0] == 1 else [whole]

    @register_sharding(quantize_by)
    def _(x: Any, scale: Any, format: str, largest: float, block: list[int]) -> Strategies:
        rest = [None, None, None]
        whole = ([Replicate()], [Replicate(), Replicate(), *rest])
        if block[0] == 1:
            return [whole, ([Shard(0)], [Shard(0), Shard(0), *rest])]
        return [whole, ([Shard(0)], [Shard(0), Replicate(), *rest])] if block == [-1, -1] else [whole]


def register_scaled_mm(scaled_mm: Any) -> None:
    """The rule of the op of :mod:`.scaled_mm`."""

    @register_sharding(scaled_mm)
    def _(
        a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any,
        a_format: str, b_format: str, a_block: list[int], b_block: list[int], out_dtype: torch.dtype,
    ) -> Strategies:  # fmt: skip
        rest = [None] * 5
        same = Replicate() if bias is not None else None
        found: Strategies = [([Replicate()], [*[Replicate()] * 4, same, *rest])]
        if a_block[0] in (1, -1):
            scales = Shard(0) if a_block[0] == 1 else Replicate()
            found.append(([Shard(0)], [Shard(0), Replicate(), scales, Replicate(), same, *rest]))
        if b_block[0] in (1, -1):
            scales = Shard(0) if b_block[0] == 1 else Replicate()
            split = Shard(0) if bias is not None else None
            found.append(([Shard(1)], [Replicate(), Shard(0), Replicate(), scales, split, *rest]))
        return found
