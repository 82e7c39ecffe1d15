"""What a section is given: the backend, the device, a clock, and a place to say what it found."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from gpu.sizes import Sizes
from gpu.timing import Calls, Clock, Timing, take_turns
from torch import Tensor

from accelbridge.backend import World
from accelbridge.errors import Unsupported
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import Target, choose_target

T = TypeVar("T")
BUDGET = "budget"
"""Why something is left out that would have taken longer than there was time."""
UNKNOWN = "unknown"
EMULATED = "emulated"


class Report:
    """Lines of JSON in a file, each written at once: what was said before a process is ended is kept."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def _say(self, kind: str, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, "value": value}) + "\n")
        self._file.flush()

    def row(self, **values: Any) -> None:
        """One thing that was measured."""
        self._say("row", values)

    def fact(self, **values: Any) -> None:
        """What all rows of the section share."""
        self._say("fact", values)

    def leave_out(self, what: str, why: str) -> None:
        """Something that is not measured, and why."""
        self._say("left_out", {"what": what, "why": why})

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """The one place where whatever goes wrong is data: the error is reported, and what comes after goes on. What
        says that it is not supported is left out with its reason."""
        try:
            yield
        except Unsupported as error:
            self.leave_out(what, str(error))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()
            self._say("error", {"what": what, "error": text, "traceback": traceback.format_exc()})

    def end(self) -> None:
        """The section came to its end."""
        self._say("end", {})


class Bench(Report):
    """One section's process. ``seconds``: how long it may take from now on."""

    def __init__(self, path: Path, sizes: Sizes, backend: str, seconds: float) -> None:
        super().__init__(path)
        self.sizes = sizes
        self.name = backend
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that this section still has."""
        return self._until - time.monotonic()

    def has_time(self, what: str, seconds: float) -> bool:
        """Whether ``seconds`` are left; if not, ``what`` is left out."""
        if self.left() >= seconds:
            return True
        self.leave_out(what, BUDGET)
        return False

    @cached_property
    def target(self) -> Target:
        return choose_target(TrainConfig(), self.name)

    @cached_property
    def device(self) -> torch.device:
        """Bound at the first use: sections whose processes' children measure leave it to them."""
        device = self.target.backend.device.bind(World())
        self.target.backend.device.seed(0)
        return device

    @cached_property
    def clock(self) -> Clock:
        _ = self.device
        clock = Clock(self.target.backend.device_type, self.target.backend.device.synchronize)
        self.fact(clock=clock.kind, rotated_bytes=self.rotate_bytes)
        return clock

    @cached_property
    def rotate_bytes(self) -> int:
        """Over how many bytes inputs are rotated: those of the sizes, and twice what the device says its cache has."""
        properties = getattr(torch.get_device_module(self.device.type), "get_device_properties", None)
        told = properties(self.device) if properties is not None else None
        return max(self.sizes.rotate_bytes, 2 * getattr(told, "L2_cache_size", 0))

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Standard normal times ``scale``, made on the device."""
        return torch.randn(*shape, device=self.device, dtype=dtype) * scale

    def working(self, what: str, make: Callable[[], Calls]) -> Calls | None:
        """What ``make`` gives, after all of it has run once; None where that failed, which is reported."""
        with self.attempt(what):
            calls = make()
            for call in calls:
                call()
            self.target.backend.device.synchronize()
            return calls
        return None

    def take_turns(self, ways: Mapping[str, Calls | None]) -> dict[str, Timing]:
        """Time those of ``ways`` that work."""
        there = {name: calls for name, calls in ways.items() if calls is not None}
        return take_turns(self.clock, there, self.sizes.seconds, self.sizes.rounds)

    def of_peak(self, flops: float, dtype: str, level: str = "full") -> float | str:
        """``flops`` a second as a share of the chip's peak in ``dtype``; of what is emulated there is no share."""
        if level != "full":
            return EMULATED
        peak = self.target.capabilities.chip.peak_flops.get(dtype)
        return UNKNOWN if peak is None else flops / peak

    def memory_peak(self) -> int | None:
        return self.target.backend.device.memory()["peak"]


def sqnr_db(got: Tensor, want: Tensor) -> float | str:
    """Signal over noise of ``got`` against ``want``, in dB: that what is timed is the same thing; "equal" where they
    are, "not finite" where one of them isn't."""
    signal = noise = 0.0
    for a, b in zip(got.flatten().split(2**26), want.flatten().split(2**26), strict=True):
        wide = b.float()
        signal += wide.square().sum().item()
        noise += (a.float() - wide).square().sum().item()
    if noise == 0:
        return "equal"
    return 10 * math.log10(signal / noise) if math.isfinite(signal + noise) and signal else "not finite"


def rotating(make: Callable[[], T], copies: int) -> list[T]:
    """``copies`` of what ``make`` gives, a new one each time."""
    return [make() for _ in range(copies)]
