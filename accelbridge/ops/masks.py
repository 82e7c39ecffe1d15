"""From a mask as data to the keys that each query sees."""

from __future__ import annotations

import torch
from torch import Tensor

from accelbridge.backend import Mask

_CACHE = "_visible_keys"


def check_mask(mask: Mask, batch: int, queries: int, keys: int) -> None:
    """Raise ``ValueError`` if ``mask`` doesn't make sense for such a call."""
    if mask.window is not None and (mask.window < 1 or not mask.causal):
        raise ValueError(
            f"a sliding window needs causal=True and a width of at least 1; "
            f"found causal={mask.causal}, window={mask.window}"
        )
    segments = mask.segments_BS
    if segments is not None and (queries != keys or segments.shape != (batch, queries)):
        raise ValueError(
            f"segments name the document of each position, so they need shape [batch, sequence] and as many "
            f"queries as keys; found segments {tuple(segments.shape)}, batch {batch}, {queries} queries and "
            f"{keys} keys"
        )


def can_blind(mask: Mask, queries: int, keys: int) -> bool:
    """Whether some query may see no key at all: with equal lengths every query at least sees itself."""
    return keys == 0 or (mask.causal and queries > keys)


def visible_keys(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Which keys each query sees: bool ``[queries, keys]``, with segments ``[B, 1, queries, keys]``; None:
    all.

    Causal masks are aligned bottom-right: the last query sees the last key, so query i stands at key
    ``i + keys - queries`` (flash-attention does so from version 2.1 on). Equal segment ids see each other,
    wherever they stand.
    """
    if mask.segments_BS is None:
        return _positions(mask, queries, keys, device)
    if torch.compiler.is_compiling():
        return _segments(mask, mask.segments_BS)
    # One mask serves all layers of a forward pass. Its tensor is kept in the mask itself, so that the two
    # live equally long; a mask without segments may be shared by real and fake tensors and is cheap: not
    # kept.
    kept = vars(mask).get(_CACHE)
    if kept is None:
        kept = vars(mask)[_CACHE] = _segments(mask, mask.segments_BS)
    return kept


def _positions(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor | None:
    if not mask.causal:
        return None
    distance = torch.arange(keys - queries, keys, device=device).unsqueeze(1) - torch.arange(keys, device=device)
    visible = distance >= 0
    return visible if mask.window is None else visible & (distance < mask.window)


def _segments(mask: Mask, segments_BS: Tensor) -> Tensor:
    same = segments_BS.unsqueeze(2) == segments_BS.unsqueeze(1)
    length = segments_BS.shape[1]
    near = _positions(mask, length, length, segments_BS.device)
    return (same if near is None else same & near).unsqueeze(1)
