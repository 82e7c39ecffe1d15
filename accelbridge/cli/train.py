"""``accelbridge train``: join the ranks that a launcher made, or launch them."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer

from accelbridge.backend import World
from accelbridge.errors import AccelbridgeError, ConfigError
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import Target, choose_target, prepare
from accelbridge.train.stop import STOPPED_EXIT_CODE, leave_with_parent
from accelbridge.train.world import BY_US, launched, world_from_environment


def run(
    recipe: Path,
    overrides: Sequence[str],
    nproc: int | None,
    backend: str | None,
    resume: str,
    port: int | None,
) -> int:
    """Train; returns the exit code."""
    config = TrainConfig.load(recipe, overrides)
    if launched():
        return _as_rank(config, backend, resume)
    target = choose_target(config, backend)
    count = _processes(target, nproc)
    if count == 1:
        return _as_rank(config, backend, resume)
    prepare(config, World(size=count, local_size=count), backend=backend, resume=resume)
    from accelbridge.train.launch import launch

    arguments = ["train", str(recipe), "--resume", resume]
    arguments += ["--backend", backend] if backend else []
    arguments += [text for override in overrides for text in ("--set", override)]
    return launch([sys.executable, "-m", "accelbridge", *arguments], count, target.backend.collectives, port)


def _processes(target: Target, nproc: int | None) -> int:
    offered = target.backend.device.count()
    most = target.backend.execution.processes_per_host(offered)
    if nproc is not None and nproc > most:
        raise ConfigError(
            f"--nproc {nproc} asked; backend {target.backend.name} offers {offered} device{'s' * (offered != 1)} here, "
            f"for {most} process{'es' * (most != 1)}; set --nproc {most} or less"
        )
    return nproc or (most if target.backend.accelerator else 1)


def _as_rank(config: TrainConfig, backend: str | None, resume: str) -> int:
    """Be one rank. A rank of ours reports an error through its error file; others print it themselves."""
    rank = world_from_environment().rank
    if launcher := os.environ.get(BY_US):
        leave_with_parent(int(launcher))
    try:
        from accelbridge.train.trainer import Trainer

        result = Trainer(config, backend=backend, resume=resume).fit()
    except Exception as error:
        logging.getLogger("accelbridge").exception("rank %d failed", rank)
        _log_failure(config, rank)
        if not _report(error, rank):
            raise
        return error.exit_code if isinstance(error, AccelbridgeError) else 1
    if rank == 0:
        typer.echo(_summary(result.step, result.loss, result.validation_loss, result.output))
    return STOPPED_EXIT_CODE if result.stopped else 0


def _log_failure(config: TrainConfig, rank: int) -> None:
    """The run's log may be closed by now, or never have been opened: add the traceback to it."""
    path = Path(config.output.dir) / "logs" / f"rank_{rank}.log"
    if path.parent.is_dir():
        with path.open("a", encoding="utf-8") as file:
            file.write(traceback.format_exc())


def _report(error: Exception, rank: int) -> bool:
    """Hand the message to our launcher, if it is one of ours."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if BY_US not in os.environ or path is None:
        if isinstance(error, AccelbridgeError):
            typer.echo(f"error: rank {rank}: {error}" if launched() else f"error: {error}", err=True)
            return True
        return False
    known = isinstance(error, AccelbridgeError)
    message = str(error) if known else "".join(traceback.format_exception(error))
    Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    return True


def _summary(step: int, loss: float | None, validation: float | None, output: Path) -> str:
    parts = [f"step {step}"]
    parts += [f"loss {loss:.4f}"] if loss is not None else []
    parts += [f"validation loss {validation:.4f}"] if validation is not None else []
    return f"done: {', '.join(parts)}; {output}"
