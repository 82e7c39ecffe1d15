"""Portable references of the op cross_entropy and of its form for a split vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, ignore_index: int = -100) -> Tensor:
    """Sum over tokens of ``logsumexp(logits) - logits[target]``, natural logarithm: a float32 scalar.

    A sum, so that the caller can divide by the number of targets of a whole step. Tokens whose target is
    ``ignore_index`` count nothing and get zero gradient, also when that is all of them. Computed in float32
    whatever the dtype of the logits (float64 for float64).
    """
    check_cross_entropy("cross_entropy", logits_NV, targets_N)
    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return F.cross_entropy(wide, targets_N, ignore_index=ignore_index, reduction="sum")


def vocab_parallel_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup, ignore_index: int = -100
) -> Tensor:
    """:func:`cross_entropy` of logits whose vocabulary is split evenly over ``group``, in order of its ranks.

    ``logits_NV [N, V / size]`` are this rank's columns, ``targets_N`` count over the whole vocabulary and are equal
    on all ranks, as is the result. Two reductions of N and 2 N float32 numbers travel, never logits. The gradient
    needs none: it is that of this rank's columns alone. A target outside the vocabulary fails as in
    :func:`cross_entropy`, on all ranks.
    """
    check_cross_entropy("vocab_parallel_cross_entropy", logits_NV, targets_N)
    return _VocabParallel.apply(logits_NV, targets_N, group, ignore_index)  # type: ignore[return-value]


def check_cross_entropy(op: str, logits_NV: Tensor, targets_N: Tensor) -> None:
    """Raise ``ValueError`` unless these are logits [N, V] (this rank's columns of them) and targets [N]."""
    if logits_NV.dim() != 2 or targets_N.shape != logits_NV.shape[:1]:
        raise ValueError(
            f"{op} takes logits [N, V] and targets [N]; "
            f"found logits {tuple(logits_NV.shape)} and targets {tuple(targets_N.shape)}"
        )


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup, ignore_index: int) -> Tensor:
        wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        columns = wide.shape[1]
        peak_N = wide.amax(-1)
        dist.all_reduce(peak_N, dist.ReduceOp.MAX, group)
        shifted = wide - peak_N.unsqueeze(-1)
        local_N = targets_N - dist.get_rank(group) * columns
        counted = targets_N != ignore_index
        here = counted & (local_N >= 0) & (local_N < columns)
        known = (targets_N >= 0) & (targets_N < columns * dist.get_world_size(group))
        # Looked up as 0 where another rank has it; one that no rank has stays as it is, and fails below.
        local_N = torch.where(here | (counted & ~known), local_N, 0)
        picked_N = torch.where(here, shifted.gather(-1, local_N.unsqueeze(-1)).squeeze(-1), 0.0)
        weights = shifted.exp_()
        sums_2N = torch.stack((weights.sum(-1), picked_N))
        dist.all_reduce(sums_2N, dist.ReduceOp.SUM, group)
        weights /= sums_2N[0].unsqueeze(-1)
        ctx.save_for_backward(weights, local_N, here, counted)
        ctx.dtype = logits_NV.dtype
        return torch.where(counted, sums_2N[0].log() - sums_2N[1], 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, local_N, here, counted = ctx.saved_tensors
        gradient = weights.scatter_add(-1, local_N.unsqueeze(-1), -here.to(weights.dtype).unsqueeze(-1))
        gradient *= (grad * counted).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None
