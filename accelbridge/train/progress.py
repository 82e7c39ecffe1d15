"""Progress of a run for people: a live bar in a terminal, plain lines in a log, silence on other ranks.

All three take the step lines that :meth:`accelbridge.train.metrics.Metrics.flush` returns. Nothing here is
read back by a program; that is what ``metrics.jsonl`` is for.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO


class Progress(ABC):
    """Where a run shows how far it is."""

    @abstractmethod
    def update(self, line: Mapping[str, Any]) -> None:
        """Show a step line, the newest of a flush; reads ``step`` and the other known keys that are there."""

    @abstractmethod
    def print(self, text: str) -> None:
        """Show a text that stays (evaluation, checkpoint, warning); printed as it is, without markup."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it should be; safe to call twice."""


def make_progress(total: int, start: int, *, rank: int, stream: TextIO | None = None) -> Progress:
    """The progress display for this process: of ``total`` steps, ``start`` are done already.

    ``stream`` defaults to standard output. Rank 0 gets a live bar if the stream is a terminal that can redraw
    (``TERM`` isn't ``dumb``), else one printed line per update; other ranks get nothing. ``NO_COLOR`` is
    obeyed.
    """
    if rank != 0:
        return _Silent()
    out: TextIO = stream or sys.stdout
    # Asked of the stream, not of rich: FORCE_COLOR makes rich call any pipe a terminal.
    if out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        return _Live(total, start, out)
    return _Plain(total, start, out)


class _Silent(Progress):
    def update(self, line: Mapping[str, Any]) -> None:
        pass

    def print(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Plain(Progress):
    """``step  120/1000  loss 2.3456  norm 1.234  lr 3.00e-04  12.3k tok/s  eta 1m20s``"""

    def __init__(self, total: int, start: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._clock = _Clock(total, start)

    def update(self, line: Mapping[str, Any]) -> None:
        step = f"{line['step']:>{len(str(self._total))}}/{self._total}"
        self.print("  ".join([f"step {step}", *_values(line), f"eta {self._clock.eta(line['step'])}"]))

    def print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)  # a log that lags is no help when a job hangs

    def close(self) -> None:
        pass


class _Live(Progress):
    """A bar at the bottom of the terminal; what is printed scrolls above it."""

    def __init__(self, total: int, start: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._clock = _Clock(total, start)
        self._bar = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[values]}", markup=False),
            TextColumn("eta {task.fields[eta]}", markup=False, style="cyan"),
            TimeElapsedColumn(),
            console=Console(file=stream),
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total, completed=start, values="", eta="?")
        self._bar.start()

    def update(self, line: Mapping[str, Any]) -> None:
        step = line["step"]
        values = "  ".join(_values({name: line[name] for name in ("loss", "tokens_per_second") if name in line}))
        self._bar.update(self._task, completed=step, values=values, eta=self._clock.eta(step), refresh=True)

    def print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


class _Clock:
    """Remaining time from the pace of the last updates, so that compilation in the first step is soon
    forgotten while evaluation and checkpoints between steps count."""

    def __init__(self, total: int, start: int) -> None:
        self._total = total
        self._seen: deque[tuple[int, float]] = deque([(start, time.monotonic())], maxlen=20)

    def eta(self, step: int) -> str:
        """Time left after ``step``, as text; "?" before a pace is known."""
        self._seen.append((step, time.monotonic()))
        (first, began), (last, now) = self._seen[0], self._seen[-1]
        if last <= first:
            return "?"
        return duration((self._total - step) * (now - began) / (last - first))


def _values(line: Mapping[str, Any]) -> list[str]:
    """The known values of a step line as short texts, in a fixed order; what isn't a number is left out."""
    shown = {
        "loss": lambda x: f"loss {x:.4f}",
        "grad_norm": lambda x: f"norm {x:.3f}",
        "lr": lambda x: f"lr {x:.2e}",
        "tokens_per_second": lambda x: f"{quantity(x)} tok/s",
        "mfu": lambda x: f"mfu {x:.1%}",
    }
    return [text(line[name]) for name, text in shown.items() if isinstance(line.get(name), int | float)]


def quantity(x: float) -> str:
    """``x`` in three digits: ``"874"``, ``"12.3k"``, ``"1.23M"``."""
    if not abs(x) < 1e15:  # also NaN
        return f"{x:.3g}"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= size * 0.9995:  # 999,950 is 1.00M, not 1e+03k
            scaled = x / size
            return f"{scaled:.{max(0, 2 - _digits(scaled))}f}{unit}"
    return f"{x:.{max(0, 2 - _digits(x))}f}"


def _digits(x: float) -> int:
    """Digits before the point, less one, of ``x`` rounded to three digits."""
    return 2 if abs(x) >= 99.95 else 1 if abs(x) >= 9.995 else 0


def duration(seconds: float) -> str:
    """``"45s"``, ``"1m20s"``, ``"2h05m"``, ``"3d04h"``."""
    whole = max(0, round(seconds))
    for size, part, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= size:
            return f"{whole // size}{names[0]}{whole % size // part:02d}{names[1]}"
    return f"{whole}s"
