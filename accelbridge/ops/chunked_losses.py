"""Portable reference of the op linear_cross_entropy and of its form for a split vocabulary.

The vocabulary is gone through in chunks of columns. Forward, each leaves three numbers per token, the parts of its
softmax; backward, its logits are computed again. So logits never exist whole, nor does anything of their size; a chunk
of the weight's gradient is one product, written once; and a vocabulary that is split over ranks needs the two small
reductions of :func:`~accelbridge.ops.vocab_parallel_cross_entropy`, whatever the number of chunks. Chunks of tokens
instead could have gradients ready in the forward pass, one product in four less, but would add up the weight's gradient
chunk by chunk: rounded each time, or in a float32 copy of the weight's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

COLUMNS = 8192
"""Columns of the vocabulary whose logits exist at a time."""

Parts = tuple[Tensor, Tensor, Tensor]
"""Per token, in float32 (float64 for float64): the largest logit of some columns, the sum of ``exp(logit - largest)``
over them, and the logit of its target where that is one of them, else 0."""


class Softmax(NamedTuple):
    """The two steps of which an implementation of these ops may have its own. ``first``: the index, over the whole
    vocabulary, of column 0 of the logits; targets count over the whole vocabulary."""

    parts: Callable[[Tensor, Tensor, int], Parts]
    """``(logits_NC, targets_N, first)``."""
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
    """``(logits_NC, targets_N, lse_N, factor_N, first)``: ``(exp(logits - lse) - is_target) * factor`` in the dtype of
    the logits, which it may overwrite; 0 where the factor is."""


def linear_cross_entropy(x_NM: Tensor, weight_VM: Tensor, targets_N: Tensor, ignore_index: int = -100) -> Tensor:
    """``cross_entropy(linear(x, weight), targets)``, of which logits never exist whole: a float32 scalar.

    Logits are rounded to the dtype of x, as those of :func:`accelbridge.ops.linear` are. The gradient of x is a sum of
    ``V / COLUMNS`` products, each rounded to that dtype, in float32. A target outside of the vocabulary gives NaN.
    Raises ``ValueError`` for shapes and dtypes that don't fit.
    """
    return linear_loss(x_NM, weight_VM, targets_N, None, ignore_index, REFERENCE)


def vocab_parallel_linear_cross_entropy(
    x_NM: Tensor, weight_VM: Tensor, targets_N: Tensor, group: dist.ProcessGroup, ignore_index: int = -100
) -> Tensor:
    """:func:`linear_cross_entropy` with a vocabulary that is split evenly over ``group``, in order of its ranks.

    ``weight_VM [V / size, M]`` are this rank's rows; x and targets, which count over the whole vocabulary, are equal on
    all ranks, as is the result. Two reductions of N and 2 N float32 numbers travel. The gradient of x is that of this
    rank's columns alone: its sum over the ranks is for the caller to make.
    """
    return linear_loss(x_NM, weight_VM, targets_N, group, ignore_index, REFERENCE)


def linear_loss(
    x_NM: Tensor,
    weight_VM: Tensor,
    targets_N: Tensor,
    group: dist.ProcessGroup | None,
    ignore_index: int,
    softmax: Softmax,
) -> Tensor:
    """Both ops, with the steps that ``softmax`` has."""
    if x_NM.dim() != 2 or weight_VM.dim() != 2 or x_NM.shape[1] != weight_VM.shape[1]:
        raise ValueError(
            f"linear_cross_entropy takes x [N, M] and weight [V, M] with the same M; "
            f"found x {tuple(x_NM.shape)} and weight {tuple(weight_VM.shape)}"
        )
    if targets_N.shape != x_NM.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy takes x [N, M] and targets [N]; "
            f"found x {tuple(x_NM.shape)} and targets {tuple(targets_N.shape)}"
        )
    if x_NM.dtype != weight_VM.dtype or x_NM.device != weight_VM.device:
        raise ValueError(
            f"linear_cross_entropy takes x and weight of one dtype on one device; "
            f"found x {x_NM.dtype} on {x_NM.device} and weight {weight_VM.dtype} on {weight_VM.device}"
        )
    return _LinearLoss.apply(x_NM, weight_VM, targets_N, group, ignore_index, softmax)  # type: ignore[return-value]


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NM: Tensor,
        weight_VM: Tensor,
        targets_N: Tensor,
        group: dist.ProcessGroup | None,
        ignore_index: int,
        softmax: Softmax,
    ) -> Tensor:
        found: Parts | None = None
        for rows, first in _chunks(weight_VM, group):
            parts = softmax.parts(x_NM @ weight_VM[rows].T, targets_N, first)
            found = parts if found is None else _merged(found, parts)
        assert found is not None, "there is always one chunk, an empty one at least"
        lse_N, picked_N = over_ranks(found, group)
        ctx.save_for_backward(x_NM, weight_VM, targets_N, lse_N)
        ctx.group, ctx.ignore_index, ctx.softmax = group, ignore_index, softmax
        size = 1 if group is None else dist.get_world_size(group)
        return counted_sum(lse_N - picked_N, targets_N, weight_VM.shape[0] * size, ignore_index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_NM, weight_VM, targets_N, lse_N = ctx.saved_tensors
        factor_N = torch.where(targets_N != ctx.ignore_index, grad, 0.0)
        dx_NM = torch.zeros_like(x_NM, dtype=lse_N.dtype) if ctx.needs_input_grad[0] else None
        dw_VM = torch.empty_like(weight_VM) if ctx.needs_input_grad[1] else None
        for rows, first in _chunks(weight_VM, ctx.group):
            weight_CM = weight_VM[rows]
            gradient_NC = ctx.softmax.gradient(x_NM @ weight_CM.T, targets_N, lse_N, factor_N, first)
            if dx_NM is not None:
                dx_NM += gradient_NC @ weight_CM
            if dw_VM is not None:
                torch.mm(gradient_NC.T, x_NM, out=dw_VM[rows])
        return None if dx_NM is None else dx_NM.to(x_NM.dtype), dw_VM, None, None, None, None


def _chunks(weight_VM: Tensor, group: dist.ProcessGroup | None) -> Iterator[tuple[slice, int]]:
    """(rows of the weight, index of the first over the whole vocabulary)."""
    rows = weight_VM.shape[0]
    offset = 0 if group is None else dist.get_rank(group) * rows
    for start in range(0, max(rows, 1), COLUMNS):
        yield slice(start, start + COLUMNS), offset + start


def _merged(a: Parts, b: Parts) -> Parts:
    """The parts of both their columns together."""
    peak_N = torch.maximum(a[0], b[0])
    return peak_N, _rescaled(a, peak_N) + _rescaled(b, peak_N), a[2] + b[2]


def _rescaled(parts: Parts, peak_N: Tensor) -> Tensor:
    """The sum of exponentials with ``peak_N`` subtracted instead. Where that is -inf, nothing but -inf was seen, and
    the sum stays 0."""
    return parts[1] * torch.exp(parts[0] - torch.where(peak_N == -torch.inf, 0.0, peak_N))


def over_ranks(parts: Parts, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """``(lse_N, picked_N)`` over the columns of all ranks of ``group``, by two reductions; None: of these alone."""
    if group is None:
        return parts[0] + parts[1].log(), parts[2]
    peak_N = parts[0].clone()
    dist.all_reduce(peak_N, dist.ReduceOp.MAX, group)
    sums_2N = torch.stack((_rescaled(parts, peak_N), parts[2]))
    dist.all_reduce(sums_2N, dist.ReduceOp.SUM, group)
    return peak_N + sums_2N[0].log(), sums_2N[1]


def counted_sum(losses_N: Tensor, targets_N: Tensor, vocabulary: int, ignore_index: int) -> Tensor:
    """Of the tokens that count; NaN where one's target is outside of the vocabulary: to raise, the host would have to
    wait."""
    known = (targets_N >= 0) & (targets_N < vocabulary)
    return torch.where(targets_N != ignore_index, torch.where(known, losses_N, torch.nan), 0.0).sum()


# ----------------------------------------------------------------------------------------------- the two steps


def _parts(logits_NC: Tensor, targets_N: Tensor, first: int) -> Parts:
    wide = logits_NC.to(torch.promote_types(logits_NC.dtype, torch.float32))
    if not wide.shape[1]:
        zero_N = wide.new_zeros(wide.shape[0])
        return zero_N - torch.inf, zero_N, zero_N
    peak_N = wide.amax(-1)
    total_N = torch.exp(wide - torch.where(peak_N == -torch.inf, 0.0, peak_N).unsqueeze(-1)).sum(-1)
    here_N, column_N1 = _columns(targets_N, first, wide.shape[1])
    return peak_N, total_N, torch.where(here_N, wide.gather(-1, column_N1).squeeze(-1), 0.0)


def _gradient(logits_NC: Tensor, targets_N: Tensor, lse_N: Tensor, factor_N: Tensor, first: int) -> Tensor:
    if not logits_NC.shape[1]:
        return logits_NC
    weights = torch.exp(logits_NC.to(lse_N.dtype) - lse_N.unsqueeze(-1))
    here_N, column_N1 = _columns(targets_N, first, weights.shape[1])
    weights.scatter_add_(-1, column_N1, -here_N.to(weights.dtype).unsqueeze(-1))
    factor_N1 = factor_N.unsqueeze(-1)
    return torch.where(factor_N1 == 0, 0.0, weights * factor_N1).to(logits_NC.dtype)


def _columns(targets_N: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Which targets are in these columns, and where; 0 for those that are not."""
    local_N = targets_N - first
    here_N = (local_N >= 0) & (local_N < columns)
    return here_N, torch.where(here_N, local_N, 0).unsqueeze(-1)


REFERENCE = Softmax(_parts, _gradient)
