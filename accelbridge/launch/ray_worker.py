"""What runs inside Ray: a rank of the Trainer in each worker, and the count of starts. Imports Ray."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (an optional dependency; and pyright takes the file beside this one for the module ray)

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import UserCallback
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig

from accelbridge.errors import AccelbridgeError, ConfigError
from accelbridge.guards.spikes import Spike
from accelbridge.train.config import TrainConfig
from accelbridge.train.restart import CAUSE
from accelbridge.train.trainer import Trainer

_REPORT_SECONDS = 5.0
"""Ray fetches one report of a worker every 2 s (2.60), and the next one waits for that."""
_CAUSE_LENGTH = 300
"""What rank 0 broadcasts through Ray has to stay below 1 kB."""


@ray.remote(num_cpus=0)
class Starts:
    """Counts the starts of a job's workers, and keeps what ended them last, and what they came to."""

    def __init__(self) -> None:
        self._count = 0
        self._cause = ""
        self._result: dict[str, Any] = {}
        self._error: AccelbridgeError | None = None

    def begin(self) -> tuple[int, str, bool]:
        """How many starts there were before this one, what ended the last, and whether this one is in vain."""
        self._count += 1
        return self._count - 1, self._cause, self._error is not None

    def note(self, cause: str, error: AccelbridgeError | None) -> None:
        """What ended the workers, and the error among it that a start would meet again."""
        self._cause, self._error = cause, error

    def finish(self, result: dict[str, Any]) -> None:
        self._result = result

    def outcome(self) -> tuple[dict[str, Any], AccelbridgeError | None]:
        """What rank 0 handed in at its end, or the error that ended the job. Ray keeps metrics only beside checkpoints
        that it stores itself (2.60)."""
        return self._result, self._error


class NoteCause(UserCallback):
    """Tells :class:`Starts` why workers failed; runs in Ray's controller."""

    def __init__(self, starts: Any) -> None:
        self._starts = starts

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        # A worker that died is what the others' exceptions are about, and Ray knows it by no exception of its own.
        dead = [rank for rank, error in worker_exceptions.items() if "HealthCheck" in type(error).__name__]
        rank = min(dead or worker_exceptions)
        first_line = next(iter(str(worker_exceptions[rank]).splitlines()), "")
        text = "died" if dead else f"{type(worker_exceptions[rank]).__name__}: {first_line}"
        ours = [error for error in worker_exceptions.values() if isinstance(error, AccelbridgeError)]
        lasting = [error for error in ours if error.exit_code == AccelbridgeError.exit_code and not dead]
        ray.get(self._starts.note.remote(f"rank {rank}: {text}"[:_CAUSE_LENGTH], next(iter(lasting), None)))


class _LeaveToTrainer(TorchConfig().backend_cls):
    """Ray's set-up of devices for torch, without its process group: the Trainer makes its own."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        return None

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        return None

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        return None


class NoProcessGroup(TorchConfig):
    """Ray's configuration for torch, with :class:`_LeaveToTrainer`."""

    @property
    def backend_cls(self) -> type:
        return _LeaveToTrainer


class _ReportingTrainer(Trainer):
    """Reports metrics to Ray when they are read, at most every few seconds."""

    _reported = 0.0

    def _read_metrics(self) -> tuple[dict[str, Any], Spike | None]:
        line, spike = super()._read_metrics()
        # Ray's report waits for all workers, so all have to decide alike.
        if self.execution.any(time.monotonic() - self._reported > _REPORT_SECONDS):
            self._reported = time.monotonic()
            ray.train.report({name: value for name, value in line.items() if isinstance(value, int | float)})
        return line, spike


def run(settings: dict[str, Any]) -> None:
    """Be one rank, from start to end. ``settings`` are those of :mod:`accelbridge.launch.ray`."""
    _enter(settings["folder"])
    restart = _become_rank(settings["starts"])
    if restart is None:
        return
    config = TrainConfig.load(Path(settings["recipe"]), settings["overrides"])
    trainer = _ReportingTrainer(config, backend=settings["backend"], resume=settings["resume"])
    result = trainer.fit()
    metrics = {"step": result.step, "loss": result.loss, "validation_loss": result.validation_loss, "restarts": restart}
    ray.train.report(metrics)
    if trainer.prepared.world.rank == 0:
        ray.get(settings["starts"].finish.remote(metrics))


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} is where the job was started; on this node it cannot be entered: {error.strerror}; "
            "start it in a folder that all nodes share"
        ) from error


def _become_rank(starts: Any) -> int | None:
    """Set what torchrun would set; returns how often the job was started before, None where this start is in vain."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    meeting = None
    if rank == 0:
        count, cause, over = ray.get(starts.begin.remote())
        host = ray.util.get_node_ip_address()
        meeting = {"host": host, "port": _free_port(), "count": count, "cause": cause, "over": over}
    meeting = broadcast_from_rank_zero(meeting)
    if meeting["over"]:
        return None
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "MASTER_ADDR": meeting["host"],
        "MASTER_PORT": str(meeting["port"]),
        "TORCHELASTIC_RESTART_COUNT": str(meeting["count"]),
        "TORCHELASTIC_RUN_ID": context.get_experiment_name(),
        CAUSE: meeting["cause"],
    }
    return meeting["count"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
