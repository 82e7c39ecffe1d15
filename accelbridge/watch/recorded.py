"""What a vendor's library has recorded of this process's collectives, asked for without ever waiting for it long.

Native groups don't pass our ring, so that a hang in them is only known to the vendor's own recorder. It is asked only
while nothing moves, in a thread of its own: one that gets stuck in a library costs that thread, and is not asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelbridge.train.logs import log

Trace = Callable[[], Sequence[Mapping[str, Any]]]
"""See :meth:`accelbridge.backend.Collectives.trace`."""
LIMIT_S = 1.0
"""How long an answer may take."""


class Recorder:
    """Asks ``trace``; empty where there is none, and for good once it has failed or not answered in ``limit_s``."""

    def __init__(self, trace: Trace | None, limit_s: float = LIMIT_S) -> None:
        self._trace, self._limit_s = trace, limit_s

    def ask(self) -> list[dict[str, Any]]:
        """The calls, oldest first."""
        trace = self._trace
        if trace is None:
            return []
        answer: list[list[dict[str, Any]]] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                answer.append([dict(entry) for entry in trace()])
            except Exception as error:  # of a plugin; whatever it is, the hang is what has to be reported
                failure.append(error)

        thread = threading.Thread(target=run, name="accelbridge-watch-recorder", daemon=True)
        thread.start()
        thread.join(self._limit_s)
        if answer:
            return answer[0]
        self._trace = None
        why = f"{type(failure[0]).__name__}: {failure[0]}" if failure else f"no answer in {self._limit_s:g} s"
        log.warning("the collective library's own record cannot be read (%s); reports go without it", why)
        return []


def oldest_pending(calls: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The oldest of ``calls`` that is not done, or else the newest; None where there are none."""
    pending = next((call for call in calls if call["state"] == "pending"), None)
    return pending if pending is not None else (calls[-1] if calls else None)


def counts(calls: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Collectives so far by group, as far as ``calls`` tell."""
    found: dict[str, int] = {}
    for call in calls:
        found[call["group"]] = max(found.get(call["group"], 0), call["number"])
    return found
