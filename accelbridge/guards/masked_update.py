"""An update that a flag on the device can mask: the host need not know of it, so it does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_step(optimizer: torch.optim.Optimizer, mask: Tensor) -> None:
    """Update, unless ``mask`` (a bool scalar, equal on all ranks) is true.

    A masked update leaves parameters, moments and counts of updates as they were, bit by bit. Optimizers that take
    ``found_inf`` (torch's fused ones) mask it on the device; for others the host reads the flag.
    """
    if masks_updates(optimizer):
        home = optimizer.param_groups[0]["params"][0].device  # the host's, where parameters lie there
        optimizer.found_inf = mask.float().to(home)  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.found_inf  # type: ignore[attr-defined]
    elif not mask.item():
        optimizer.step()


def masks_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update can be masked on the device, by the attribute that torch's GradScaler also asks."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
