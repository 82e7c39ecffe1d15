"""Where the host's time of a step goes: readings of the clock, and nothing that waits for a device.

Keys of a step line, in seconds of this process (rank 0 writes the file):

- ``time_data``: until the batch was there; near 0 as long as the loader's thread keeps ahead;
- ``time_forward``, ``time_backward``: in all forward (with copying the batch to the device and counting its targets)
  and backward passes of the step; with ``train.capture`` launching them is all ``time_backward``. Collectives of the
  layout are in them where the host waits for each (gloo);
- ``time_optimizer``: norm, clipping, update, and the end of the step, which launches the graph of a lazy device;
- ``time_collectives``: of all these, what the host waited for in the works of interposed process groups; 0 where the
  vendor's groups stay native, or nothing is waited for by the host;
- ``time_checkpoint``: what a checkpoint stalled the run since the step before, only where there was one. It is not part
  of ``step_time``;
- ``time_wait``: the step's equal share of what the read at ``metrics.interval`` waited for the device.

On a device that works on its own the host runs ahead: then the first four say when work was queued, their sum is
small, and ``time_wait`` is what the device was behind. Where the host waits for each operation (the CPU), they say what
the work took, and ``time_wait`` is near 0. On such a device time within
collectives is told by a profile (``metrics.profile``).
"""

from __future__ import annotations

import time


class StepTimes:
    """Collects the parts of one step after the other."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._began = self._last = time.perf_counter()

    def begin(self) -> None:
        """A step begins: from here its batch is waited for."""
        self._began = self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """The time since the last reading was spent on ``part``."""
        now = time.perf_counter()
        self._spent[part] = self._spent.get(part, 0.0) + now - self._last
        self._last = now

    def add(self, part: str, seconds: float) -> None:
        """``seconds`` were spent on ``part`` between two steps."""
        self._spent[part] = self._spent.get(part, 0.0) + seconds

    def end(self) -> dict[str, float]:
        """The step has ended: ``step_time``, from :meth:`begin` on, and ``time_PART`` of each part."""
        spent, self._spent = self._spent, {}
        total = time.perf_counter() - self._began
        return {"step_time": total, **{f"time_{part}": round(seconds, 6) for part, seconds in spent.items()}}
