"""A checkpoint of the last whole step when a run fails, if that can be had with certainty.

Ranks that are alive tell each other through the CPU store, not through collectives, which may be what failed: the step
they have finished, and whether anything speaks against saving it. One verdict for all is written once: either all save
that step through the control group, or all say why there is no checkpoint. A rank that hangs in a collective does not
answer, so an error on one rank alone leads to a checkpoint only where something ends the others' collectives as well.

What was computed of an unfinished step is gone with it: gradients, and the gathered parameters of a forward pass.
Generators are saved as they are; a model that draws from torch's own within a step draws other numbers when it resumes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelbridge.backend import World
from accelbridge.errors import CheckpointError, DesynchronisedError
from accelbridge.portable.sharded_adamw import local
from accelbridge.train.logs import log

if TYPE_CHECKING:
    from accelbridge.train.trainer import Trainer

LISTEN_SECONDS = 5.0
"""How long ranks wait for each other's word: those that fail of the same cause do so within moments."""
SAVE_SECONDS = 120.0
"""How long the save may take; then it is given up, and its folder is swept at the next start."""


def open_ballot(store: dist.Store, world: World) -> dist.Store:
    """Where the ranks of this fit() vote: every one of a process has keys of its own. All ranks call it at set-up."""
    run = dist.PrefixStore(f"accelbridge/{world.run_id}/{world.restart}/emergency", store)
    return dist.PrefixStore(str(run.add(f"fits/{world.rank}", 1)), run)


def save_last_step(trainer: Trainer, ballot: dist.Store, error: BaseException) -> str:
    """Save the last whole step if all ranks can; returns what was done, or why not. Empty: there was nothing to save.

    Raises nothing: ``error`` is what the run ends with.
    """
    if not isinstance(error, Exception) or trainer.step == trainer.saved_step:
        return ""  # somebody interrupts it, or nothing has been done since the last checkpoint
    world = trainer.prepared.world
    try:
        verdict = _vote(ballot, world, trainer.step, _objection(trainer, error))
        if verdict:
            return f"no emergency checkpoint of step {trainer.step}: {verdict}"
        return _within(SAVE_SECONDS, lambda: _save(trainer)) or f"emergency checkpoint of step {trainer.step}"
    except Exception as second:  # the store or the device may be gone as well
        return f"no emergency checkpoint of step {trainer.step}: {type(second).__name__}: {second}"


def _objection(trainer: Trainer, error: Exception) -> str:
    """Why the state of this rank must not become a checkpoint; empty: it may."""
    if isinstance(error, CheckpointError):
        return "a checkpoint is what failed"
    if isinstance(error, DesynchronisedError):
        return "ranks hold different numbers, and which of them would be saved is chance"
    if trainer.updating:
        return f"the update of step {trainer.step + 1} had begun"
    # Also takes gathered parameters back to shards: those of a forward pass have no memory once it has failed.
    state = trainer.model.state_dict()
    parameters = dict(trainer.model.named_parameters())
    buffers = [name for name in state if name not in parameters]
    if buffers:
        return f"the model has a buffer, {buffers[0]}, which the unfinished step may have changed"
    # A run that resumed from NaN would be worse than one that repeats a few steps.
    if not all(bool(torch.isfinite(local(tensor)).all()) for tensor in state.values()):
        return "parameters are not finite"
    return ""


def _vote(ballot: dist.Store, world: World, step: int, objection: str) -> str:
    """The verdict that all ranks share: empty to save, or why not."""
    ballot.set(f"word/{world.rank}", json.dumps([step, objection]))
    deadline = time.monotonic() + LISTEN_SECONDS
    # Where this rank objects there is nothing to wait for.
    absent = [] if objection else list(range(world.size))
    while absent and time.monotonic() < deadline:
        absent = [rank for rank in absent if not ballot.check([f"word/{rank}"])]
        if absent:
            time.sleep(0.05)
    heard = [world.rank] if objection else [rank for rank in range(world.size) if rank not in absent]
    words = {rank: json.loads(ballot.get(f"word/{rank}")) for rank in heard}
    # Written once: a rank whose patience ended a moment before the last word came must not decide otherwise.
    return ballot.compare_set("verdict", "", _judge(words, absent) or "save").decode().removeprefix("save")


def _judge(words: dict[int, Any], absent: list[int]) -> str:
    if absent:
        return f"rank {', '.join(map(str, absent))} did not answer within {LISTEN_SECONDS:g} s"
    if objections := [f"rank {rank}: {text}" for rank, (_, text) in words.items() if text]:
        return "; ".join(objections)
    if len({step for step, _ in words.values()}) > 1:
        return "; ".join(f"rank {rank} is at step {step}" for rank, (step, _) in words.items())
    return ""


def _save(trainer: Trainer) -> None:
    trainer.checkpointer.wait()  # its group is ours from here on
    group, tp = trainer.execution.control_group, trainer.prepared.layout.tp

    def read_sums(shares: Sequence[Tensor]) -> list[float]:
        """Over the replicas, each of which ``tp`` ranks state."""
        if group is None:
            return trainer.execution.read_sums(shares)
        losses = torch.stack(list(shares)).cpu()
        dist.all_reduce(losses, group=group)
        return (losses / tp).tolist()

    lines = trainer.metrics.flush(read_sums)
    trainer.save("an error", loss=lines[-1]["loss"] if lines else None)
    trainer.checkpointer.wait()


def _within(seconds: float, action: Callable[[], None]) -> str:
    """Run ``action``; returns why it did not end well, or nothing. It may be left running when time is up."""
    failed: list[str] = []

    def run() -> None:
        try:
            action()
        except Exception as error:
            log.exception("emergency checkpoint")
            failed.append(f"emergency checkpoint failed: {error}")

    thread = threading.Thread(target=run, name="accelbridge-emergency", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return f"emergency checkpoint given up after {seconds:g} s"
    return failed[0] if failed else ""
