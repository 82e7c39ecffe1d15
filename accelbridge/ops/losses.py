"""Portable reference of the op cross_entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, ignore_index: int = -100) -> Tensor:
    """Sum over tokens of ``logsumexp(logits) - logits[target]``, natural logarithm: a float32 scalar.

    A sum, so that the caller can divide by the number of targets of a whole step. Tokens whose target is
    ``ignore_index`` count nothing and get zero gradient, also when that is all of them. Computed in float32
    whatever the dtype of the logits (float64 for float64).
    """
    if logits_NV.dim() != 2 or targets_N.shape != logits_NV.shape[:1]:
        raise ValueError(
            f"cross_entropy takes logits [N, V] and targets [N]; "
            f"found logits {tuple(logits_NV.shape)} and targets {tuple(targets_N.shape)}"
        )
    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return F.cross_entropy(wide, targets_N, ignore_index=ignore_index, reduction="sum")
