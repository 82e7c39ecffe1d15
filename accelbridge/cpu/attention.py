"""Attention on the CPU: torch's fused kernel where its rules hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from accelbridge.backend import FULL, Implementation, Mask, Request, Support, unsupported
from accelbridge.errors import Unsupported
from accelbridge.ops.dot_product import check_attention
from accelbridge.ops.masks import visible_keys
from accelbridge.portable.attention import PortableAttention

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_NEEDS = frozenset({"causal", "window", "segments", "gqa"})
_KERNEL = ("aten::_scaled_dot_product_flash_attention_for_cpu",)
_LACKS = {
    "softcap": "torch's fused CPU attention cannot cap scores",
    "lse": "torch's fused CPU attention does not return the logarithm of the softmax sum",
}


def supports(request: Request) -> Support:
    """Whether :func:`sdpa` can serve ``request``. Any head dimension and sequence length will do."""
    for need in sorted(request.needs - _NEEDS):
        return unsupported(_LACKS.get(need, f'torch\'s fused CPU attention knows no "{need}"'))
    if request.dtype not in _DTYPES:
        return unsupported(f"torch's fused CPU attention takes {', '.join(_DTYPES)}, not {request.dtype}")
    return FULL


def sdpa(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor:
    """The op ``attention`` on torch's fused kernel; raises ``Unsupported`` for a softcap or lse.

    Computed in float32 (float64 for float64) and rounded once.
    """
    if softcap is not None or return_lse:
        raise Unsupported(f"{_LACKS['lse' if return_lse else 'softcap']}; bind the portable reference instead")
    check_attention(q_BHSD, k_BGSD, v_BGSD, mask, softcap)
    queries, keys = q_BHSD.shape[2], k_BGSD.shape[2]
    # torch aligns its own causal mask top-left, so it serves for equal lengths only.
    plain = mask.causal and queries == keys and mask.segments_BS is None
    causal = plain and (mask.window is None or mask.window >= keys)
    visible = None if causal else visible_keys(mask, queries, keys, q_BHSD.device)
    # Given 16-bit tensors, the kernel adds up the gradients of k and v in 16 bits, over blocks of queries
    # and heads of a group: 39 dB in bfloat16 with 8 heads to a group, where a float32 sum gives 55 (seen in
    # torch 2.9.1 and 2.13), and at 128 tokens it takes 3 times as long. Grouped heads it reads in place.
    wide = torch.promote_types(q_BHSD.dtype, torch.float32)
    out = F.scaled_dot_product_attention(
        q_BHSD.to(wide),
        k_BGSD.to(wide),
        v_BGSD.to(wide),
        attn_mask=visible,
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
    )
    return out.to(q_BHSD.dtype)


def _load() -> Callable[..., Tensor]:
    return sdpa


class CpuAttention(PortableAttention):
    """The fused kernel where its rules hold, the portable reference elsewhere."""

    def implementations(self) -> Sequence[Implementation]:
        return (Implementation(op="attention", name="sdpa", supports=supports, load=_load, launches=_KERNEL),)

    def attention(
        self,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        mask: Mask,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`accelbridge.ops.attention`."""
        if softcap is None and not return_lse:
            return sdpa(q_BHSD, k_BGSD, v_BGSD, mask, scale=scale)
        return super().attention(q_BHSD, k_BGSD, v_BGSD, mask, scale=scale, softcap=softcap, return_lse=return_lse)
