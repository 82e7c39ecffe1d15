"""Launching the ranks of one host through torchrun's own elastic agent, on loopback only.

The agent's stock rendezvous handlers listen on every interface; the one here hands the agent a store whose
socket is bound to 127.0.0.1.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import typer
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.launcher.api import LaunchConfig

from accelbridge.backend import Collectives, World
from accelbridge.errors import ConfigError
from accelbridge.launch.agent import Agent, first_failure
from accelbridge.train.metrics import FINISHED_EVENT, STOPPED_EVENT, last_event
from accelbridge.train.stop import STOPPED_EXIT_CODE, passing_on_save_requests
from accelbridge.train.world import BY_US, apply_environment

_LOOPBACK = "127.0.0.1"
_RENDEZVOUS = "accelbridge-loopback"
_SAVE_SECONDS = 600


class _Loopback(RendezvousHandler):
    """One node: this process is the whole rendezvous, and every restart a round of it."""

    def __init__(self, listener: socket.socket, timeout_s: float) -> None:
        self._rounds = 0
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
        self._rounds += 1
        store = PrefixStore(f"rendezvous/{self._rounds}", self._store)
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


def launch(
    command: Sequence[str],
    count: int,
    collectives: Collectives,
    port: int | None,
    output: Path,
    max_restarts: int = 0,
) -> int:
    """Run ``count`` ranks of ``command`` and wait for them; returns the exit code of the run in ``output``.

    When a rank is killed or crashes, all are started again, up to ``max_restarts`` times.
    """
    listener = _listen(port)
    os.environ[BY_US] = str(os.getpid())
    apply_environment(collectives, World(size=count, local_size=count))
    for name, value in collectives.launch_environment(count).items():
        os.environ.setdefault(name, value)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it says, we say below
    spec = WorkerSpec(
        role="rank",
        local_world_size=count,
        rdzv_handler=_Loopback(listener, 300.0),
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=max_restarts,
        numa_options=LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=count).numa_options,  # what torchrun binds
    )
    try:
        with passing_on_save_requests():
            result: Any = Agent(spec, DefaultLogsSpecs(), **_patience()).run()
    except SignalException as error:
        return _signalled(error.sigval, output)
    return _failed(result.failures) if result.is_failed() else 0


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


def _failed(failures: Mapping[int, ProcessFailure]) -> int:
    """Print the failure that came first, and return its code."""
    first = first_failure(failures)
    if first.exit_code != STOPPED_EXIT_CODE:
        typer.echo(f"error: {first}{first.seen}", err=True)
    return first.exit_code if first.exit_code > 0 else 1
