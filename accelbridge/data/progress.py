"""How far a build has come: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]
"""Called with the number of bytes just done."""

_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(description: str, total: int, enabled: bool) -> Iterator[Advance]:
    """Yield a function that counts bytes towards ``total`` and shows them on standard error."""
    if not enabled:
        yield lambda count: None
    elif sys.stderr.isatty():
        with _bar(description, total) as advance:
            yield advance
    else:
        yield _lines(description, total)


@contextmanager
def _bar(description: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


def _lines(description: str, total: int) -> Advance:
    done, last = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{description}: {done / 1e6:.0f} of {total / 1e6:.0f} MB", file=sys.stderr, flush=True)

    return advance
