"""Loss spikes: judged on the host, from losses that are equal on all ranks, so that all come to the same answer."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from accelbridge.guards.config import SpikeConfig

_SIGMAS_PER_MAD = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution: 1 / Phi^-1(3/4)."""
_LEAST = 1e-3
"""Least spread that is assumed, relative to the median: of losses that hardly move, rounding is no spike."""


@dataclass(frozen=True)
class Spike:
    """A loss far above those before it."""

    step: int
    """The update that had it, numbered from 1 as in the metrics."""
    loss: float
    median: float
    """Of the window before it."""
    limit: float
    """What it may have been."""

    def __str__(self) -> str:
        return f"the loss of step {self.step} is {self.loss:.4g}, above {self.limit:.4g} (median {self.median:.4g})"


class SpikeDetector:
    """Takes the losses of all steps in their order. Losses that are not finite are left to the other guard."""

    def __init__(self, config: SpikeConfig) -> None:
        self._config = config
        # Enough that a window is left after a rollback to just before it.
        self._losses: deque[tuple[int, float]] = deque(maxlen=3 * config.window)
        self._within = False
        """Whether the last loss was one of a spike, which is reported once."""

    def see(self, step: int, loss: float) -> Spike | None:
        """The spike that begins with this loss, if one does."""
        if not math.isfinite(loss):
            return None
        spike = self._judge(step, loss)
        begins = spike is not None and not self._within
        self._within = spike is not None
        # Also one of a spike: where the loss stays high, that is its level after half a window.
        self._losses.append((step, loss))
        return spike if begins else None

    def _judge(self, step: int, loss: float) -> Spike | None:
        window = [value for _, value in self._losses][-self._config.window :]
        if len(window) < self._config.window or (loss <= window[-1] and not self._within):
            return None  # the second: no loss that falls begins a spike, and most need no sorting
        middle = median(window)
        spread = _SIGMAS_PER_MAD * median(abs(value - middle) for value in window)
        limit = middle + self._config.threshold * max(spread, _LEAST * abs(middle))
        return Spike(step, loss, middle, limit) if loss > limit else None

    def rewind(self, step: int) -> None:
        """Forget the losses after ``step``."""
        self._within = False
        while self._losses and self._losses[-1][0] > step:
            self._losses.pop()
