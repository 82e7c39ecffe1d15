"""Defects of collectives: wrappers round torch.distributed in the rank, so that no vendor library is modified."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accelbridge.conformance.mutants import Patch, mutant


@mutant("L5", "the tail (numel mod 8) is not reduced", {"COL-001": "EXACT"})
def tail_not_reduced(patch: Patch) -> None:
    def all_reduce(inner: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        before = tensor.clone()
        done = inner(tensor, *args, **kwargs)
        flat, cut = tensor.reshape(-1), tensor.numel() // 8 * 8
        flat[cut:] = before.reshape(-1)[cut:]
        return done

    patch(dist, "all_reduce", all_reduce)
