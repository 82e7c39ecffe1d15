"""Which checkpoints of a run stay: the newest, every k-th, and the best by a metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelbridge.checkpoint import manifest as manifests
from accelbridge.errors import CheckpointError

if TYPE_CHECKING:
    from accelbridge.train.checkpoint_config import CheckpointConfig


@dataclass(frozen=True)
class Retention:
    """What survives; a checkpoint stays while any of the rules holds it."""

    newest: int = 3
    """So many of the newest, at least 1."""
    every: int | None = None
    """Those whose step is a multiple of this, for good."""
    metric: str | None = None
    """Name in :attr:`Manifest.metrics`; smaller is better."""
    best: int = 1
    """So many of the best by ``metric``; of equal ones the older. Checkpoints without the metric do not compete."""

    @classmethod
    def of(cls, config: CheckpointConfig) -> Retention:
        """The rules of a recipe."""
        best = {} if config.best is None else {"metric": config.best.metric, "best": config.best.keep}
        return cls(config.keep, config.keep_every, **best)

    def doomed(self, checkpoints: Sequence[Path]) -> list[Path]:
        """Those of ``checkpoints`` (published, oldest first) that no rule holds."""
        held = set(checkpoints[-self.newest :])
        if self.every is not None:
            held |= {path for path in checkpoints if (manifests.step_of(path) or 0) % self.every == 0}
        if self.metric is not None:
            values = _values(checkpoints, self.metric)
            held |= set(sorted(values, key=lambda path: values[path])[: self.best])
        return [path for path in checkpoints if path not in held]


def _values(checkpoints: Sequence[Path], metric: str) -> Mapping[Path, float]:
    values = {}
    for path in checkpoints:
        try:
            metrics = manifests.read(path).metrics
        except CheckpointError:
            continue  # damaged meanwhile: it is no candidate, and no reason to fail a save
        if metric in metrics:
            values[path] = metrics[metric]
    return values
