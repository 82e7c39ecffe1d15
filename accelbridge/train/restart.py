"""A run that starts again: where it goes on, and what is known of why it had to. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelbridge.checkpoint import manifest as manifests
from accelbridge.train.metrics import FINISHED_EVENT, METRICS_FILE, STOPPED_EVENT, parse_line

CAUSE = "ACCELBRIDGE_RESTART_CAUSE"
"""Where the launcher tells the ranks that it starts again what ended them."""
EVENT = "restart"
_NOT_TOLD = "not told by the launcher; see OUTPUT/logs"


def resume_after_restart(asked: str | Path, restart: int, checkpoints: Path) -> str | Path:
    """What ``--resume`` means in ranks that a launcher has started ``restart`` times before.

    The newest complete checkpoint of this run, whatever the command line said at first; where there is none yet,
    the start that it said.
    """
    if not restart or str(asked) == "auto":
        return asked
    return "auto" if str(asked) == "none" or manifests.complete(checkpoints) else asked


@dataclass(frozen=True)
class Restart:
    """The fields of the event ``restart``."""

    step: int
    """The step after which the run goes on."""
    count: int
    """How often the run was started before."""
    cause: str
    """What ended it: rank, and signal, exit code or error, as far as it is known."""
    lost_steps: int
    """Steps beyond ``step`` whose metrics were written, and which are done again; there may have been more, up to
    ``metrics.interval``."""

    def __str__(self) -> str:
        again = f"; {self.lost_steps} steps are done again" if self.lost_steps else ""
        return f"restart {self.count}: {self.cause}; the run goes on after step {self.step}{again}"


def restart_of(output: Path, step: int, launcher_restarts: int) -> Restart | None:
    """What to write of a run in ``output`` that goes on after ``step``; None for a run that starts for the first time.

    To be asked before the metrics are opened, which removes the lines of steps that are done again.
    """
    lines = list(_lines(output / METRICS_FILE))
    earlier = [line for path in output.glob("metrics.*.jsonl") for line in _lines(path)]
    starts = sum(line.get("event") == "start" for line in (*earlier, *lines))
    if not starts:
        return None
    done = max((line["step"] for line in lines if "event" not in line), default=0)
    cause = os.environ.get(CAUSE) if launcher_restarts else None
    return Restart(step, starts, cause or _ending(lines), max(0, done - step))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    raw = path.read_bytes().splitlines() if path.exists() else []
    return (line for line in map(parse_line, raw) if line is not None)


def _ending(lines: list[dict[str, Any]]) -> str:
    """How the run ended by its own account."""
    last = lines[-1].get("event") if lines else None
    return {STOPPED_EVENT: "stopped by SIGTERM", FINISHED_EVENT: "continued after its end"}.get(str(last), _NOT_TOLD)
