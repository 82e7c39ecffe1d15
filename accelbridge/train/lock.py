"""One run at a time in an output folder: two would tear each other's files."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from accelbridge.errors import ConfigError

LOCK_FILE = ".lock"
_PATIENCE_SECONDS = 10.0
"""How long to wait for a run that is just ending: ranks outlive a killed launcher by about a second."""


class OutputLock:
    """Holds ``OUTPUT/.lock`` until :meth:`release` or the end of the process, however it ends (flock(2))."""

    def __init__(self, output: Path) -> None:
        self._path = output / LOCK_FILE
        self._file = self._path.open("a+")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self._try():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f'output.dir "{output}" asked; process {self._owner()} is writing a run there; '
                    "wait for it or stop it, or set another output.dir"
                )
            time.sleep(0.1)
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _owner(self) -> str:
        self._file.seek(0)
        return self._file.read().strip() or "of another user"

    def release(self) -> None:
        self._file.close()
