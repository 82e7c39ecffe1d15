"""Portable reference of the op attention."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from accelbridge.backend import Mask
from accelbridge.errors import Unsupported
from accelbridge.ops.masks import can_blind, check_mask, visible_keys


@overload
def attention(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(mask(cap(q k^T * scale))) v`` as ``out_BHSD`` in the dtype of q, where
    ``cap(s) = softcap * tanh(s / softcap)``, and ``lse_BHS`` (natural logarithm, float32) when asked.

    ``scale`` defaults to ``D ** -0.5``. Query head h reads key/value head ``h // (H / G)``. See
    :func:`~accelbridge.ops.visible_keys` for the alignment when queries and keys differ in number. A query
    that sees nothing gives out 0 and lse -inf, and its gradients are 0. Computed in float32 (float64 for
    float64, where lse is float64 too) and rounded once; differentiable through both results. A non-finite key
    or value reaches the queries that don't see it too (0 * inf), as in fused kernels.

    Raises ``ValueError`` for shapes that don't fit. Memory grows with the product of both lengths.
    """
    check_attention(q_BHSD, k_BGSD, v_BGSD, mask, softcap)
    batch, heads, queries, head_dim = q_BHSD.shape
    groups, keys = k_BGSD.shape[1:3]
    wide = torch.promote_types(q_BHSD.dtype, torch.float32)
    factor = head_dim**-0.5 if scale is None else scale

    # The heads of a group are rows of one product, so that keys and values are never copied per query head.
    rows = (batch, groups, heads // groups * queries)
    scores = (q_BHSD.to(wide) * factor).reshape(*rows, head_dim) @ k_BGSD.to(wide).mT
    scores = scores.view(batch, heads, queries, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_keys(mask, queries, keys, q_BHSD.device)
    if visible is not None:
        scores = torch.where(visible, scores, -torch.inf)

    # softmax and logsumexp of nothing but -inf have NaN gradients: blind rows take other numbers, then their
    # result.
    sighted = None
    if visible is not None and can_blind(mask, queries, keys):
        sighted = visible.any(-1, keepdim=True)
    if sighted is not None:
        scores = torch.where(sighted, scores, 0.0)
    weights = torch.softmax(scores, dim=-1)
    if sighted is not None:
        weights = torch.where(sighted, weights, 0.0)
    out = weights.view(*rows, keys) @ v_BGSD.to(wide)
    out = out.view(batch, heads, queries, v_BGSD.shape[-1]).to(q_BHSD.dtype)
    if not return_lse:
        return out
    lse = torch.logsumexp(scores, dim=-1)
    return out, lse if sighted is None else torch.where(sighted.squeeze(-1), lse, -torch.inf)


def check_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softcap: float | None) -> None:
    """Raise ``ValueError`` if such a call makes no sense, ``Unsupported`` where the dtype has no softmax."""
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"attention takes q [B, H, S, D] and k, v [B, G, S, D] of one batch and, k and v, one length; "
            f"found q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"attention takes q and k of one head_dim; found {q.shape[3]} and {k.shape[3]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention takes a number of query heads that is a multiple of the key/value heads; "
            f"found {q.shape[1]} query heads and {k.shape[1]} key/value heads"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention takes one dtype; found q {q.dtype}, k {k.dtype}, v {v.dtype}")
    if not q.dtype.is_floating_point or q.dtype.itemsize == 1:
        raise Unsupported(
            f"attention was asked over {q.dtype}, whose numbers cannot hold its result; use float32, bfloat16, float16 "
            "or float64"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"attention takes one device; found q on {q.device}, k on {k.device}, v on {v.device}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"attention takes a positive softcap or None; found {softcap}")
    check_mask(mask, q.shape[0], q.shape[2], k.shape[2])
