"""Stopping: on SIGTERM at a step that all ranks choose together, and when the launcher is gone, at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

STOPPED_EXIT_CODE = 75
"""Exit code of a run that saved a checkpoint and stopped on SIGTERM: EX_TEMPFAIL of sysexits.h, "try again"."""


class StopOnSignal:
    """While active, SIGTERM sets :attr:`requested` instead of ending the process."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> StopOnSignal:
        # Python lets only the main thread set handlers; elsewhere (a Ray worker, a notebook) the host decides.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self.requested = True


def leave_with_parent(parent: int, every_s: float = 0.5) -> None:
    """End this process when ``parent`` has ended: a rank must not train on after its launcher was killed.

    Elastic agents start ranks in sessions of their own, so a SIGKILL to the launcher's process group misses them.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        os.kill(os.getpid(), signal.SIGKILL)  # nobody is left to read an exit code

    threading.Thread(target=watch, name="accelbridge-parent", daemon=True).start()
