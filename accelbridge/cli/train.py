"""``accelbridge train``: join the ranks that a launcher made, or launch them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import typer

from accelbridge.backend import World
from accelbridge.errors import AccelbridgeError, ConfigError, RunFailed
from accelbridge.train.config import TrainConfig
from accelbridge.train.last_words import report
from accelbridge.train.prepare import Prepared, choose_target, prepare
from accelbridge.train.stop import STOPPED_EXIT_CODE, leave_with_parent
from accelbridge.train.world import BY_US, launched


def run(
    recipe: Path,
    overrides: Sequence[str],
    nproc: int | None,
    backend: str | None,
    resume: str,
    port: int | None,
    max_restarts: int | None,
) -> int:
    """Train; returns the exit code."""
    if launched():
        _leave_to_launcher({"--nproc": nproc, "--port": port, "--max-restarts": max_restarts})
        return _as_rank(lambda: TrainConfig.load(recipe, overrides), backend, resume)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # a request to save waits until somebody can take it
    config = TrainConfig.load(recipe, overrides)
    target = choose_target(config, backend)
    count = target.processes(nproc)
    if count == 1 and not max_restarts:
        return _as_rank(lambda: config, backend, resume)
    # What can be known to fail is said here once, not by every rank.
    prepare(config, World(size=count, local_size=count), target=target, resume=resume)
    from accelbridge.launch.local import launch

    arguments = ["train", str(recipe), "--resume", resume]
    arguments += ["--backend", backend] if backend else []
    arguments += [text for override in overrides for text in ("--set", override)]
    command = [sys.executable, "-m", "accelbridge", *arguments]
    output = Path(config.output.dir).expanduser()
    return launch(command, count, target.backend.collectives, port, output, max_restarts or 0)


def _leave_to_launcher(options: Mapping[str, int | None]) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{option} {value} asked; this process is already a rank of a launcher (RANK is set), which decides "
                f"that; leave {option} away, or unset RANK"
            )


def _as_rank(load: Callable[[], TrainConfig], backend: str | None, resume: str) -> int:
    """Be one rank. A rank of ours reports an error through its error file; others print it themselves."""
    trainer = None
    try:
        if launcher := os.environ.get(BY_US):
            leave_with_parent(int(launcher))
        from accelbridge.train.trainer import Trainer

        trainer = Trainer(load(), backend=backend, resume=resume)
        result = trainer.fit()
    except (Exception, SystemExit) as error:  # somebody's sys.exit() in the middle of a run ends the run of all
        _finish_speaking()
        # Before there is a trainer, the run is none: its folder may be that of another.
        failed_at = (trainer.failed_at if trainer is not None else None) or time.time()
        _report(error, _append_to_log(trainer.prepared) if trainer is not None else None, failed_at)
        return _exit_code(error)
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as a shell reports it
    if trainer.prepared.world.rank == 0:
        typer.echo(_summary(result.step, result.loss, result.validation_loss, result.output))
    return STOPPED_EXIT_CODE if result.stopped else 0


def _finish_speaking() -> None:
    """An agent ends all ranks once one has ended; what is left to say takes no time."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code
    return error.exit_code if isinstance(error, AccelbridgeError) else 1


def _append_to_log(prepared: Prepared) -> Path | None:
    """Add the traceback to this rank's log, which the trainer has closed by now, or may never have opened."""
    path = prepared.output / "logs" / f"rank_{prepared.world.rank}.log"
    if not path.parent.is_dir():
        return None
    with path.open("a", encoding="utf-8") as file:
        file.write(traceback.format_exc() + "\n")
    return path


def _report(error: BaseException, log: Path | None, failed_at: float) -> None:
    """Say what happened, once: through our launcher if it is ours, else on stderr."""
    text = str(error) if isinstance(error, AccelbridgeError) else _crash(error, log)
    report(text, failed_at, error.last_seen if isinstance(error, RunFailed) else None)


def _crash(error: BaseException, log: Path | None) -> str:
    """A bug, of ours or of a plugin: all there is to know."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"crashed with {type(error).__name__}; {f'the log is {log}' if log else 'there is no log yet'}\n{trace}"


def _summary(step: int, loss: float | None, validation: float | None, output: Path) -> str:
    parts = [f"step {step}"]
    parts += [f"loss {loss:.4f}"] if loss is not None else []
    parts += [f"validation loss {validation:.4f}"] if validation is not None else []
    return f"done: {', '.join(parts)}; {output}"
