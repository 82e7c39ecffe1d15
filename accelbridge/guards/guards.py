"""Guards: updates that are not finite are never made, and losses that leap are noticed. ``guards`` in a recipe.

Whether a step is finite is decided on the device, from the global norm and the losses of all ranks, which travel in one
reduction: the same on every rank, with no collective and no wait of the host beyond those of an unguarded step. The
update is masked there as well. After too many such steps in a row (the first, under ``stop``) every further update is
masked, so that the parameters stay those of the last good step until the host reads the metrics and raises.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from accelbridge.backend import Gradients
from accelbridge.errors import LossSpikeError, NonFiniteError
from accelbridge.guards.config import GuardsConfig
from accelbridge.guards.nonfinite import Finding, locate
from accelbridge.guards.spikes import Spike, SpikeDetector
from accelbridge.train.metrics import HALTED_EVENT

if TYPE_CHECKING:
    from accelbridge.train.trainer import Trainer

SKIPPED_EVENT = "skipped_update"
"""Event of an update that ``guards.nonfinite: skip`` left out: ``loss``, ``parameter``, ``rank``."""
SPIKE_EVENT = "spike"
"""Event of a loss spike that was only reported: ``loss``, ``median``, ``limit``."""
_NORMS = "gradient_norms"


class Kept(NamedTuple):
    """What is kept of a step until the metrics are read, to say where something arose."""

    share: Tensor
    """This replica's share of the loss."""
    parameters: Sequence[nn.Parameter]
    norms: Tensor
    """2-norm of each one's gradient, as far as this process holds it."""


