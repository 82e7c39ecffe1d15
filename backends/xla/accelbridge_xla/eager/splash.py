"""The op ``attention`` on ``torch.tpu.ops.splash_sdpa``."""

from __future__ import annotations

from torch import Tensor

from accelbridge.backend import Mask
from accelbridge.errors import Unsupported
from accelbridge.ops.dot_product import check_attention
from accelbridge_xla.eager.vendor import tpu


def splash(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor:
    """Causal attention over as many keys as queries, perhaps in a window. Raises ``Unsupported`` for anything else."""
    check_attention(q_BHSD, k_BGSD, v_BGSD, mask, softcap)
    square = q_BHSD.shape[2] == k_BGSD.shape[2]
    if softcap is not None or return_lse or mask.segments_BS is not None or not (mask.causal and square):
        raise Unsupported(
            "asked of splash: attention with a softcap, lse, segments, without causality or over other keys than "
            "queries; found: splash_sdpa has none of them; do: bind the portable reference instead"
        )
    return tpu("ops").splash_sdpa(
        q_BHSD,
        k_BGSD,
        v_BGSD,
        scale=scale,
        is_causal=True,
        # Theirs does not count the query itself.
        local_window_size=None if mask.window is None else mask.window - 1,
        enable_gqa=q_BHSD.shape[1] != k_BGSD.shape[1],
    )
