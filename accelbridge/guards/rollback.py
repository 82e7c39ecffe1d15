"""Going back after a loss spike: to the newest checkpoint from before its window, and past the data up to the spike.

What follows the checkpoint is done again with other data, so the position in the data parts from the step; checkpoints
hold both. A process that ends between a rollback and the next checkpoint leaves the old position behind: a resume meets
the same data again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.load import verify
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.together import gathered
from accelbridge.guards.guards import give_up
from accelbridge.guards.spikes import Spike
from accelbridge.train.metrics import ROLLBACK_EVENT
from accelbridge.train.resume import CHECKPOINTS

if TYPE_CHECKING:
    from accelbridge.train.trainer import Trainer


def roll_back(trainer: Trainer, spike: Spike) -> None:
    """Every rank goes back, at the same step; ``trainer.step`` and ``trainer.position`` say to where.

    Raises LossSpikeError where no checkpoint is old enough, CheckpointError where it is damaged.
    """
    assert trainer.config.guards.spike is not None
    root, group = trainer.prepared.output / CHECKPOINTS, trainer.execution.control_group
    trainer.checkpointer.wait()
    found = newest_before(root, spike.step - trainer.config.guards.spike.window)
    if found is None:
        give_up(trainer, spike, "no checkpoint from before guards.spike.window is there to roll back to")
    path, manifest = found
    verify(path, manifest, group)
    trainer.restore(path, manifest)
    if trainer.prepared.world.rank == 0:
        abandon(root, manifest.step)
    gathered(group, None)  # nobody saves again before that is done
    trainer.skipped_data += spike.step - manifest.step
    trainer.step = trainer.checkpointer.last_step = manifest.step
    trainer.guards.rewind(trainer.step)
    trainer.metrics.rewind(trainer.step)
    fields = {"spike": spike.step, "loss": spike.loss, "median": spike.median, "limit": spike.limit}
    trainer.metrics.event(ROLLBACK_EVENT, step=trainer.step, data_position=trainer.position, **fields)
    trainer.progress.print(f"loss spike: {spike}; back to step {trainer.step}, past the data up to step {spike.step}")
    trainer.times.begin()


def newest_before(root: Path, step: int) -> tuple[Path, Manifest] | None:
    """The newest complete checkpoint in ``root`` of ``step`` or earlier, with its manifest; None if there is none."""
    for path in reversed(manifests.complete(root)):
        manifest = manifests.read(path)
        if manifest.step <= step:
            return path, manifest
    return None


def abandon(root: Path, step: int) -> None:
    """Delete the checkpoints of steps after ``step``: those steps are done again, with other data, and are saved under
    the same names. Each is renamed first, so that a kill leaves no half-deleted step_N. One process calls this."""
    for path in manifests.complete(root):
        if manifests.read(path).step > step:
            doomed = path.with_name(f".{path.name}.deleted")
            os.rename(path, doomed)
            shutil.rmtree(doomed)
