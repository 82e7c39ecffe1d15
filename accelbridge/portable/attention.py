"""Attention in plain PyTorch: right on every device, in memory that grows with the square of the sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from accelbridge.backend import Attention, Implementation, Mask
from accelbridge.ops import dot_product


class PortableAttention(Attention):
    """The reference of the op ``attention``, for every dtype, mask and shape."""

    def implementations(self) -> Sequence[Implementation]:
        """None of its own: the reference is always a candidate."""
        return ()

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
        if return_lse:
            return dot_product.attention(q_BHSD, k_BGSD, v_BGSD, mask, scale=scale, softcap=softcap, return_lse=True)
        return dot_product.attention(q_BHSD, k_BGSD, v_BGSD, mask, scale=scale, softcap=softcap)
