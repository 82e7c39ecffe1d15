"""What is asked of a running run: to stop (SIGTERM, a time limit), to save and go on (SIGUSR1); and to end at once when
its launcher is gone.

Signals only set a flag. Ranks agree on it where they read their metrics, so all do the same after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from accelbridge.train.config import TrainConfig

STOPPED_EXIT_CODE = 75
"""Exit code of a run that saved a checkpoint and stopped before its end: EX_TEMPFAIL of sysexits.h, "try again"."""

SLURM_END = "SLURM_JOB_END_TIME"
"""When Slurm ends the job, in Unix seconds (sbatch(1), output environment variables)."""


@dataclass(frozen=True)
class Asked:
    """What all ranks have agreed to do after a step."""

    stop: str = ""
    """Why to save and stop; empty: go on."""
    save: bool = False
    """Whether to save and go on."""


class Requests:
    """While active, SIGTERM and SIGUSR1 set :attr:`terminated` and :attr:`save` instead of ending the process.

    ``seconds`` from now the run should have stopped; None: no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.terminated = False
        self.save = False
        self._stop_by = None if seconds is None else time.monotonic() + seconds
        self._asked_at = time.monotonic()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Requests:
        # Python lets only the main thread set handlers; elsewhere (a Ray worker, a notebook) the host decides.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._previous[number] = signal.signal(number, self._note)
            # Our launcher starts ranks with it blocked, for it would end one that is not here yet.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # A late request to save must not end a process that is done.
            signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 and launched_by_us() else handler)
        self._previous.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.terminated = True
        else:
            self.save = True

    def out_of_time(self) -> bool:
        """Whether to stop now because the next time that somebody asks will be too late; ask at regular places."""
        now = time.monotonic()
        gap, self._asked_at = now - self._asked_at, now
        return self._stop_by is not None and now + gap > self._stop_by


def seconds_left(config: TrainConfig) -> float | None:
    """Seconds from now until the run has to save and stop; None without a limit.

    The limit is ``train.max_seconds`` from now or, with ``checkpoint.before_seconds``, the end
    of the Slurm job, and comes that much earlier.
    """
    before, own = config.checkpoint.before_seconds, config.train.max_seconds
    limits = []
    if own is not None:
        limits.append(own)
    slurm = os.environ.get(SLURM_END, "")
    if before is not None and slurm.isdecimal():
        limits.append(int(slurm) - time.time())
    return min(limits) - (before or 0) if limits else None


def launched_by_us() -> bool:
    """Whether this is a rank of our launcher."""
    from accelbridge.train.world import BY_US

    return BY_US in os.environ


@contextmanager
def passing_on_save_requests() -> Iterator[None]:
    """While active, SIGUSR1 to this launcher goes on to the ranks, its child processes; call it in the main thread.

    The signal is blocked, which ranks inherit, and a thread takes it: one that comes before a rank is ready waits
    there.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    def pass_on() -> None:
        while True:
            signal.sigwait({signal.SIGUSR1})
            while not (ranks := psutil.Process().children()):
                time.sleep(0.1)  # before they are started, or between two starts
            for rank in ranks:  # one that takes it is enough
                try:
                    rank.send_signal(signal.SIGUSR1)
                except psutil.NoSuchProcess:
                    continue

    threading.Thread(target=pass_on, name="accelbridge-sigusr1", daemon=True).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one that comes now has nobody to go to
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_with_parent(parent: int, every_s: float = 0.5) -> None:
    """End this process when ``parent`` has ended: a rank must not train on after its launcher was killed.

    Elastic agents start ranks in sessions of their own, so a SIGKILL to the launcher's process group misses them.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        os.kill(os.getpid(), signal.SIGKILL)  # nobody is left to read an exit code

    threading.Thread(target=watch, name="accelbridge-parent", daemon=True).start()
