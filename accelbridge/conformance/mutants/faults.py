"""Defects in what happens when something goes wrong: below ``torch.distributed``, and in the launcher."""

# torch.distributed re-exports without saying so.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelbridge.backend import World
from accelbridge.conformance.mutants import Patch, benign, mutant
from accelbridge.conformance.mutants.collectives import Done
from accelbridge.errors import CollectiveMismatch
from accelbridge.launch.agent import Agent
from accelbridge.portable.collectives import TorchCollectives
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.portable.guard import Guard
from accelbridge.portable.lowerings import Call
from accelbridge.portable.matmul import PortableMatmul
from accelbridge.portable.process_group import InterposedGroup, RecordedWork

_FOR_EVER_S = 3600.0


@mutant(
    "L13",
    "what fails hangs instead",
    dict.fromkeys(("FLT-001", "FLT-002", "FLT-003", "FLT-012", "FLT-022"), "TIMEOUT"),
)
def hangs(patch: Patch) -> None:
    def _mismatch(inner: Any, self: Any, *args: Any) -> None:
        time.sleep(_FOR_EVER_S)

    def wait(inner: Any, self: Any, timeout: timedelta = timedelta(0)) -> bool:
        try:
            return inner(self, timeout)
        except RuntimeError:
            time.sleep(_FOR_EVER_S)
            raise

    patch(Guard, "_mismatch", _mismatch)
    patch(RecordedWork, "wait", wait)


@mutant(
    "L14",
    "the time limit is ignored",
    dict.fromkeys(("FLT-003", "FLT-004", "FLT-010", "FLT-022"), "TIMEOUT"),
)
def no_limit(patch: Patch) -> None:
    _limited(patch, lambda _: _FOR_EVER_S)


@mutant("L26", "a rank that is merely slow is taken for lost", {"FLT-019": "RAISED"})
def impatient(patch: Patch) -> None:
    _limited(patch, lambda given: given / 20.0)


def _limited(patch: Patch, limit: Any) -> None:
    def init(inner: Any, self: Any, store: dist.Store, world: World, timeout_s: float, check: bool) -> None:
        inner(self, store, world, limit(timeout_s), check)

    patch(TorchCollectives, "init", init)


@mutant(
    "L20",
    "calls that do not fit together succeed, with whatever lies in memory",
    {"FLT-001": "ERROR", "FLT-002": "ERROR", "FLT-021": "ERROR"},
)
def mismatch_succeeds(patch: Patch) -> None:
    def init(inner: Any, self: Any, store: dist.Store, world: World, timeout_s: float, check: bool) -> None:
        inner(self, store, world, timeout_s, True)

    def _run(inner: Any, self: Any, call: Call) -> Any:
        try:
            return inner(self, call)
        except CollectiveMismatch:
            return Done()

    patch(TorchCollectives, "init", init)
    patch(InterposedGroup, "_run", _run)


@mutant(
    "L21",
    "the end of another rank goes unnoticed",
    {"FLT-005": "ERROR", "FLT-006": "ERROR", "FLT-014": "TIMEOUT", "FLT-017": "ERROR"},
)
def death_unnoticed(patch: Patch) -> None:
    def wait(inner: Any, self: Any, timeout: timedelta = timedelta(0)) -> bool:
        try:
            return inner(self, timeout)
        except RuntimeError:
            return True

    def _monitor_workers(inner: Any, self: Any, group: Any) -> Any:
        result = inner(self, group)
        if result.is_failed():
            time.sleep(_FOR_EVER_S)
        return result

    patch(RecordedWork, "wait", wait)
    patch(Agent, "_monitor_workers", _monitor_workers)


@mutant(
    "L22",
    "shutdown leaves the group, and init takes the old one",
    {"FLT-007": ("RAISED", "EXACT", "TIMEOUT"), "FLT-008": "ERROR"},
)
def old_group_reused(patch: Patch) -> None:
    def init(inner: Any, self: Any, *args: Any) -> None:
        if not dist.is_initialized():
            inner(self, *args)

    def shutdown(inner: Any, self: Any) -> None:
        return None

    patch(TorchCollectives, "init", init)
    patch(TorchCollectives, "shutdown", shutdown)


@mutant("L30", "a dtype that is not done gives zeros", {"FLT-016": "BOUND"})
def zeros_instead(patch: Patch) -> None:
    def matmul(inner: Any, self: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        out = inner(self, a, b, out_dtype)
        return out if a.is_floating_point() else torch.zeros_like(out)

    patch(PortableMatmul, "matmul", matmul)


@mutant("L31", "what is not supported ends in a bare RuntimeError", {"FLT-016": "ERROR", "FLT-010": "ERROR"})
def bare_errors(patch: Patch) -> None:
    def bare(inner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except Exception as error:
            raise RuntimeError("internal error 5") from error

    patch(EmulatedFp8, "quantize", bare)
    patch(TorchCollectives, "init", bare)


@benign("B5s", "one rank is slow, and well", ("COL-001", "COL-012", "COL-015", "COL-019", "FLT-007", "FLT-008"))
def slow_rank(patch: Patch) -> None:
    def _run(inner: Any, self: Any, call: Call) -> Any:
        if self.rank() == 0:
            time.sleep(0.01)
        return inner(self, call)

    patch(InterposedGroup, "_run", _run)
