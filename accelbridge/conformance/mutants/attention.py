"""Defects of attention: a tiled kernel that is right by default, and kinds of it with one defect each.

It replaces the kernel of the CPU backend, both behind the interface and as the candidate of the op.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from accelbridge import ops
from accelbridge.backend import Mask
from accelbridge.conformance.mutants import Patch, benign, mutant
from accelbridge.conformance.mutants.matmul import declare, misread, tf32
from accelbridge.cpu import attention as cpu
from accelbridge.ops.dot_product import check_attention


class Tiled:
    """Attention over tiles of keys with a running maximum and sum (Milakov and Gimelshein, arXiv:1805.02867), softmax
    and its gradient rounded to the dtype of the inputs, and a backward pass that makes the softmax anew from lse.

    Each method below is a step that a defect can change.
    """

    tile = 64

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        self.check(q, k, v, mask, softcap)
        q, k, v = self.read(q), self.read(k), self.read(v)
        out, lse = _Autograd.apply(self, q, k, v, mask, self.factor(scale, q.shape[-1]), softcap)  # pyright: ignore
        if out.requires_grad:
            out.register_hook(self.read_gradient)
        return (out, lse) if return_lse else out

    # ---- arguments
    def check(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, softcap: float | None) -> None:
        check_attention(q, k, v, mask, softcap)

    def read(self, x: Tensor) -> Tensor:
        return x

    def read_gradient(self, x: Tensor) -> Tensor:
        return x

    def factor(self, scale: float | None, head_dim: int) -> float:
        return head_dim**-0.5 if scale is None else scale

    def cap(self, softcap: float | None) -> float | None:
        return softcap

    # ---- which keys
    def here(self, queries: int, keys: int) -> Tensor:
        """Position of each query among the keys."""
        return torch.arange(queries)[:, None] + keys - queries

    def visible(self, mask: Mask, here: Tensor, there: Tensor) -> Tensor:
        """bool, for keys at positions ``there``."""
        seen = torch.ones(1, 1, len(here), len(there), dtype=torch.bool)
        if mask.causal:
            seen = seen & self.after(here, there)
        if mask.window is not None:
            seen = seen & self.near(here, there, mask.window)
        if mask.segments_BS is not None:
            seen = seen & self.same(mask.segments_BS, there)
        return seen

    def after(self, here: Tensor, there: Tensor) -> Tensor:
        return there <= here

    def near(self, here: Tensor, there: Tensor, window: int) -> Tensor:
        return here - there < window

    def same(self, segments: Tensor, there: Tensor) -> Tensor:
        return segments[:, None, :, None] == segments[:, None, None, there]

    def tiles(self, keys: int) -> list[slice]:
        return [slice(start, min(keys, start + self.tile)) for start in range(0, keys, self.tile)]

    # ---- heads
    def spread(self, x: Tensor, heads: int) -> Tensor:
        """Key/value heads for each query head."""
        return x.repeat_interleave(heads // x.shape[1], 1)

    def fold(self, x: Tensor, groups: int) -> Tensor:
        """Gradients of the query heads, for each key/value head."""
        return x.unflatten(1, (groups, -1)).sum(2)

    # ---- forward
    def rescale(self, old: Tensor, new: Tensor) -> Tensor:
        return (old - new).exp()

    def probabilities(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    def normalise(self, out: Tensor, total: Tensor) -> Tensor:
        return out / total.where(total > 0, 1.0)

    def output(self, out: Tensor) -> Tensor:
        return out

    def report(self, lse: Tensor, factor: float) -> Tensor:
        """lse as the caller sees it."""
        return lse

    # ---- backward
    def mean(self, out: Tensor, dout: Tensor, dlse: Tensor) -> Tensor:
        return (out * dout).sum(-1) - dlse

    def slope(self, softmax: Tensor, pull: Tensor, mean: Tensor) -> Tensor:
        return softmax * (pull - mean)

    def softmax_of_values(self, masked: Tensor, unmasked: Tensor) -> Tensor:
        """What dV sums over."""
        return masked


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: Tiled, q: Tensor, k: Tensor, v: Tensor, mask: Mask, factor: float, cap: float | None
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        query, key, value = q.to(wide), how.spread(k, q.shape[1]).to(wide), how.spread(v, q.shape[1]).to(wide)
        out, total = query.new_zeros(*q.shape[:3], v.shape[-1]), query.new_zeros(*q.shape[:3], 1)
        peak = torch.full_like(total, -math.inf)
        cap = how.cap(cap)
        for at in how.tiles(k.shape[2]):
            scores = _scores(how, query, key, mask, factor, cap, at)[0]
            top = torch.maximum(peak, scores.amax(-1, keepdim=True))
            safe = top.where(top != -math.inf, 0.0)
            weights = (scores - safe).exp()
            less = how.rescale(peak, safe)
            total = total * less + weights.sum(-1, keepdim=True)
            out = out * less + how.probabilities(weights, q.dtype) @ value[:, :, at]
            peak = top
        out = how.output(how.normalise(out, total).to(q.dtype))
        lse = (peak + total.log()).squeeze(-1)
        ctx.how, ctx.mask, ctx.factor, ctx.cap = how, mask, factor, cap
        ctx.save_for_backward(q, k, v, out, lse)
        return out, how.report(lse, factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        how: Tiled = ctx.how
        q, k, v, out, lse = ctx.saved_tensors
        wide = lse.dtype
        query, key, value = q.to(wide), how.spread(k, q.shape[1]).to(wide), how.spread(v, q.shape[1]).to(wide)
        dout, safe = grads[0].to(wide), lse.where(lse != -math.inf, 0.0).unsqueeze(-1)
        mean = how.mean(out.to(wide), dout, grads[1]).unsqueeze(-1)
        dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for at in how.tiles(k.shape[2]):
            scores, raw = _scores(how, query, key, ctx.mask, ctx.factor, ctx.cap, at)
            softmax = (scores - safe).exp()
            slope = how.slope(softmax, dout @ value[:, :, at].mT, mean) * ctx.factor
            if ctx.cap is not None:
                slope = slope * (1 - (raw / ctx.cap) ** 2)
            slope = slope.to(q.dtype).to(wide)
            dq = dq + slope @ key[:, :, at]
            dk[:, :, at] = slope.mT @ query
            dv[:, :, at] = how.softmax_of_values(softmax, (raw - safe).exp()).to(q.dtype).to(wide).mT @ dout
        groups = k.shape[1]
        return (
            None,
            dq.to(q.dtype),
            how.fold(dk, groups).to(q.dtype),
            how.fold(dv, groups).to(q.dtype),
            None,
            None,
            None,
        )


def _scores(
    how: Tiled, query: Tensor, key: Tensor, mask: Mask, factor: float, cap: float | None, at: slice
) -> tuple[Tensor, Tensor]:
    """Scores of one tile, masked and as they were."""
    raw = query @ key[:, :, at].mT * factor
    if cap is not None:
        raw = cap * torch.tanh(raw / cap)
    there = torch.arange(at.start, at.stop)
    visible = how.visible(mask, how.here(query.shape[2], key.shape[2]), there)
    return raw.where(visible, -math.inf), raw


def bind(patch: Patch, kernel: Tiled) -> None:
    """Make ``kernel`` what the CPU backend computes attention with."""

    def attention(_inner: Any, _self: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs)

    def sdpa(_inner: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs)

    patch(cpu.CpuAttention, "attention", attention)
    patch(cpu, "sdpa", sdpa)


# ------------------------------------------------------------------------------------------------------- masks


@mutant("A1", "aligns a causal mask top-left", {"ATT-003": "BOUND"})
def top_left(patch: Patch) -> None:
    class Kernel(Tiled):
        def here(self, queries: int, keys: int) -> Tensor:
            return torch.arange(queries)[:, None]

    bind(patch, Kernel())


@mutant("A2", "a causal mask shows one key too many", {"ATT-002": "BOUND"})
def one_key_too_many(patch: Patch) -> None:
    class Kernel(Tiled):
        def after(self, here: Tensor, there: Tensor) -> Tensor:
            return there <= here + 1

    bind(patch, Kernel())


@mutant("A6", "a document sees the first position of the next", {"ATT-011": "BOUND", "ATT-012": "BOUND"})
def leaks_into_the_next(patch: Patch) -> None:
    class Kernel(Tiled):
        def same(self, segments: Tensor, there: Tensor) -> Tensor:
            own = segments[:, None, :, None]
            return (own == segments[:, None, None, there]) | (own == segments[:, None, None, (there - 1).clamp(min=0)])

    bind(patch, Kernel())


@mutant("A7", "skips the last tile of keys", {"ATT-001": "BOUND", "ATT-006": "EXACT", "ATT-018": "SQNR"})
def skips_the_last_tile(patch: Patch) -> None:
    class Kernel(Tiled):
        def tiles(self, keys: int) -> list[slice]:
            whole = super().tiles(keys)
            return whole[:-1] if len(whole) > 1 else whole

    bind(patch, Kernel())


@mutant("A9", "queries that see nothing give NaN", {"ATT-004": "BOUND", "ATT-023": "EXACT"})
def nan_in_blind_rows(patch: Patch) -> None:
    class Kernel(Tiled):
        def normalise(self, out: Tensor, total: Tensor) -> Tensor:
            return out / total

    bind(patch, Kernel())


@mutant("A18", "a window shows one key too many at its left edge", {"ATT-014": "BOUND"})
def window_too_wide(patch: Patch) -> None:
    class Kernel(Tiled):
        def near(self, here: Tensor, there: Tensor, window: int) -> Tensor:
            return here - there <= window

    bind(patch, Kernel())


@mutant("A24", "does not look at its arguments", {"ATT-013": "ERROR", "ATT-024": "ERROR"})
def checks_nothing(patch: Patch) -> None:
    class Kernel(Tiled):
        def check(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, softcap: float | None) -> None:
            return

    bind(patch, Kernel())


# ----------------------------------------------------------------------------------------------------- forward


@mutant("A3", "lse is a logarithm to base 2", {"ATT-005": "BOUND", "ATT-022": "BOUND"})
def lse_in_log2(patch: Patch) -> None:
    class Kernel(Tiled):
        def report(self, lse: Tensor, factor: float) -> Tensor:
            return lse / math.log(2)

    bind(patch, Kernel())


@mutant("A4", "lse is of scores without their scale", {"ATT-005": "BOUND", "ATT-015": "BOUND", "ATT-022": "BOUND"})
def lse_without_scale(patch: Patch) -> None:
    class Kernel(Tiled):
        def report(self, lse: Tensor, factor: float) -> Tensor:
            return lse / factor if factor else lse

    bind(patch, Kernel())


@mutant("A5", "query head h reads key/value head h mod G", {"ATT-007": "EXACT"})
def heads_in_turn(patch: Patch) -> None:
    class Kernel(Tiled):
        def spread(self, x: Tensor, heads: int) -> Tensor:
            return x.repeat(1, heads // x.shape[1], 1, 1)

    bind(patch, Kernel())


@mutant("A8", "does not rescale what was summed when the maximum grows", {"ATT-001": "BOUND", "ATT-005": "BOUND"})
def no_rescale(patch: Patch) -> None:
    class Kernel(Tiled):
        def rescale(self, old: Tensor, new: Tensor) -> Tensor:
            return torch.ones_like(old)

    bind(patch, Kernel())


@mutant("A13", "ignores the scale that it is given", {"ATT-015": "BOUND"})
def ignores_scale(patch: Patch) -> None:
    class Kernel(Tiled):
        def factor(self, scale: float | None, head_dim: int) -> float:
            return head_dim**-0.5

    bind(patch, Kernel())


@mutant("A14", "rounds the softmax to fp8, undeclared", {"ATT-018": "SQNR"})
def softmax_in_fp8(patch: Patch) -> None:
    class Kernel(Tiled):
        def probabilities(self, x: Tensor, dtype: torch.dtype) -> Tensor:
            return x.to(torch.float8_e4m3fn).to(x.dtype)

    bind(patch, Kernel())


@mutant("A22", "rounds float32 inputs to TF32, undeclared", {"ATT-001": "BOUND", "ATT-018": "SQNR"})
def rounds_to_tf32(patch: Patch) -> None:
    bind(patch, _InTf32())


class _InTf32(Tiled):
    def read(self, x: Tensor) -> Tensor:
        return _Tf32.apply(x) if x.dtype == torch.float32 else x  # pyright: ignore[reportReturnType]


class _Tf32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return tf32(x.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@mutant("A23", "one row of 1024 is 0", {"ATT-001": "BOUND", "ATT-018": "SQNR"})
def zero_row(patch: Patch) -> None:
    class Kernel(Tiled):
        def output(self, out: Tensor) -> Tensor:
            if out.shape[2] == 1024:
                out[:, :, 777] = 0
            return out

    bind(patch, Kernel())


@mutant("A25", "ignores the cap of the scores", {"ATT-015": "BOUND"})
def ignores_cap(patch: Patch) -> None:
    class Kernel(Tiled):
        def cap(self, softcap: float | None) -> float | None:
            return None

    bind(patch, Kernel())


@mutant("A26", "takes inputs and gradients for contiguous", {"ATT-019": "BOUND"})
def ignores_strides(patch: Patch) -> None:
    class Kernel(Tiled):
        def read(self, x: Tensor) -> Tensor:
            return x + (misread(x) - x).detach()

        def read_gradient(self, x: Tensor) -> Tensor:
            return misread(x)

    bind(patch, Kernel())


@mutant("A27", "takes NaN for 0", {"ATT-020": "EXACT"})
def swallows_nan(patch: Patch) -> None:
    class Kernel(Tiled):
        def read(self, x: Tensor) -> Tensor:
            return x.nan_to_num(0.0)

    bind(patch, Kernel())


# ---------------------------------------------------------------------------------------------------- backward


@mutant("A11", "the backward pass lacks rowsum(dO O)", {"ATT-008": ("BOUND", "SQNR")})
def no_mean(patch: Patch) -> None:
    class Kernel(Tiled):
        def mean(self, out: Tensor, dout: Tensor, dlse: Tensor) -> Tensor:
            return -dlse

    bind(patch, Kernel())


@mutant("A12", "dK and dV of a group come from its first head alone", {"ATT-009": "BOUND"})
def first_head_only(patch: Patch) -> None:
    class Kernel(Tiled):
        def fold(self, x: Tensor, groups: int) -> Tensor:
            return x.unflatten(1, (groups, -1))[:, :, 0]

    bind(patch, Kernel())


@mutant("A17", "dV ignores the mask", {"ATT-008": "BOUND", "ATT-012": "BOUND"})
def unmasked_dv(patch: Patch) -> None:
    class Kernel(Tiled):
        def softmax_of_values(self, masked: Tensor, unmasked: Tensor) -> Tensor:
            return unmasked

    bind(patch, Kernel())


@mutant("A19", "drops the gradient that comes through lse", {"ATT-010": "BOUND"})
def drops_dlse(patch: Patch) -> None:
    class Kernel(Tiled):
        def mean(self, out: Tensor, dout: Tensor, dlse: Tensor) -> Tensor:
            return (out * dout).sum(-1)

    bind(patch, Kernel())


@mutant("A20", "the gradient of the scores has the wrong sign", {"ATT-004": "BOUND", "ATT-008": "BOUND"})
def wrong_sign(patch: Patch) -> None:
    class Kernel(Tiled):
        def slope(self, softmax: Tensor, pull: Tensor, mean: Tensor) -> Tensor:
            return softmax * (mean - pull)

    bind(patch, Kernel())


# ------------------------------------------------------------------------------------------------------ dropout


def _bind_dropout(dropout: Any) -> None:
    ops._REFERENCE["dropout"] = dropout


@mutant("A10", "dropout draws another mask in the backward pass", {"ATT-016": "BOUND"})
def other_mask_backward(patch: Patch) -> None:
    right = ops.reference("dropout")

    class Dropout(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, keys: Tensor, *rest: Any) -> Tensor:
            ctx.rest = (keys, *rest)
            return right(x, keys, *rest)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            keys, *rest = ctx.rest
            return right(grads[0], keys + 1, *rest), *(None for _ in ctx.rest)

    _bind_dropout(Dropout.apply)


@mutant("A28", "dropout keeps with the probability with which it should drop", {"ATT-016": "BOUND"})
def keeps_what_it_should_drop(patch: Patch) -> None:
    right = ops.reference("dropout")

    def dropout(x: Tensor, keys: Tensor, site: Tensor, p: float, starts: tuple[int, ...] = ()) -> Tensor:
        return right(x, keys, site, 1.0 - p, starts) * (p / (1.0 - p))

    _bind_dropout(dropout)


# ------------------------------------------------------------------------------------- right, though different


@benign("B7", "other tiles: 16 keys, then 256", ("ATT",))
def other_tiles(patch: Patch) -> None:
    class Kernel(Tiled):
        def tiles(self, keys: int) -> list[slice]:
            edges = [*range(0, min(keys, 48), 16), *range(48, keys, 256), keys]
            return [slice(start, stop) for start, stop in itertools.pairwise(edges)]

    bind(patch, Kernel())


@benign("B10", "rounds float32 inputs of attention to TF32, as declared", ("ATT-001", "ATT-005", "ATT-008", "ATT-018"))
def declared_tf32(patch: Patch) -> None:
    bind(patch, _InTf32())
    declare(patch, matmul__float32="tf32")
