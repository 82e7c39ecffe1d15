"""The scenes: a fault, how it gets into a run, and what has to become of the run.

A scene is data; :mod:`tests.faults.measure` plays it. ``says`` is what the user must read, ``logs`` what must stand in
the ranks' logs, both regular expressions; a rank that is killed can say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 6.0
"""parallel.timeout and parallel.heartbeat_timeout of all scenes."""
UNHARMED = "goes on unharmed"
ERROR = "error"
STOPPED = "saves and stops"
ENDED = "all ends at once"

Fault = tuple[str, int | None, int, str]
"""Place, rank (None: every rank), step, action; see tests.faults.inject."""


@dataclass(frozen=True)
class Scene:
    """One fault in one run."""

    name: str
    outcome: str
    faults: Sequence[Fault] = ()
    outer: str = ""
    """What is done from outside, a name in tests.faults.measure.OUTER."""
    says: str = ""
    logs: Mapping[int, str] = field(default_factory=dict)
    code: int | None = None
    """Exit code of the launcher; None: that of the outcome."""
    within: float = 30.0
    """Seconds from the fault until every process has ended."""
    size: int = 2
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sample: bool = False
    """Whether the ordinary tests play it too."""

    @property
    def exit_code(self) -> int:
        return self.code if self.code is not None else {UNHARMED: 0, STOPPED: 75}.get(self.outcome, 1)


UNAVAILABLE = 69
STARTING = 90.0
"""Seconds of scenes whose fault is there before the run starts: Python and torch have to be imported first."""
SAVES: Mapping[str, Mapping[str, Any]] = {"checkpoint": {"interval": 5}}
VALIDATES: Mapping[str, Mapping[str, Any]] = {"train": {"eval_interval": 5}}
CHECKED: Mapping[str, Mapping[str, Any]] = {"parallel": {"check_collectives": True}}
FOUR: Mapping[str, Mapping[str, Any]] = {"parallel": {"dp_replicate": 2}}


def _died(name: str, action: str, how: str, rank: int = 1, **more: Any) -> Scene:
    lost = {1 - rank: f"found: rank {rank} gave no sign of life"}
    return Scene(name, ERROR, [("model", rank, 6, action)], says=f"(?s)rank {rank}: {how}", logs=lost, **more)


def _raised(name: str, place: str, action: str, says: str, code: int = 1, **more: Any) -> Scene:
    logs = {0: "found: rank 1 .* failed with", 1: says}
    return Scene(name, ERROR, [(place, 1, 6, action)], says=f"(?s)rank 1: .*{says}", logs=logs, code=code, **more)


def _hung(name: str, action: str, says: str, **more: Any) -> Scene:
    return Scene(name, ERROR, [("model", 1, 6, action)], says=says, logs={0: says, 1: says}, code=UNAVAILABLE, **more)


def _mismatched(name: str, action: str, says: str) -> Scene:
    return Scene(
        f"{name}, with check_collectives",
        ERROR,
        [("model", None, 6, action)],
        says=says,
        logs={0: says, 1: says},
        code=2,
        sections=CHECKED,
    )


SCENES: tuple[Scene, ...] = (
    # ---- a process ends
    _died("SIGKILL of a rank", "SIGKILL", "ended by signal 9; .*last seen in", code=1, sample=True),
    _died("SIGKILL of rank 0", "SIGKILL", "ended by signal 9; .*last seen in", rank=0, code=1),
    Scene(
        "SIGKILL of one rank of four",
        ERROR,
        [("model", 2, 6, "SIGKILL")],
        says="(?s)rank 2: ended by signal 9; .*last seen in",
        logs=dict.fromkeys((0, 1, 3), "found: rank 2 gave no sign of life"),
        size=4,
        sections=FOUR,
    ),
    _died("segmentation fault of a rank", "SIGSEGV", "ended by signal 11", code=1),
    Scene("SIGKILL of the launcher", ENDED, outer="kill launcher", code=-9, within=8),
    _raised("sys.exit(3) in a rank", "model", "sys.exit(3)", "SystemExit", 3),
    Scene("sys.exit(0) in a rank", ERROR, [("model", 1, 6, "sys.exit(0)")], says="(?s)rank 1: .*SystemExit: 0"),
    _died("os._exit(7) in a rank", "os._exit(7)", "exit code 7 without a message", code=7),
    Scene(
        "os._exit(0) in a rank",
        ERROR,
        [("model", 1, 6, "os._exit(0)")],
        says="(?s)rank 0: .*rank 1 gave no sign of life",
        code=UNAVAILABLE,
    ),
    # ---- a rank fails
    _raised("exception in the model of one rank", "model", "exception", "the rank's own reason", sample=True),
    _raised("exception in the data of one rank", "data", "exception", "the rank's own reason"),
    _raised("exception in the loss of one rank", "loss", "exception", "the rank's own reason"),
    Scene(
        "exception in the evaluation of one rank",
        ERROR,
        [("evaluation", 1, 1, "exception")],
        says="(?s)rank 1: .*the rank's own reason",
        logs={0: "found: rank 1 .* failed with ValueError", 1: "the rank's own reason"},
        sections=VALIDATES,
    ),
    _raised("data ends early on one rank", "data", "IndexError", "sample 17 of 16"),
    _raised("a sample of another shape on one rank", "data", "half a sample", "unlike sample", 2),
    _raised("token ids outside the vocabulary on one rank", "data", "unknown tokens", "index out of range"),
    _raised("the data thread of one rank ends", "data", "end data thread", "SystemExit", 5),
    _raised("out of memory on one rank", "model", "out of memory", "memory ran out", 5),
    # ---- a rank does something else
    _hung("endless loop in Python on one rank", "loop", "found: .*rank 0 called it, rank 1 did not"),
    _hung("sleep on one rank", "sleep", "found: .*rank 0 called it, rank 1 did not"),
    Scene("sleep on one rank, shorter than the limit", UNHARMED, [("model", 1, 6, "short sleep")]),
    Scene(
        "data of one rank hangs",
        ERROR,
        [("data", 1, 6, "sleep")],
        says="rank 1 .*its thread accelbridge-data",
        logs=dict.fromkeys((0, 1), "rank 1 .*its thread accelbridge-data"),
        code=UNAVAILABLE,
    ),
    Scene(
        "one rank holds the interpreter's lock forever",
        ERROR,
        [("model", 1, 6, "hold interpreter")],
        says="found: rank 1 gave no sign of life",
        logs={0: "found: rank 1 gave no sign of life"},
        code=UNAVAILABLE,
        within=45,
    ),
    Scene(
        "SIGSTOP of a rank, longer than the limit",
        ERROR,
        [("model", 1, 6, "SIGSTOP")],
        says="found: rank 1 gave no sign of life",
        logs={0: "found: rank 1 gave no sign of life"},
        code=UNAVAILABLE,
        within=60,
    ),
    Scene("SIGSTOP of a rank, shorter than the limit", UNHARMED, [("model", 1, 6, "SIGSTOP")], "continue"),
    Scene("SIGSTOP of rank 0, shorter than the limit", UNHARMED, [("model", 0, 6, "SIGSTOP")], "continue"),
    Scene(
        "slow steps on one rank",
        UNHARMED,
        [("model", 1, 6, "slow steps")],
        says="slow rank at step .*: rank 1 takes",
        sections={"train": {"steps": 40}, "metrics": {"interval": 5}},
    ),
    # ---- collectives that do not fit
    _hung("one rank makes an extra collective", "extra collective", "different things: op: .*barrier on rank 1"),
    _hung(
        "one rank waits for a message that nobody sends", "unanswered receive", r"rank 1 .*in recv float32.4. peer 0"
    ),
    Scene(
        "collectives in another order",
        ERROR,
        [("model", None, 6, "order")],
        says="different things: op: allreduce on rank 0; broadcast on rank 1",
        logs=dict.fromkeys((0, 1), "different things: op: allreduce on rank 0; broadcast on rank 1"),
        code=UNAVAILABLE,
    ),
    _mismatched("other shape", "shape", "tensors: float32.5. on rank 0; float32.3. on rank 1"),
    _mismatched("other dtype", "dtype", "tensors: float32.4. on rank 0; float64.4. on rank 1"),
    _mismatched("other collective", "op", "op: allreduce on rank 0; allgather on rank 1"),
    _mismatched("other reduce op", "reduce op", "reduce op: SUM on rank 0; MAX on rank 1"),
    _mismatched("other root", "root", "root: 0 on rank 0; 1 on rank 1"),
    _mismatched("other order", "order", "op: allreduce on rank 0; broadcast on rank 1"),
    # ---- what a run stands on
    Scene("death of the store's host, between steps", UNHARMED, [("model", 1, 6, "end store")], "own store"),
    Scene(
        "port taken", ERROR, outer="port taken", says="--port .* asked; Address already in use", code=2, within=STARTING
    ),
    Scene(
        "disk full while saving, on one rank",
        ERROR,
        [("save", 1, 1, "file limit")],
        says="(?s)saving to .* failed: .*File too large",
        logs={1: "File too large"},
        code=2,
        sections=SAVES,
    ),
    Scene(
        "output folder cannot be written",
        ERROR,
        outer="read-only output",
        says="cannot be written",
        code=2,
        within=STARTING,
    ),
    Scene("slow disk on one rank", UNHARMED, [("save", 1, 1, "short sleep")], sections=SAVES),
    Scene(
        "flipped byte in a checkpoint",
        ERROR,
        outer="flipped byte",
        says="does not match|checksum|damaged",
        code=2,
        within=STARTING,
    ),
    Scene("missing shard of a checkpoint", ERROR, outer="missing shard", says="missing", code=2, within=STARTING),
    Scene("clock goes back an hour on one rank", UNHARMED, [("model", 1, 6, "clock back")]),
    # ---- numbers
    # Token ids hold no NaN: it is what a broken sample becomes in the loss.
    Scene(
        "NaN from a sample of one rank",
        ERROR,
        [("loss", 1, 6, "NaN")],
        says="(?s)step 6: .*guards.nonfinite is stop, so every rank has stopped",
        logs={},
        code=3,
    ),
    Scene(
        "NaN from a sample of one rank, with guards.nonfinite skip",
        UNHARMED,
        [("loss", 1, 6, "NaN")],
        says="step 6: update skipped",
        sections={"guards": {"nonfinite": "skip"}},
    ),
    Scene(
        "overflow in float16", UNHARMED, [("loss", None, 6, "overflow")], sections={"precision": {"compute": "fp16"}}
    ),
    # ---- ranks that do not agree
    Scene(
        "other versions on one rank",
        ERROR,
        [("start", 1, 1, "other torch")],
        says="torch: .* on rank 0; .* on rank 1",
        logs={},
        code=2,
    ),
    Scene(
        "another recipe on one rank",
        ERROR,
        outer="other recipe",
        says="optimizer.lr: .* on rank 0; .* on rank 1",
        code=2,
        within=STARTING,
    ),
    # ---- signals to the whole run
    Scene("SIGTERM", STOPPED, outer="SIGTERM", says="SIGTERM: checkpoint at step"),
    Scene(
        "SIGTERM during a save",
        STOPPED,
        [("save", 1, 1, "short sleep")],
        outer="SIGTERM after the fault",
        says="SIGTERM: checkpoint at step",
        sections=SAVES,
    ),
    Scene("SIGINT", ENDED, outer="SIGINT", code=130),
)
