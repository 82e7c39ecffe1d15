"""Every op of the interface in float64, straight from its definition: for calls so small that speed is no matter."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    """2^-p for p significand bits: the largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2.0


def bound(want: Tensor, dtype: torch.dtype) -> Tensor:
    """64 u (1 + |want|), u of the result's dtype but no finer than float32's: as an op may round a few times on its
    way, and computes in float32. It tells a right result from nonsense; the families of the ops know their own bounds.
    """
    u = max(unit_roundoff(dtype), 2.0**-24) if dtype != torch.float64 else 2.0**-44
    return 64.0 * u * (1.0 + want.abs())


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x @ weight.T + bias``."""
    return x.double() @ weight.double().T + bias.double()


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D), keys up to the query) v, as many keys as queries; group g serves heads g r .. g r + r-1
    (r heads to a group)."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    weights = (scores.masked_fill(hidden, -math.inf) - scores.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467, eq. 4)."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rope(x_BSHD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Turns the pairs (i, i + D/2) of each head by the angles given (arXiv:2104.09864, eq. 34)."""
    first, second = x_BSHD.double().chunk(2, dim=-1)
    cos, sin = cos_SP.double().unsqueeze(1), sin_SP.double().unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate / (1 + exp(-gate)) * up (arXiv:2002.05202, eq. 6)."""
    wide = gate.double()
    return wide / (1.0 + (-wide).exp()) * up.double()


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, ignore_index: int = -100) -> Tensor:
    """Sum over tokens that count of log(sum(exp(logits))) - logits[target]."""
    counted = targets_N != ignore_index
    logits, targets = logits_NV.double()[counted], targets_N[counted]
    peak = logits.amax(-1)
    log_sums = peak + (logits - peak.unsqueeze(-1)).exp().sum(-1).log()
    return (log_sums - logits.gather(1, targets.unsqueeze(1)).squeeze(1)).sum()


def linear_cross_entropy(x_NM: Tensor, weight_VM: Tensor, targets_N: Tensor, ignore_index: int = -100) -> Tensor:
    """:func:`cross_entropy` of ``x @ weight.T``, whose logits small integers make exact in every dtype."""
    return cross_entropy(x_NM.double() @ weight_VM.double().T, targets_N, ignore_index)


def adamw_first_step(p: Tensor, g: Tensor, lr: float, decay: float, eps: float) -> Tensor:
    """The parameter after one step from zero moments: bias correction makes them g and g^2 (arXiv:1711.05101, alg. 2,
    decay scaled by the rate as torch does)."""
    wide, gradient = p.double(), g.double()
    return wide * (1.0 - lr * decay) - lr * gradient / (gradient.abs() + eps)


_MASK = 0xFFFFFFFF


def _lowbias32(bits: int) -> int:
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _MASK
    return bits ^ (bits >> 16)


def dropout(x_BD: Tensor, keys_B: Tensor, site: Tensor, p: float) -> Tensor:
    """x / (1 - p) where h(h(key ^ site) ^ h(coordinate ^ site)), as a signed number, is at least p 2^32 - 2^31, else 0;
    h is lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018). In Python's integers, which never overflow."""
    threshold, place = round(p * 2**32) - 2**31, int(site)
    kept = torch.zeros(x_BD.shape, dtype=torch.bool)
    for row, key in enumerate(keys_B.tolist()):
        start = _lowbias32((key ^ place) & _MASK)
        for column in range(x_BD.shape[1]):
            drawn = _lowbias32(start ^ _lowbias32(column ^ place))
            kept[row, column] = (drawn - 2**32 if drawn >= 2**31 else drawn) >= threshold
    return torch.where(kept, x_BD.double() / (1.0 - p), 0.0)
