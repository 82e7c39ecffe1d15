"""Attention of the double, written from the formula: float64 on the host, then rounded to the dtype of the query.

Its NKI flash path serves lengths of a multiple of 512, heads up to 128, no bias and no dropout; for other calls the
compiler's decomposition, which computes the same here. ``paths`` tells which of the two served.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from tests.contracts import violate

paths: list[str] = []
_library = torch.library.Library("aten", "IMPL")
_OP = "_scaled_dot_product_fused_attention_overrideable"


def nki_serves(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float) -> bool:
    """The rules of the flash path."""
    lengths = q.shape[2] % 512 == 0 and k.shape[2] % 512 == 0
    heads = q.shape[3] <= 128 and q.shape[1] % k.shape[1] == 0
    return lengths and heads and k.shape == v.shape and bias is None and not dropout


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Probabilities [B, H, S, T] and logarithms of their sums [B, H, S], of float64 host tensors."""
    scores = torch.einsum("bhsd,bhtd->bhst", q, k) * scale
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    if bias is not None:
        scores = scores + bias
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)
    e = torch.exp(scores - top)
    total = e.sum(-1, keepdim=True)
    return e / total.clamp(min=torch.finfo(torch.float64).tiny), (total.log() + top).squeeze(-1)


def _wide(x: Tensor, heads: int) -> Tensor:
    host = x.detach().cpu().double()
    return host.repeat_interleave(heads // host.shape[1], 1) if host.shape[1] != heads else host


def _bias(bias: Tensor | None) -> Tensor | None:
    if bias is None:
        return None
    host = bias.detach().cpu()
    return torch.zeros(host.shape).double().masked_fill(~host, -math.inf) if host.dtype is torch.bool else host.double()


def forward(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    if q.dtype is torch.float64:
        raise violate("NEURON-ATT-002", "attention in float64")
    if dropout_p:
        raise violate("NEURON-ATT-001", "attention with dropout, whose stream no document states")
    paths.append("nki" if nki_serves(q, k, v, attn_bias, dropout_p) else "decomposed")
    heads = q.shape[1]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    weights, sums = _weights(_wide(q, heads), _wide(k, heads), _bias(attn_bias), is_causal, factor)
    out = torch.einsum("bhst,bhtd->bhsd", weights, _wide(v, heads)).to(q.dtype).to(q.device)
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    seed = torch.zeros((), dtype=torch.int64)
    return out, sums.float().to(q.device), none, none, q.shape[2], k.shape[2], seed, seed, out.new_empty(0)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, grad_input_mask: list[bool], out: Tensor,
    lse: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    seed: Tensor, offset: Tensor, *, scale: float | None = None,
) -> Any:  # fmt: skip
    heads, groups = q.shape[1], k.shape[1]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    wide_q, wide_k, wide_v, grad = (_wide(x, heads) for x in (q, k, v, dout))
    weights, _ = _weights(wide_q, wide_k, _bias(attn_bias), is_causal, factor)
    dv = torch.einsum("bhst,bhsd->bhtd", weights, grad)
    dweights = torch.einsum("bhsd,bhtd->bhst", grad, wide_v)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * factor
    dq, dk = torch.einsum("bhst,bhtd->bhsd", dscores, wide_k), torch.einsum("bhst,bhsd->bhtd", dscores, wide_q)
    dk, dv = (g.unflatten(1, (groups, heads // groups)).sum(2) for g in (dk, dv))
    made = [g.to(like.dtype).to(like.device) for g, like in ((dq, q), (dk, k), (dv, v))]
    return *made, None if attn_bias is None else torch.zeros_like(attn_bias)


def whole(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention: 4-D calls go to the vendor's op, also with a mask or grouped heads, which the
    simulated device leaves to torch's formula."""
    if not torch._C._get_overrideable_sdp_enabled() or q.dim() != 4:
        math_path = torch.ops.aten._scaled_dot_product_attention_math
        return math_path(q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    op = getattr(torch.ops.aten, _OP)
    return op(q, k, v, attn_mask, dropout_p, is_causal, False, scale=scale)[0]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that the simulated device's own are replaced
    _library.impl(_OP, forward, "PrivateUse1")
    _library.impl(f"{_OP}_backward", backward, "PrivateUse1")
    for _key in ("PrivateUse1", "AutogradPrivateUse1"):
        _library.impl("scaled_dot_product_attention", whole, _key)
