"""What a test is given: the backend, data, and the only ways to say that something is right.

A failed check is noted and the test goes on, so that ranks stay in step; what a check is handed is first fetched from
the device, where it must lie. Checks are counted: a test without one, or whose references are all constant, proves
nothing (MISTRUSTED).
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelbridge import ops
from accelbridge.backend import Backend, Capabilities, Request, Support, World
from accelbridge.conformance import checks, falsify
from accelbridge.conformance.checks import Verdict
from accelbridge.conformance.oracle import data
from accelbridge.conformance.registry import Case
from accelbridge.errors import AccelbridgeError, Unsupported

_UNEQUAL = object()
TYPED = (AccelbridgeError, NotImplementedError, ValueError, TypeError, dist.DistError)
"""What says "I do not do this". A bare RuntimeError may as well be a failure within."""


class Abandoned(Exception):
    """The test cannot go on; what is wrong has been noted."""


class NotSupported(Exception):
    """A cell that this test may do without is declared absent."""


class TooSmall(Exception):
    """Too few devices or too little memory for this test."""


@dataclass
class Findings:
    """What the checks of one test found on one rank."""

    comparisons: int = 0
    vacuous: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    """(code, message) of each check that failed, in order."""
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The worst value of each metric: name, value, limit, tier, worst_index."""
    fetched: int = 0
    """Tensors that came from the device of the backend."""
    cells: set[tuple[str, str, str]] = field(default_factory=set)
    """Cells of the capability table that the test exercised."""
    emulated: bool = False
    """Whether one of them, or what the test is about, is emulated on this backend."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Facts that were probed, by capability or fact name: what INF-007 compares with the claims."""


