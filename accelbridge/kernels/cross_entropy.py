"""The ops ``cross_entropy`` and ``linear_cross_entropy``, and their forms for a split vocabulary.

Two kernels serve all four: one that reads a row of logits once and leaves the parts of its softmax, and one that reads
it once more and writes its gradient. N rows of V columns of b bytes. Floors, with nothing else to read or write:

    parts       bytes    N V b + 20 N       operations  4 N V, of them N V exponentials
    gradient    bytes  2 N V b + 16 N       operations  4 N V, of them N V exponentials

Backward, a row that does not count is not read. Over a linear layer [V, M] in C columns at a time, N C b bytes hold
logits, and one product more than without is computed: 2 N V M operations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from accelbridge.kernels.limits import check_dtype
from accelbridge.kernels.tiles import tile
from accelbridge.ops.chunked_losses import Softmax, counted_sum, linear_loss, over_ranks
from accelbridge.ops.losses import check_cross_entropy


@triton.jit
def softmax_parts_kernel(
    logits, targets, peak, total, picked, columns, stride, first, BLOCK: tl.constexpr
):  # fmt: skip
    """Of one row: the largest logit, the sum of exp(logit - largest), and the logit whose column, counted from
    ``first``, is the target (0 where that is in none of these columns)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    largest = float("-inf")
    added = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing but -inf so far: exp(-inf - 0), not of a NaN
        added = added * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = higher
    target = tl.load(targets + row) - first
    here = (target >= 0) & (target < columns)
    tl.store(peak + row, largest)
    tl.store(total + row, added)
    tl.store(picked + row, tl.load(logits + target, mask=here, other=0.0).to(tl.float32))


