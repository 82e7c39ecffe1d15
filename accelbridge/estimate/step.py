"""The trainer's own step, on an execution that is given: what a compiler for an absent machine takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelbridge.backend import Execution, World
from accelbridge.data.loader import IGNORE
from accelbridge.estimate.targets import AbsentMachine
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import Prepared
from accelbridge.train.run_plan import Provided
from accelbridge.train.trainer import Trainer


@dataclass(frozen=True)
class OneStep:
    """One whole step of a recipe, in a form that another process can take."""

    recipe: Mapping[str, Any]
    target: str
    layers: int | None = None
    """Instead of the recipe's, for figures per layer."""

    def __call__(self, execution: Execution) -> None:
        config = TrainConfig.of(self.recipe)
        if self.layers is not None and config.model is not None:
            config = config.model_copy(update={"model": config.model.model_copy(update={"layers": self.layers})})
        _Absent(AbsentMachine.parse(self.target).prepare(config)).run(execution)


class _Absent(Trainer):
    """A trainer whose run is prepared, on an execution that is not its backend's own."""

    def __init__(self, given: Prepared) -> None:
        self._given = given
        super().__init__(given.config)

    def _prepare(self, backend: str | None, resume: str | Path, provided: Provided) -> Prepared:
        return self._given

    def run(self, execution: Execution) -> None:
        prepared = self.prepared
        # Candidates of the backend are bound to its execution, so it has to be this one.
        prepared.target.backend.execution = execution
        self.execution = execution
        try:
            # No process meets another one here: a single one stands for all devices.
            execution.start(dist.HashStore(), World(), prepared.layout, self.config.parallel.timeout, False)
            self._assemble()
            execution.end_step()
            self.train_step(batches(prepared, len(execution.data_coordinates)))
        finally:
            self.close()


def batches(prepared: Prepared, coordinates: int) -> list[dict[str, Tensor]]:
    """The microbatches of a step as the loader shapes them, of zeros."""
    rows, tokens = prepared.microbatch_size * coordinates, prepared.config.train.seq_len
    batch = {
        "tokens": torch.zeros(rows, tokens, dtype=torch.int64),
        "targets": torch.full((rows, tokens), IGNORE, dtype=torch.int64),
        "sample_ids": torch.arange(rows),
    }
    if prepared.config.data.document_mask:
        batch["segments"] = torch.zeros(rows, tokens, dtype=torch.int32)
    return [dict(batch) for _ in range(prepared.microbatches)]
