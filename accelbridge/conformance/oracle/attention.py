"""Attention in float64, forward and backward, and how far from it a good kernel may be.

Masks come before the softmax; a row that sees nothing gives 0, -inf and no gradient. With u the unit roundoff of the
output, w that of the format in which the softmax P meets the values, and gamma(n) = n 2^-24 / (1 - n 2^-24):

    d    = (gamma(D) + 4 * 2^-24) * max_j scale (|q| |k|^T)_ij + 8 * 2^-24       error of a row's scores and of exp
    |O' - O|     <= u |O| + (1 + u) (w + 2 d + gamma(Sk)) P |V|
    |lse' - lse| <= d + (8 + sqrt(Sk)) 2^-24 (1 + |lse|)

and, with M = P o (|dO| |V|^T + rowsum(|dO| |O|)) and e = w + 2 d + 2 gamma(D) + gamma(S):

    |dV' - dV| <= u |dV| + (e o P)^T |dO|
    |dQ' - dQ| <= u |dQ| + scale ((2 x + e) o M) |K|, and dK with Q in the place of K

with x the unit roundoff of the inputs: the score gradient, and the O it is made from, are rounded to their format. The
gradient of a key or value sums over the queries of its group of heads, so S there is their number. All of these but the
bound of lse are wider by what underflow may take of each term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from accelbridge.conformance.oracle.matmul import ROUNDOFF, Arithmetic, gamma

_U = 2.0**-24


@dataclass(frozen=True)
class Rules:
    """The mask and the options of one call."""

    causal: bool = False
    window: int | None = None
    segments: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None

    def visible(self, queries: int, keys: int) -> Tensor:
        """bool, broadcastable to [B, H, queries, keys]. The last query stands at the last key; a window counts the
        query's own position; equal segment ids see each other."""
        here = torch.arange(queries)[:, None] + (keys - queries)
        there = torch.arange(keys)[None, :]
        seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
        if self.causal:
            seen = seen & (there <= here)
        if self.window is not None:
            seen = seen & (there > here - self.window)
        if self.segments is not None:
            seen = seen & (self.segments[:, None, :, None] == self.segments[:, None, None, :])
        return seen