@triton.jit
def softmax_gradient_kernel(
    logits, targets, lse, factor, out, columns, stride, first, BLOCK: tl.constexpr
):  # fmt: skip
    """(exp(logit - lse) - [its column, counted from ``first``, is the target]) * factor, of BLOCK columns of a row.
    A row whose factor is 0 is not read, and gets 0 whatever it holds."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(factor + row)
    read = tl.where(scale == 0.0, 0, columns)
    x = tl.load(logits + row * stride + column, mask=column < read, other=float("-inf")).to(tl.float32)
    hit = column == tl.load(targets + row) - first
    gradient = (tl.exp(x - tl.load(lse + row)) - tl.where(hit, 1.0, 0.0)) * scale
    gradient = tl.where(scale == 0.0, 0.0, gradient)
    tl.store(out + row * columns + column, gradient.to(out.dtype.element_ty), mask=column < columns)


# ------------------------------------------------------------------------------------------------------- custom ops


@torch.library.custom_op("accelbridge::softmax_parts", mutates_args=())
def _parts(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    peak, total, picked = _numbers(logits)
    rows, columns = logits.shape
    if columns == 0:
        return peak.fill_(-torch.inf), total.zero_(), picked.zero_()
    if rows:
        logits, targets = _dense(logits), targets.contiguous()
        softmax_parts_kernel[(rows,)](
            logits, targets, peak, total, picked, columns, logits.stride(0), first, **tile("softmax_parts").launch
        )
    return peak, total, picked


@_parts.register_fake
def _(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    return _numbers(logits)


@torch.library.custom_op("accelbridge::softmax_gradient", mutates_args=())
def _gradient(logits: Tensor, targets: Tensor, lse: Tensor, factor: Tensor, first: int) -> Tensor:
    out = logits.new_empty(logits.shape)
    rows, columns = logits.shape
    if out.numel():
        launch, logits = tile("softmax_gradient").launch, _dense(logits)
        softmax_gradient_kernel[(rows, triton.cdiv(columns, launch["BLOCK"]))](
            logits, targets.contiguous(), lse.contiguous(), factor.contiguous(), out, columns, logits.stride(0), first,
            **launch,
        )  # fmt: skip
    return out


@_gradient.register_fake
def _(logits: Tensor, targets: Tensor, lse: Tensor, factor: Tensor, first: int) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.custom_op("accelbridge::cross_entropy", mutates_args=())
def _forward(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    peak, total, picked = torch.ops.accelbridge.softmax_parts(logits, targets, 0)
    lse = peak + total.log()
    return counted_sum(lse - picked, targets, logits.shape[1], ignore_index), lse


@_forward.register_fake
def _(logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    return logits.new_empty((), dtype=torch.float32), logits.new_empty(logits.shape[:1], dtype=torch.float32)


@torch.library.custom_op("accelbridge::cross_entropy_backward", mutates_args=())
def _backward(grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int) -> Tensor:
    factor = torch.where(targets != ignore_index, grad, 0.0)
    return torch.ops.accelbridge.softmax_gradient(logits, targets, lse, factor, 0)


@_backward.register_fake
def _(grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, targets, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    logits, targets, lse = ctx.saved_tensors
    return torch.ops.accelbridge.cross_entropy_backward(grad, logits, targets, lse, ctx.ignore_index), None, None


_forward.register_autograd(_differentiate, setup_context=_setup)


def _numbers(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    one, two, three = (logits.new_empty(logits.shape[:1], dtype=torch.float32) for _ in range(3))
    return one, two, three


def _dense(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


# --------------------------------------------------------------------------------------------------------- sharding


@register_sharding(torch.ops.accelbridge.cross_entropy.default)
def _(logits, targets, ignore_index):
    return [
        ([Replicate(), Replicate()], [Replicate(), Replicate(), None]),
        ([Partial(), Shard(0)], [Shard(0), Shard(0), None]),
    ]


@register_sharding(torch.ops.accelbridge.cross_entropy_backward.default)
def _(grad, logits, targets, lse, ignore_index):
    return [
        ([Replicate()], [*[Replicate()] * 4, None]),
        ([Shard(0)], [Replicate(), Shard(0), Shard(0), Shard(0), None]),
    ]


# -------------------------------------------------------------------------------------------------------------- ops


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, ignore_index: int = -100) -> Tensor:
    """See :func:`accelbridge.ops.cross_entropy`; float32, bfloat16 and float16. The logits themselves are kept for the
    backward pass, and nothing of their size besides.

    A target outside of the vocabulary gives NaN: to raise, the host would have to wait. Raises ``ValueError`` for
    shapes that don't fit, ``Unsupported`` for other dtypes.
    """
    check_cross_entropy("cross_entropy", logits_NV, targets_N)
    check_dtype("cross_entropy", logits_NV)
    return torch.ops.accelbridge.cross_entropy(logits_NV, targets_N, ignore_index)[0]


def vocab_parallel_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup, ignore_index: int = -100
) -> Tensor:
    """See :func:`accelbridge.ops.vocab_parallel_cross_entropy`, and for the rest :func:`cross_entropy`."""
    check_cross_entropy("vocab_parallel_cross_entropy", logits_NV, targets_N)
    check_dtype("vocab_parallel_cross_entropy", logits_NV)
    return _VocabParallel.apply(logits_NV, targets_N, group, ignore_index)  # type: ignore[return-value]


class _VocabParallel(torch.autograd.Function):
    """Not a custom op: compilers have to see its reductions, and a schema holds no group."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup, ignore_index: int) -> Tensor:
        columns = logits_NV.shape[1]
        ctx.first, ctx.ignore_index = dist.get_rank(group) * columns, ignore_index
        lse_N, picked_N = over_ranks(torch.ops.accelbridge.softmax_parts(logits_NV, targets_N, ctx.first), group)
        ctx.save_for_backward(logits_NV, targets_N, lse_N)
        return counted_sum(lse_N - picked_N, targets_N, columns * dist.get_world_size(group), ignore_index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_NV, targets_N, lse_N = ctx.saved_tensors
        factor_N = torch.where(targets_N != ctx.ignore_index, grad, 0.0)
        gradient_NV = torch.ops.accelbridge.softmax_gradient(logits_NV, targets_N, lse_N, factor_N, ctx.first)
        return gradient_NV, None, None, None


_SOFTMAX = Softmax(torch.ops.accelbridge.softmax_parts, torch.ops.accelbridge.softmax_gradient)


def linear_cross_entropy(x_NM: Tensor, weight_VM: Tensor, targets_N: Tensor, ignore_index: int = -100) -> Tensor:
    """See :func:`accelbridge.ops.linear_cross_entropy`, and for the rest :func:`cross_entropy`."""
    check_dtype("linear_cross_entropy", x_NM)
    return linear_loss(x_NM, weight_VM, targets_N, None, ignore_index, _SOFTMAX)


def vocab_parallel_linear_cross_entropy(
    x_NM: Tensor, weight_VM: Tensor, targets_N: Tensor, group: dist.ProcessGroup, ignore_index: int = -100
) -> Tensor:
    """See :func:`accelbridge.ops.vocab_parallel_linear_cross_entropy`, and for the rest :func:`cross_entropy`."""
    check_dtype("vocab_parallel_linear_cross_entropy", x_NM)
    return linear_loss(x_NM, weight_VM, targets_N, group, ignore_index, _SOFTMAX)
