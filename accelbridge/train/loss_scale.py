"""Loss scaling for float16 (Micikevicius et al., arXiv:1710.03740). All of it stays on the device.

Gradients smaller than 2**-24 are zero in float16. The loss is multiplied by a scale before the backward pass and
the gradients are divided by it before anything else sees them. Where the scale was too large they overflow: the
norm over all ranks is then not finite on any rank, so all of them skip the update together, with no collective and
no wait of the host beyond those of a step without scaling.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from accelbridge.guards.masked_update import masked_step
from accelbridge.portable.sharded_adamw import local
from accelbridge.train.config import LossScaleChoice, LossScaleConfig

PREFIX = "loss_scale."
"""Names in a checkpoint begin with this."""


class LossScale:
    """The scale of one run, its counters, and the update that an overflow masks.

    Per step: ``loss * scale`` backward, :meth:`unscale_`, norm and clipping, :meth:`step`.
    """

    def __init__(self, choice: LossScaleChoice, device: torch.device) -> None:
        self._dynamic = not isinstance(choice, float | int)
        config = choice if isinstance(choice, LossScaleConfig) else LossScaleConfig()
        initial = config.initial if isinstance(choice, LossScaleConfig | str) else float(choice)
        self._config = config
        self.scale = torch.tensor(initial, dtype=torch.float32, device=device)
        """float32 scalar."""
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        """int64 scalar: updates that were skipped so far."""
        self._clean = torch.zeros((), dtype=torch.int64, device=device)
        """Updates in a row without overflow, since the scale last changed."""

    def unscale_(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale. An overflow stays what it is: infinite or not a number."""
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self.scale.reciprocal().to(gradients[0].device))

    def step(self, optimizer: torch.optim.Optimizer, norm: Tensor, mask: Tensor | None = None) -> None:
        """Update, unless ``norm`` (of all gradients on all ranks) is not finite or ``mask`` (a bool scalar) says not
        to; then change the scale, which goes by the norm alone. See :func:`masked_step`."""
        overflow = torch.isfinite(norm).logical_not()
        masked = overflow if mask is None else overflow | mask
        masked_step(optimizer, masked)
        self.skipped += masked
        if self._dynamic:
            self._adapt(overflow)

    def _adapt(self, overflow: Tensor) -> None:
        config = self._config
        clean = torch.where(overflow, 0, self._clean + 1)
        grows = clean >= config.growth_interval
        grown = self.scale * config.growth
        grown = torch.where(torch.isfinite(grown), grown, self.scale)
        reduced = (self.scale * config.backoff).clamp(min=config.min)
        self.scale.copy_(torch.where(overflow, reduced, torch.where(grows, grown, self.scale)))
        self._clean.copy_(torch.where(grows, 0, clean))

    def state(self) -> dict[str, Tensor]:
        """The live tensors by name, for a checkpoint to hold, and to be filled from one."""
        return {f"{PREFIX}scale": self.scale, f"{PREFIX}skipped": self.skipped, f"{PREFIX}clean": self._clean}
