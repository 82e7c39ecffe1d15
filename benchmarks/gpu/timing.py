"""Time of work on a device: events of the device where its module has them, medians of rounds in which things take
turns, inputs that rotate."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Calls = Sequence[Callable[[], object]]
"""The same work on inputs of its own each."""
MOST_CALLS = 200
"""Of one thing in a round."""


@dataclass(frozen=True)
class Timing:
    """What one thing took."""

    rounds: tuple[float, ...]
    """Seconds per call: the median of each round."""
    host: float | None
    """Seconds until the host had queued a call: the median of rounds. Where that is as long as the call took, the host
    was what took the time. None: the clock is the host's own."""
    calls: int
    """In each round."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ms": 1e3 * self.seconds,
            "ms_least": 1e3 * min(self.rounds),
            "ms_most": 1e3 * max(self.rounds),
            "host_ms": None if self.host is None else 1e3 * self.host,
            "host_bound": self.host is not None and self.host >= 0.9 * self.seconds,
            "calls": self.calls * len(self.rounds),
        }


def _event_of(device_type: str) -> Callable[..., Any] | None:
    """What makes an event that tells time; None where the device's module has none."""
    event = getattr(torch.get_device_module(device_type), "Event", None)
    if event is None or not hasattr(event, "elapsed_time"):
        return None
    if event.elapsed_time is torch.Event.elapsed_time:
        return partial(torch.Event, device=device_type)  # which takes no object of a subclass (torch 2.13)
    return event


class Clock:
    """Times calls on the bound device. ``synchronize`` waits for it."""

    def __init__(self, device_type: str, synchronize: Callable[[], None]) -> None:
        self._event = _event_of(device_type)
        self._synchronize = synchronize

    @property
    def kind(self) -> str:
        return "events of the device" if self._event is not None else "clock of the host"

    def times(self, calls: Calls) -> tuple[list[float], float | None]:
        """(seconds of each of ``calls``, seconds per call until the host had queued them, where events tell the
        former)."""
        if self._event is None:
            return self._host_times(calls), None
        marks = [self._event(enable_timing=True) for _ in range(len(calls) + 1)]
        self._synchronize()
        calls[-1]()  # the device is at work when the first mark is queued, so that no call waits for the host alone
        began = time.perf_counter()
        marks[0].record()
        for call, mark in zip(calls, marks[1:], strict=True):
            call()
            mark.record()
        host = (time.perf_counter() - began) / len(calls)
        self._synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)], host

    def _host_times(self, calls: Calls) -> list[float]:
        found = []
        self._synchronize()
        for call in calls:
            began = time.perf_counter()
            call()
            self._synchronize()
            found.append(time.perf_counter() - began)
        return found


def take_turns(clock: Clock, ways: Mapping[str, Calls], seconds: float, rounds: int) -> dict[str, Timing]:
    """Time each of ``ways``, which have run once, in about ``seconds`` for all: rounds in reversed order every time, so
    that a device that grows slower as it grows warm favours none."""
    share = seconds / rounds / max(1, len(ways))
    counts = {name: _count(clock, calls, share) for name, calls in ways.items()}
    turning = {name: itertools.cycle(calls) for name, calls in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    queued: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            each, host = clock.times(list(itertools.islice(turning[name], counts[name])))
            found[name].append(statistics.median(each))
            queued[name] += [] if host is None else [host]
    hosts = {name: statistics.median(taken) if taken else None for name, taken in queued.items()}
    return {name: Timing(tuple(taken), hosts[name], counts[name]) for name, taken in found.items()}


def _count(clock: Clock, calls: Calls, seconds: float) -> int:
    """How many calls take ``seconds``; the two runs that tell it warm up as well."""
    clock.times(calls)
    each, _ = clock.times(calls)
    return max(1, min(MOST_CALLS, round(seconds / max(statistics.median(each), 1e-7))))


def copies_for(bytes_each: int, rotate_bytes: int) -> int:
    """Sets of inputs of ``bytes_each`` that hold ``rotate_bytes`` together: at least 2, at most 32."""
    return max(2, min(32, -(-rotate_bytes // max(1, bytes_each))))