class Guards:
    """The guards of one run. ``scaled``: gradients that overflow are the loss scale's business (float16)."""

    def __init__(self, config: GuardsConfig, device: torch.device, *, scaled: bool, interval: int) -> None:
        self.config = config
        self._scaled = scaled
        self._limit = config.max_skips if config.nonfinite == "skip" else 0
        # Of one dimension and made on the device, before set-up cuts the graph: on a lazy device the first step then is
        # the same graph as the others.
        self._in_a_row = torch.zeros(1, dtype=torch.float32, device=device)
        """Steps in a row that were masked. Above the limit it never goes back."""
        self._read_in_a_row = 0
        """The same, as of the last line that was read."""
        self._kept: deque[tuple[int, Kept]] = deque(maxlen=interval)
        self._spikes = SpikeDetector(config.spike) if config.spike is not None else None
        self._rollbacks = 0

    # ---- in a step, on the device

    def mask(self, gradients: Gradients) -> Tensor:
        """Whether this step's update is to be left out: a bool scalar on the device, equal on all ranks."""
        check = gradients.loss if self._scaled else gradients.norm + gradients.loss
        mask = torch.isfinite(check).logical_not() | (self._in_a_row > self._limit)
        self._in_a_row.copy_((self._in_a_row + 1) * mask)
        return mask.reshape(())

    def values(self, gradients: Gradients) -> dict[str, Tensor]:
        """What :meth:`keep` wants to have gone through ``Execution.end_step``."""
        return {_NORMS: gradients.norms}

    def keep(self, step: int, gradients: Gradients, values: dict[str, Any]) -> dict[str, Any]:
        """Keep what may be needed of update ``step`` (from 1); returns the other ``values``."""
        self._kept.append((step, Kept(values["loss"], gradients.parameters, values.pop(_NORMS))))
        return values

    # ---- between steps, on the host

    def look(self, trainer: Trainer, lines: Sequence[Mapping[str, Any]]) -> Spike | None:
        """Judge the steps whose lines were read. All ranks call this with equal lines, and so do the same.

        Returns the spike because of which the run is to go back to a checkpoint, if there is one. Raises
        NonFiniteError and LossSpikeError, after an event.
        """
        kept = dict(self._kept)
        self._kept.clear()
        for line in lines:
            if self._finite(line):
                self._read_in_a_row = 0
                if self._watch(trainer, line):
                    return self._last_spike
            else:
                self._read_in_a_row += 1
                self._nonfinite(trainer, line, kept[line["step"]])
        return None

    def rewind(self, step: int) -> None:
        """The run goes on after ``step``."""
        self._in_a_row.zero_()
        self._read_in_a_row = 0
        self._kept.clear()
        if self._spikes is not None:
            self._spikes.rewind(step)

    def _finite(self, line: Mapping[str, Any]) -> bool:
        return math.isfinite(line["loss"]) and (self._scaled or math.isfinite(line["grad_norm"]))

    def _nonfinite(self, trainer: Trainer, line: Mapping[str, Any], kept: Kept) -> None:
        step, stops = line["step"], self._read_in_a_row > self._limit
        if stops:
            trainer.step = step - 1  # which is what the parameters are: no later update was made
        finding = locate(trainer, step, line["loss"], kept, again=stops)
        if not stops:
            fields = {"loss": line["loss"], "parameter": finding.parameter, "ranks": finding.ranks_text}
            trainer.metrics.event(SKIPPED_EVENT, step=step, **fields)
            trainer.progress.print(f"step {step}: update skipped: {finding}")
            return
        message = f"step {step}: {finding}; {self._why_stopped(step)}; {_way_out(finding, self.config)}"
        trainer.metrics.event(HALTED_EVENT, step=step, cause="nonfinite", message=message)
        raise NonFiniteError(message)

    def _why_stopped(self, step: int) -> str:
        last = step - self._read_in_a_row
        state = f"the parameters are those after step {last}"
        if self.config.nonfinite == "stop":
            return f"guards.nonfinite is stop, so every rank has stopped; {state}"
        return f"it is one more in a row than guards.max_skips {self._limit}, so every rank has stopped; {state}"

    def _watch(self, trainer: Trainer, line: Mapping[str, Any]) -> bool:
        """Whether to roll back because of this loss."""
        if self._spikes is None or (spike := self._spikes.see(line["step"], line["loss"])) is None:
            return False
        assert self.config.spike is not None
        action, most = self.config.spike.action, self.config.spike.max_rollbacks
        if action == "warn":
            fields = {"loss": spike.loss, "median": spike.median, "limit": spike.limit}
            trainer.metrics.event(SPIKE_EVENT, step=spike.step, **fields)
            trainer.progress.print(f"loss spike: {spike}")
            return False
        if action == "rollback" and self._rollbacks < most:
            self._rollbacks += 1
            self._last_spike = spike
            return True
        why = "guards.spike.action is stop" if action == "stop" else f"this run has rolled back {most} times"
        give_up(trainer, spike, why)

    _last_spike: Spike | None = None


def give_up(trainer: Trainer, spike: Spike, why: str) -> NoReturn:
    """Stop because of a spike: an event, then LossSpikeError on every rank."""
    message = (
        f"{spike}; {why}, so every rank has stopped; look at the data of the steps before it, lower optimizer.lr or "
        "optimizer.clip_norm, or raise guards.spike.threshold, and resume from a checkpoint before it"
    )
    trainer.metrics.event(HALTED_EVENT, step=spike.step, cause="spike", message=message)
    raise LossSpikeError(message)


def _way_out(finding: Finding, config: GuardsConfig) -> str:
    if finding.in_data:
        return "mend that data, or set guards.nonfinite: skip to leave such steps out; then --resume auto"
    if config.nonfinite == "skip":
        return "lower optimizer.lr or clip_norm, and resume from a checkpoint well before it"
    way_out = "lower optimizer.lr, or set guards.nonfinite: skip to leave such steps out, and --resume auto"
    if finding.again and not finding.origins:
        way_out += (
            "; finite when run again: a norm above 1.8e19, whose square float32 does not hold, or else a fault of the "
            "device, or code that is not repeatable"
        )
    return way_out
