"""Stopping on a signal: the handler only notes it; the run ends at a step that all ranks choose together."""

from __future__ import annotations

import signal
import threading
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
