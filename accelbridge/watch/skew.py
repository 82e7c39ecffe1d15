"""Ranks that are slower than the others, from what each says of its own steps. No collective is needed."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low

from accelbridge.watch.verdict import Beat

RATIO = 1.5
"""Busy time of a slow rank over that of the median rank; of two ranks, the faster is the median."""
IN_A_ROW = 3
"""Intervals that it must be so slow, or fast again, before it is said."""


class Skew:
    """Compares the ranks' busy time per step, interval by interval.

    Busy is the host's time of a step without what it waited for collectives. On a device that works asynchronously
    that is the time of issuing the work: a slow host, slow data or a stalled Python process show, a slow chip does not.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._compared = 0
        self._slow: dict[int, int] = {}
        """Intervals in a row that a rank was slow."""
        self._told: set[int] = set()

    def see(self, beats: Iterable[Beat]) -> list[dict[str, float | int]]:
        """Compare the ranks once all speak of the same new interval; returns those that are newly found slow, as
        ``{"step", "rank", "ratio", "seconds"}``."""
        busy = {beat.rank: beat.busy for beat in beats}
        steps = {beat.interval for beat in beats}
        if len(busy) < self._size or len(steps) != 1 or (step := steps.pop()) <= self._compared:
            return []
        self._compared = step
        median = median_low(busy.values())
        found: list[dict[str, float | int]] = []
        for rank, seconds in busy.items():
            slow = median > 0 and seconds > RATIO * median
            self._slow[rank] = self._slow.get(rank, 0) + 1 if slow else 0
            if not slow:
                self._told.discard(rank)
            elif self._slow[rank] >= IN_A_ROW and rank not in self._told:
                self._told.add(rank)
                ratio = round(seconds / median, 2)
                found.append({"step": step, "rank": rank, "ratio": ratio, "seconds": round(seconds, 4)})
        return found
