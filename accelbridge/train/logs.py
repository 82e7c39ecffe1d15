"""One log file per rank: ``OUTPUT/logs/rank_N.log``."""

from __future__ import annotations

import faulthandler
import logging
from pathlib import Path

log = logging.getLogger("accelbridge")


class RankLog:
    """Sends the package's log, Python's warnings and the stacks of a crash to this rank's file."""

    def __init__(self, output: Path, rank: int) -> None:
        folder = output / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank_{rank}.log"
        self._file = self.path.open("a", encoding="utf-8")
        self._handler = logging.StreamHandler(self._file)
        self._handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
        self._loggers = [log, logging.getLogger("py.warnings")]
        self._level = log.level
        log.setLevel(logging.INFO)
        for logger in self._loggers:
            logger.addHandler(self._handler)
        logging.captureWarnings(True)
        # A segmentation fault or abort leaves its stack here, where stderr may be lost.
        faulthandler.enable(self._file)

    def close(self) -> None:
        faulthandler.disable()
        logging.captureWarnings(False)
        log.setLevel(self._level)
        for logger in self._loggers:
            logger.removeHandler(self._handler)
        self._file.close()
