"""Launching the ranks of one host through torchrun's own elastic agent, on loopback only.

The agent's stock rendezvous handlers listen on every interface; the one here hands the agent a store whose
socket is bound to 127.0.0.1.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import typer
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accelbridge.backend import Collectives, World
from accelbridge.errors import ConfigError
from accelbridge.train.metrics import FINISHED_EVENT, STOPPED_EVENT, last_event
from accelbridge.train.stop import STOPPED_EXIT_CODE
from accelbridge.train.world import BY_US, apply_environment

_LOOPBACK = "127.0.0.1"
_RENDEZVOUS = "accelbridge-loopback"
_SAVE_SECONDS = 600


class _Loopback(RendezvousHandler):
    """One node, one round: this process is the whole rendezvous."""

    def __init__(self, listener: socket.socket, timeout_s: float) -> None:
        self._port = listener.getsockname()[1]
        # The store takes the descriptor over.
        self._store = TCPStore(
            _LOOPBACK,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return _RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore("rendezvous", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return _RENDEZVOUS

    def shutdown(self) -> bool:
        return True


def launch(command: Sequence[str], count: int, collectives: Collectives, port: int | None, output: Path) -> int:
    """Run ``count`` ranks of ``command`` and wait for them; returns the exit code of the run in ``output``."""
    listener = _listen(port)
    os.environ[BY_US] = str(os.getpid())
    apply_environment(collectives, World(size=count, local_size=count))
    rendezvous_handler_registry.register(_RENDEZVOUS, lambda _: _Loopback(listener, 300.0))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says, we say below
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend=_RENDEZVOUS,
        rdzv_endpoint=f"{_LOOPBACK}:{listener.getsockname()[1]}",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
        **_patience(),
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except SignalException as error:
        return _signalled(error.sigval, output)
    except ChildFailedError as error:
        return _failed(error)
    return 0


def _patience() -> dict[str, Any]:
    """How long the agent waits for ranks that save at SIGTERM before it kills them; torch 2.9 has 30 s, fixed."""
    return {"shutdown_timeout": _SAVE_SECONDS} if "shutdown_timeout" in LaunchConfig.__dataclass_fields__ else {}


def _signalled(number: signal.Signals, output: Path) -> int:
    """The agent has passed the signal on and waited for the ranks to end."""
    ended = last_event(output)
    if number == signal.SIGTERM and ended in (STOPPED_EVENT, FINISHED_EVENT):
        return STOPPED_EXIT_CODE if ended == STOPPED_EVENT else 0
    if number == signal.SIGTERM:
        typer.echo(f"error: SIGTERM ended the ranks before they had saved; see {output / 'logs'}", err=True)
    return 128 + number  # what a shell reports for a process that a signal ended


def _listen(port: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((_LOOPBACK, port or 0))
        listener.listen(128)
    except OSError as error:
        raise ConfigError(
            f"--port {port} asked; {error.strerror}; choose another port, or leave --port away for a free one"
        ) from error
    return listener


def _failed(error: ChildFailedError) -> int:
    """Print the failure that came first, and return its code; the others mostly follow from it."""
    if all(f.exitcode == STOPPED_EXIT_CODE for f in error.failures.values()):
        return STOPPED_EXIT_CODE
    reports = {rank: _read_report(failure) for rank, failure in error.failures.items()}
    # A rank that left no report died without a word, which the others' reports are about.
    rank = min(reports, key=lambda r: reports[r].get("failed_at", 0.0))
    failure = error.failures[rank]
    message = reports[rank].get("message") or _died(failure.exitcode) + _as_others_saw(rank, reports)
    typer.echo(f"error: rank {rank}: {message}", err=True)
    return failure.exitcode if failure.exitcode > 0 else 1


def _as_others_saw(rank: int, reports: Mapping[int, Mapping[str, Any]]) -> str:
    """What the others said of a rank that left no report."""
    for other, report in reports.items():
        if str(rank) in report.get("last_seen", {}):
            return f"; rank {other} said:\n{report['message']}"
    return ""


def _read_report(failure: Any) -> dict[str, Any]:
    """What a rank of ours wrote about its end (``accelbridge.cli.train``); empty where it could not."""
    try:
        report = json.loads(Path(failure.error_file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report.get("failed_at"), float) else {}


def _died(code: int) -> str:
    return f"ended by signal {-code}" + _HINT if code < 0 else f"exit code {code} without a message" + _HINT


_HINT = "; see OUTPUT/logs"
