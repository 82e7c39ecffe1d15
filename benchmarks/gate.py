"""The measured side of a benchmark: a loop calls a gate before every step, and stands still where it is told to.

The controller (arms.py) says over a pipe how many steps to run; so several loops, each in processes of its own, take
turns on the same machine within one run, and what is measured begins and ends with a whole step. Without a
controller a gate does nothing, and the loop runs through.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

CONTROL = "BENCHMARK_PIPE"
"""Two file descriptors, "read,write", in the environment."""
SETTLE_S = 0.1
"""Before the processor time is read: threads that prepare the next batches come to rest, and are counted."""


class Gate:
    """``gate(step)`` before every step, from 0; ``gate.finish(losses)`` after the last. ``synchronize`` waits for a
    device that works on its own, at both ends of a turn."""

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        ends = os.environ.get(CONTROL)
        self._read: TextIO | None = None
        if ends:
            read, write = map(int, ends.split(","))
            self._read, self._write = os.fdopen(read), os.fdopen(write, "w")
        self._until = 0
        self._measure: _Cost | _Memory | _Profile | None = None

    def __call__(self, step: int) -> None:
        if self._read is None:
            return
        if step < self._until:
            if isinstance(self._measure, _Cost):
                self._measure.step()
            return
        self._synchronize()
        if self._measure is not None:
            self._say(self._measure.stop())
        command, steps, *where = self._read.readline().split() or sys.exit("the controller has gone")
        self._until = step + int(steps)
        kinds = {"run": _Cost, "memory": _Memory, "profile": _Profile}
        self._measure = kinds[command](*where)

    def finish(self, losses: list[float]) -> None:
        """Hand over the mean loss of every step."""
        if self._read is not None:
            self._say({"losses": losses})

    def _say(self, message: dict[str, Any]) -> None:
        self._write.write(json.dumps(message) + "\n")
        self._write.flush()


class _Cost:
    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._marks = [time.process_time()]

    def step(self) -> None:
        self._marks.append(time.process_time())

    def stop(self) -> dict[str, Any]:
        wall = time.perf_counter() - self._wall
        time.sleep(SETTLE_S)
        self.step()
        steps = [after - before for before, after in pairwise(self._marks)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
        return {"cpu": sum(steps), "cpu_steps": steps, "wall": wall, "peak_rss": peak}


class _Memory:
    """Bytes of all tensors between two steps, and the most that a step adds to them."""

    def __init__(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        gc.collect()
        storages: dict[int, int] = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                self._count(thing, storages)
        self._resident = sum(storages.values())
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.start()

    @staticmethod
    def _count(tensor: Any, storages: dict[int, int]) -> None:
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own storage is empty
        if local.device.type != "cpu" or local.layout.__str__() != "torch.strided":
            return
        storage = local.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()

    def stop(self) -> dict[str, Any]:
        self._profile.stop()
        results: Any = self._profile.profiler
        changes = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
        now = most = 0
        for event in sorted(changes, key=lambda e: e.start_ns()):
            now += event.nbytes()
            most = max(most, now)
        return {"resident_bytes": self._resident, "peak_bytes": self._resident + most}


class _Profile:
    """cProfile of the loop's thread; ``WHERE.txt`` has functions by their own time and by time with callees."""

    def __init__(self, where: str) -> None:
        import cProfile

        self._where = Path(where)
        self._profile = cProfile.Profile()
        self._profile.enable()

    def stop(self) -> dict[str, Any]:
        import pstats

        self._profile.disable()
        path = self._where.with_name(f"{self._where.name}-rank{os.environ['RANK']}")
        self._profile.dump_stats(path.with_suffix(".prof"))
        with path.with_suffix(".txt").open("w") as file:
            stats = pstats.Stats(self._profile, stream=file)
            stats.sort_stats("tottime").print_stats(60)
            stats.sort_stats("cumulative").print_stats(120)
        return {}