@dataclass(frozen=True)
class Exact:
    """One call in float64. ``probabilities``: the roundoff of the softmax's format, where it is not the inputs'."""

    q: Tensor
    k: Tensor
    v: Tensor
    rules: Rules
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    probabilities: float | None = None

    # ------------------------------------------------------------------------------------------------- results

    @cached_property
    def _wide(self) -> tuple[Tensor, Tensor, Tensor]:
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (x.double().repeat_interleave(group, 1) for x in (self.k, self.v))
        return self.q.double(), k, v

    @property
    def _scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.rules.scale is None else self.rules.scale

    @cached_property
    def _visible(self) -> Tensor:
        return self.rules.visible(self.q.shape[2], self.k.shape[2])

    @cached_property
    def _raw(self) -> Tensor:
        """Scores before the mask, capped."""
        q, k, _ = self._wide
        scores = q @ k.mT * self._scale
        cap = self.rules.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    @cached_property
    def lse(self) -> Tensor:
        """Logarithm of the sum of exp(score) over what each query sees, [B, H, S]."""
        return self._raw.where(self._visible, -math.inf).logsumexp(-1)

    @cached_property
    def softmax(self) -> Tensor:
        """[B, H, Sq, Sk]; 0 in the rows that see nothing."""
        safe = self.lse.where(self.lse.isfinite(), 0.0).unsqueeze(-1)
        return (self._raw - safe).exp().where(self._visible, 0.0)

    @cached_property
    def out(self) -> Tensor:
        """[B, H, Sq, D]."""
        return self.softmax @ self._wide[2]

    # -------------------------------------------------------------------------------------------------- bounds

    @cached_property
    def _scores_off(self) -> Tensor:
        """d, [B, H, Sq, 1]."""
        q, k, _ = self._wide
        size = (abs(self._scale) * q.abs() @ k.abs().mT).where(self._visible, 0.0)
        largest = size.amax(-1, keepdim=True) if size.shape[-1] else size.new_zeros(*size.shape[:-1], 1)
        unit = gamma(self.q.shape[-1], self.arithmetic.accumulator) + 4 * _U + 2.0 * self._operand
        if self.rules.softcap is not None:
            unit += 8 * _U  # division, tanh and multiplication
        return unit * largest + 8 * _U

    @property
    def _operand(self) -> float:
        return self.arithmetic.operand if self.q.dtype == torch.float32 else 0.0

    @property
    def _tiny(self) -> float:
        """What one rounding may lose by underflow: subnormal numbers of float16 are kept, others may be flushed."""
        return 2.0**-24 if self.q.dtype == torch.float16 else torch.finfo(self.q.dtype).smallest_normal

    @property
    def _rounding(self) -> float:
        own = max(ROUNDOFF[self.q.dtype], self._operand)
        return own if self.probabilities is None else self.probabilities

    @cached_property
    def out_bound(self) -> Tensor:
        u, keys = ROUNDOFF[self.q.dtype], self.k.shape[2]
        relative = self._rounding + self._operand + 2 * self._scores_off + gamma(keys, self.arithmetic.accumulator)
        size = self._wide[2].abs()
        lost = self._tiny * (1 + size.sum(2, keepdim=True))
        return u * self.out.abs() + (1 + u) * relative * (self.softmax @ size) + lost

    @cached_property
    def lse_bound(self) -> Tensor:
        own = (8 + math.sqrt(self.k.shape[2])) * _U * (1 + self.lse.abs())
        return (self._scores_off.squeeze(-1) + own).where(self.lse.isfinite(), 0.0)

    # ----------------------------------------------------------------------------------------------- gradients

    def gradients(self, dout: Tensor, dlse: Tensor | None = None) -> Mapping[str, tuple[Tensor, Tensor]]:
        """(gradient, bound) of "dq", "dk" and "dv" for the gradients of ``out`` and of ``lse``."""
        q, k, v = self._wide
        dout = dout.double()
        dlse = torch.zeros_like(self.lse) if dlse is None else dlse.double()
        pull = dout @ v.mT
        mean = (dout * self.out).sum(-1, keepdim=True) - dlse.unsqueeze(-1)
        slope = 1.0 if self.rules.softcap is None else 1.0 - (self._raw / self.rules.softcap) ** 2
        scores = self.softmax * (pull - mean) * slope * self._scale
        size = dout.abs() @ v.abs().mT + (dout * self.out).abs().sum(-1, keepdim=True) + dlse.abs().unsqueeze(-1)
        error = self._error()
        scores_off = ((2 * ROUNDOFF[self.q.dtype] + error) * self.softmax * size + self._tiny) * abs(self._scale)
        softmax_off = error * self.softmax + self._tiny
        u = ROUNDOFF[self.q.dtype]
        found = {
            "dq": (scores @ k, scores_off @ k.abs()),
            "dk": (self._fold(scores.mT @ q), self._fold(scores_off.mT @ q.abs())),
            "dv": (self._fold(self.softmax.mT @ dout), self._fold(softmax_off.mT @ dout.abs())),
        }
        return {name: (exact, u * exact.abs() + (1 + u) * off + self._tiny) for name, (exact, off) in found.items()}

    def _error(self) -> Tensor:
        """e of the module's docstring, per row."""
        group = self.q.shape[1] // self.k.shape[1]
        terms = max(self.k.shape[2], self.q.shape[2] * group)
        sums = 2 * gamma(self.q.shape[-1], self.arithmetic.accumulator) + gamma(terms, self.arithmetic.accumulator)
        capped = 0.0 if self.rules.softcap is None else 32 * _U
        return self._rounding + 4 * self._operand + 2 * self._scores_off + sums + capped

    def _fold(self, x: Tensor) -> Tensor:
        """Sum over the query heads that share a key/value head."""
        batch, groups = self.k.shape[:2]
        return x.view(batch, groups, -1, *x.shape[2:]).sum(2)
