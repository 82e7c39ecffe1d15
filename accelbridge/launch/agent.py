"""torchrun's elastic agent, which here restarts ranks only where that can help, and tells them what ended them."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accelbridge.errors import AccelbridgeError
from accelbridge.train.restart import CAUSE
from accelbridge.train.stop import STOPPED_EXIT_CODE

_HINT = "; see OUTPUT/logs"
_AGENT_KILLS_AFTER = 30.0
"""Seconds between the SIGTERM and the SIGKILL that the agent sends to ranks that are left (torch 2.9 to 2.13)."""


@dataclass(frozen=True)
class Failure:
    """The failure that came first; the others mostly follow from it."""

    rank: int
    exit_code: int
    """As the agent reports it: -N for signal N."""
    message: str
    """What the rank said, else how it died."""
    seen: str = ""
    """What another rank said of one that left no report."""

    @property
    def curable(self) -> bool:
        """Whether the same command may get further when it starts again. A run that stopped on SIGTERM should not."""
        return self.exit_code not in (AccelbridgeError.exit_code, STOPPED_EXIT_CODE)

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


def first_failure(failures: Mapping[int, ProcessFailure]) -> Failure:
    """Find it among the ends of ``failures``, by rank."""
    if all(f.exitcode in (STOPPED_EXIT_CODE, -signal.SIGTERM) for f in failures.values()):
        # A rank that has saved and is on its way out may meet the SIGTERM that the agent sends after the first end.
        stopped = [rank for rank, f in failures.items() if f.exitcode == STOPPED_EXIT_CODE]
        if stopped:
            return Failure(stopped[0], STOPPED_EXIT_CODE, "stopped by SIGTERM")
    reports = {rank: _read_report(failure) for rank, failure in failures.items()}
    rank = min(reports, key=lambda r: _failed_at(failures[r], reports[r]))
    code = failures[rank].exitcode
    if "message" in reports[rank]:
        return Failure(rank, code, reports[rank]["message"])
    return Failure(rank, code, _died(code), _as_others_saw(rank, reports))


def _as_others_saw(rank: int, reports: Mapping[int, Mapping[str, Any]]) -> str:
    """What the others said of a rank that left no report."""
    for other, report in reports.items():
        if str(rank) in report.get("last_seen", {}):
            return f"; rank {other} said:\n{report['message']}"
    return ""


def _failed_at(failure: ProcessFailure, report: Mapping[str, Any]) -> float:
    """Unix time. A rank that left no report died without a word, and the others' reports are about that, although they
    may be older than the moment at which the agent looked; unless the agent ended it, which it does to those that are
    left: by SIGTERM, and long after by SIGKILL."""
    if failure.exitcode == -signal.SIGTERM:
        return math.inf
    return report.get("failed_at", failure.timestamp - _AGENT_KILLS_AFTER / 2)


def _read_report(failure: ProcessFailure) -> dict[str, Any]:
    """What a rank of ours wrote about its end (``accelbridge.cli.train``); empty where it could not."""
    try:
        report = json.loads(Path(failure.error_file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report.get("failed_at"), float) else {}


def _died(code: int) -> str:
    return f"ended by signal {-code}" + _HINT if code < 0 else f"exit code {code} without a message" + _HINT


class Agent(LocalElasticAgent):
    """Restarts all ranks when one has failed, up to ``max_restarts`` times, but not for what a restart cannot cure."""

    # torch's decorator hides the types of the method.
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride]
        result: RunResult = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue]
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            os.environ.pop(CAUSE, None)
            if result.failures:
                self._judge(first_failure(result.failures), worker_group.spec.max_restarts)
        return result

    def _judge(self, first: Failure, allowed: int) -> None:
        if not first.curable:
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            os.environ[CAUSE] = str(first)
            number = allowed - self._remaining_restarts + 1
            typer.echo(f"restart {number} of {allowed}: {first}", err=True)