@dataclass
class Bench:
    """One test on one rank."""

    case: Case
    backend: Backend
    capabilities: Capabilities
    world: World
    device: torch.device
    folder: Path
    """A new folder that all ranks of this test see."""
    seed: int
    store: dist.Store | None = None
    """A store that all ranks of this test see, with keys of its own; None on one rank."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the backend, as they were given."""
    phase: int = 0
    """Which of the case's phases this is; those before the last need no checks."""
    falsification: str = ""
    found: Findings = field(default_factory=Findings)
    answer: Callable[[int], None] = lambda ends_by: None
    """Tells the parent what has been found so far, which counts if this process then ends by the signal ``ends_by``;
    0: ends it here."""

    # ------------------------------------------------------------------------------------------------- data

    def _name(self, name: str) -> str:
        return f"{self.case.id}/{name}"

    def normal(self, *shape: int, name: str = "x", dtype: torch.dtype = torch.float32) -> Tensor:
        """Host tensor, standard normal. Other ``name``, other values; the same on every rank."""
        return data.normal(self.seed, self._name(name), shape).to(dtype)

    def uniform(self, *shape: int, name: str = "x", dtype: torch.dtype = torch.float32) -> Tensor:
        """Host tensor in [0, 1): all-positive data shows what cancels elsewhere."""
        return data.uniform(self.seed, self._name(name), shape).to(dtype)

    def wide(self, *shape: int, name: str = "x", dtype: torch.dtype = torch.float32) -> Tensor:
        """Host tensor, normal with exponents over 2^-12 .. 2^12."""
        return data.wide(self.seed, self._name(name), shape).to(dtype)

    def integers(
        self, *shape: int, low: int = -3, high: int = 3, name: str = "x", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Host tensor of integers in [low, high]."""
        return data.integers(self.seed, self._name(name), shape, low, high).to(dtype)

    def sparse(
        self, *shape: int, largest: int = 3, density: float = 0.1, name: str = "x", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Host tensor of integers in [-largest, largest], all but a share of ``density`` of them 0."""
        return data.sparse_integers(self.seed, self._name(name), shape, largest, density).to(dtype)

    # ------------------------------------------------------------------------------------------ the backend

    def put(self, x: Tensor) -> Tensor:
        """``x`` on the device, as torch moves it (tests of the offload interface move it themselves)."""
        return x.to(self.device, copy=True)

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call code of the vendor: an exception is the backend's failure (RAISED) and ends the test."""
        try:
            return call(*args, **kwargs)
        except (Abandoned, NotSupported, TooSmall):
            raise
        except Exception as error:
            self.fail(
                "RAISED", f"{getattr(call, '__qualname__', call)} raised {type(error).__name__}: {_first_line(error)}"
            )
            raise Abandoned from error

    def candidates(self, request: Request) -> list[tuple[str, Callable[..., Any]]]:
        """(name, callable) of every implementation of ``request.op`` that says it serves ``request``: the plan may
        bind any of them, so each must be right. ``reference`` is the portable one on this device, unless the backend
        states that it is wrong there, ``interface`` the method of the backend's own interface, where the op has
        them."""
        found: list[tuple[str, Callable[..., Any]]] = []
        if request.op in ops.NAMES and not self.capabilities.wrong_reference(request.op, request.dtype):
            found.append(("reference", ops.reference(request.op)))
        interface = getattr(self.backend, request.op, None)
        if callable(method := getattr(interface, request.op, None)):
            found.append(("interface", method))
        self.covers(request.op, request.dtype, request.variant)
        fitting = (c for c in self.backend.implementations() if c.op == request.op and self.run(c.supports, request))
        return [*found, *((candidate.name, self.run(candidate.load)) for candidate in fitting)]

    def covers(self, op: str, dtype: str, variant: str = "") -> None:
        """Say that this test shows the cell (op, dtype, variant) to be right; ``candidates`` and ``require`` say so
        themselves."""
        self.found.cells.add((op, dtype, variant))
        if self.capabilities.support(op, dtype, variant).level == "emulated":
            self.found.emulated = True

    def supported(self, op: str, dtype: str, variant: str = "") -> bool:
        """Whether the backend states that it does this; for choosing what a test tries, never for skipping it."""
        return bool(self.capabilities.support(op, dtype, variant))

    def needs(self, support: Support, what: str) -> None:
        """End the test as NOT_SUPPORTED where the backend states that it lacks ``what``."""
        if not support:
            raise NotSupported(f"{what}: {support.reason}")

    def require(self, op: str, dtype: str, variant: str = "") -> None:
        """End the test as NOT_SUPPORTED where the cell is declared absent and the test may do without it; where it may
        not, an absent cell is a failure (CAPABILITY)."""
        support = self.capabilities.support(op, dtype, variant)
        if support:
            self.covers(op, dtype, variant)
            return
        if (op, dtype, variant) in self.case.optional:
            raise NotSupported(f"{op} {dtype} {variant}: {support.reason}".strip())
        self.fail("CAPABILITY", f"{op} {dtype} {variant} is mandatory here and declared unsupported: {support.reason}")
        raise Abandoned

    # ----------------------------------------------------------------------------------------------- faults

    @contextmanager
    def ends_within(self, limit_s: float, what: str) -> Iterator[None]:
        """The block ends, well or with an error, within ``limit_s``; a process that hangs in it is ended (TIMEOUT).

        A thread of its own keeps the time: a library that waits for ever does not come back to be asked.
        """
        timer = threading.Timer(limit_s, self._overdue, (limit_s, what))
        timer.daemon = True
        timer.start()
        began = time.monotonic()
        try:
            yield
        finally:
            timer.cancel()
            self.at_most(time.monotonic() - began, limit_s, f"seconds of {what}", code="TIMEOUT")

    def _overdue(self, limit_s: float, what: str) -> None:
        self.fail("TIMEOUT", f"{what} did not end within {limit_s:g} s")
        self.answer(0)

    def may_abort(self) -> None:
        """From here on this rank may end by SIGABRT where the backend declares that of calls that do not fit together
        (fact ``collective.on_mismatch`` = "abort"); what its checks have found until now then counts."""
        if self.capabilities.facts.get("collective.on_mismatch") == "abort":
            self.answer(signal.SIGABRT)

    def die(self) -> None:
        """Kill this rank, as the test wants it: what its checks have found until now counts."""
        self.answer(signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    # ----------------------------------------------------------------------------------------------- checks

    def equal(self, got: Tensor, want: Tensor, code: str = "EXACT", name: str = "", host: bool = False) -> None:
        """The same shape, dtype and bits as the host tensor ``want``. ``host``: ``got`` must lie on the host too, as
        what offloading returns."""
        self._judge(checks.equal(self.fetch(got, host), want), code, name)

    def within(self, got: Tensor, want: Tensor, bound: Tensor | float, code: str = "BOUND", name: str = "") -> None:
        """|got - want| <= bound for every element, in float64."""
        limit = bound if isinstance(bound, Tensor) else torch.tensor(bound, dtype=torch.float64)
        self._judge(checks.within(self.fetch(got), want, limit), code, name)

    def sqnr(
        self, got: Tensor, want: Tensor, floor_db: float, code: str = "SQNR", name: str = "", rows: bool = True
    ) -> None:
        """SQNR of ``got`` against ``want``, as a whole and (``rows``) in every row, at least ``floor_db``."""
        self._judge(checks.sqnr(self.fetch(got), want, floor_db, rows), code, name)

    def at_most(self, value: float, limit: float, name: str, code: str = "LIMIT") -> None:
        """value <= limit."""
        self._judge(checks.at_most(math.nan if self.falsification else value, limit, name), code, name)

    def at_least(self, value: float, limit: float, name: str, code: str = "LIMIT") -> None:
        """value >= limit."""
        self._judge(checks.at_least(math.nan if self.falsification else value, limit, name), code, name)

    def same(self, got: object, want: object, name: str, code: str = "VALUE") -> None:
        """Two plain values (numbers, texts, tuples of them) of the same type are equal."""
        self._judge(checks.same(_UNEQUAL if self.falsification else got, want, name), code, name)

    def raises(
        self,
        expected: type[BaseException] | tuple[type[BaseException], ...],
        call: Callable[..., Any],
        *args: Any,
        code: str = "ERROR",
        says: str = "",
        **kwargs: Any,
    ) -> BaseException | None:
        """``call`` raises one of ``expected``, with ``says`` in its message (in any case). Returns the error."""
        wanted = expected if isinstance(expected, tuple) else (expected,)
        error: BaseException | None = None
        try:
            call(*args, **kwargs)
        except Exception as raised:
            error = raised
        seen = None if self.falsification else error
        good = isinstance(seen, wanted) and says.lower() in str(seen).lower()
        text = f"{type(seen).__name__}: {_first_line(seen)}" if seen is not None else "no error"
        names = " or ".join(kind.__name__ for kind in wanted)
        message = "" if good else f"{names}{f' saying {says!r}' if says else ''} expected, found {text}"
        self._judge(Verdict(good, "error", float(not good), 0.0, 1, message), code, "")
        return error

    def fail(self, code: str, message: str) -> None:
        """Note a failure that no comparison found."""
        self.found.failures.append((code, message))

    def note(self, fact: str, value: object) -> None:
        """Record a fact that was probed, for the report."""
        self.found.notes[fact] = value

    @contextmanager
    def must_not_raise(self) -> Iterator[None]:
        """As :meth:`run`, for a block."""
        try:
            yield
        except (Abandoned, NotSupported, TooSmall):
            raise
        except Exception as error:
            self.fail("RAISED", f"raised {type(error).__name__}: {_first_line(error)}")
            raise Abandoned from error

    def fetch(self, got: Tensor, host: bool = False) -> Tensor:
        """A host copy of what the backend produced, which must be a plain tensor on the backend's device, or on the
        ``host``."""
        if not isinstance(got, Tensor):
            self.fail("TYPE", f"a tensor expected, found {type(got).__name__}")
            raise Abandoned
        place = "cpu" if host else self.device.type
        if got.device.type != place:
            self.fail("DEVICE", f"the result lies on {got.device}, not on {place if host else self.device}")
        elif not host:
            self.found.fetched += 1
        there = got.detach().to("cpu", copy=True)
        return falsify.corrupt(there, self.falsification) if self.falsification else there

    def _judge(self, verdict: Verdict, code: str, name: str) -> None:
        self.found.comparisons += max(1, verdict.compared)
        self.found.vacuous += verdict.compared if verdict.vacuous else 0
        label = name or self.case.id
        if not verdict.good:
            self.fail(code, f"{label}: {verdict.message}" if name else verdict.message)
        self._keep(f"{code} {label}" if name else code, verdict)

    def _keep(self, label: str, verdict: Verdict) -> None:
        """Keep the verdict that is nearest to its limit, or furthest over it."""
        margin = _margin(verdict)
        kept = self.found.metrics.get(label)
        if kept is None or margin > kept["margin"]:
            self.found.metrics[label] = {
                "name": label,
                "metric": verdict.metric,
                "value": verdict.value,
                "limit": verdict.limit,
                "margin": margin,
                "worst_index": list(verdict.worst),
            }


def is_unsupported(error: BaseException) -> bool:
    """Whether ``error`` is the typed refusal of something declared absent."""
    return isinstance(error, (Unsupported, NotImplementedError))


def _margin(verdict: Verdict) -> float:
    """How much of what is allowed was used: 0 nothing, 1 all of it, above 1 too much."""
    if not verdict.good:
        return math.inf
    if verdict.metric.startswith("SQNR"):  # each 6 dB is a factor of 2
        return 0.0 if math.isinf(verdict.value) else 2.0 ** ((verdict.limit - verdict.value) / 6.02)
    used, allowed = (verdict.limit, verdict.value) if verdict.floor else (verdict.value, verdict.limit)
    return abs(used / allowed) if allowed else 0.0


def _first_line(error: BaseException | None) -> str:
    return (str(error).splitlines() or [""])[0][:300]
