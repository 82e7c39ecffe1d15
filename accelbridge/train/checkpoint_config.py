"""The ``checkpoint`` section of a recipe. Free of torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from accelbridge.config import Section

if TYPE_CHECKING:
    from accelbridge.train.config import TrainSection

Positive = Annotated[int, Field(gt=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class BestConfig(Section):
    """Checkpoints that stay because they are the best so far."""

    metric: Literal["validation_loss", "loss"] = "validation_loss"
    """What is compared, the smaller the better: the loss over ``data.validation`` (only checkpoints of steps at which
    it is evaluated compete) or the training loss of the checkpoint's own step."""
    keep: Positive = 1
    """How many of the best."""


class CheckpointConfig(Section):
    """When state is saved and how much of it is kept."""

    interval: Count = 0
    """Steps between checkpoints; 0: only at the end and when asked (SIGTERM, SIGUSR1, a time limit)."""
    keep: Positive = 3
    """Newest complete checkpoints to keep."""
    keep_every: Positive | None = None
    """Checkpoints whose step is a multiple of this are kept for good."""
    best: BestConfig | None = None
    """The best by a metric are kept until better ones come."""
    before_seconds: Annotated[float, Field(ge=0, le=30 * 86400, allow_inf_nan=False)] | None = None
    """Save and stop, as at SIGTERM, so many seconds before the time limit: that of ``train.max_seconds``, or of the
    Slurm job (``SLURM_JOB_END_TIME``), whichever comes first. Absent: 0 with ``train.max_seconds``, else no limit."""
    allow_other_data: bool = False
    """Resume although the seed, the batch size, the sequence length or the data differ from the checkpoint's."""
    asynchronous: bool = True
    """Write in the background while the next steps run."""


def check_schedule(checkpoint: CheckpointConfig, train: TrainSection) -> None:
    """Whether everything asked for can happen within the run. Raises ValueError with what to set instead."""
    interval, steps = checkpoint.interval, train.steps
    if interval > steps:
        raise ValueError(
            f"checkpoint.interval {interval} asked; train.steps is {steps}, so it never comes; set it to {steps} or "
            "less, or to 0 for a checkpoint at the end only"
        )
    every = checkpoint.keep_every
    if every is not None and (interval == 0 or math.lcm(every, interval) > steps):
        raise ValueError(
            f"checkpoint.keep_every {every} asked; with checkpoint.interval {interval} and train.steps {steps} no "
            "checkpoint before the end is of such a step; set keep_every to a multiple of interval below train.steps"
        )
    best = checkpoint.best
    if best is not None and interval == 0:
        raise ValueError(
            "checkpoint.best asked; checkpoint.interval is 0, so there is one checkpoint only; set checkpoint.interval"
        )
    if best is not None and best.metric == "validation_loss":
        evaluated = train.eval_interval
        if evaluated == 0 or math.lcm(evaluated, interval) > steps:
            raise ValueError(
                f"checkpoint.best with metric validation_loss asked; with train.eval_interval {evaluated} and "
                f"checkpoint.interval {interval} no checkpoint before the end is evaluated; set train.eval_interval to "
                "checkpoint.interval, or metric: loss"
            )
    limit, before = train.max_seconds, checkpoint.before_seconds
    if limit is not None and before is not None and before >= limit:
        raise ValueError(
            f"checkpoint.before_seconds {before:g} asked; train.max_seconds is {limit:g}, so the run would end at "
            "once; set fewer before_seconds"
        )
