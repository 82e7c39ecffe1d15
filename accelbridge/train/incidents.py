"""What went wrong in a run, and where its time went, from the events and step lines of its metrics. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Lines = Sequence[dict[str, Any]]

_PARTS = ("data", "forward", "backward", "optimizer")
"""Parts of ``step_time``, in the order of a step."""
_SHOWN = 5
"""Incidents of a kind that are listed one by one."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that was reported as slow."""

    reports: int
    worst_ratio: float
    """Its step time over that of the others, at worst."""


@dataclass(frozen=True)
class Incidents:
    """Counts and steps of what happened besides training."""

    skipped_updates: int
    """Left out because they were not finite: by ``guards.nonfinite: skip`` or by the loss scale of float16."""
    halted: list[str]
    """Stops by a guard: its message, which begins with the step or the loss spike."""
    spikes: list[int]
    """Steps of loss spikes that were only reported."""
    rollbacks: list[dict[str, Any]]
    """``spike`` and ``to``, steps."""
    slow_ranks: dict[str, SlowRank]
    """By rank."""
    skipped_steps: list[int] = field(default_factory=list)
    """Those that a guard skipped."""


def incidents(events: Lines, steps: Lines) -> Incidents:
    """Sort the events of a run. ``steps`` are its step lines."""
    of = {kind: [e for e in events if e["event"] == kind] for kind in {e["event"] for e in events}}
    skipped = [int(e.get("step", 0)) for e in of.get("skipped_update", [])]
    scaled = max((int(line.get("skipped_updates", 0)) for line in steps), default=0)
    slow: dict[str, SlowRank] = {}
    for event in of.get("slow_rank", []):
        name, ratio = str(event.get("rank")), float(event.get("ratio", 0.0))
        before = slow.get(name, SlowRank(0, 0.0))
        slow[name] = SlowRank(before.reports + 1, max(before.worst_ratio, ratio))
    return Incidents(
        skipped_updates=max(scaled, len(skipped)),  # the count of float16 holds both
        halted=[str(e.get("message", e.get("cause"))) for e in of.get("halted", [])],
        spikes=[int(e.get("step", 0)) for e in of.get("spike", [])],
        rollbacks=[{"spike": e.get("spike"), "to": e.get("step")} for e in of.get("rollback", [])],
        slow_ranks=slow,
        skipped_steps=skipped,
    )


def incident_rows(found: Incidents, restarts: Sequence[int]) -> list[tuple[str, str]]:
    """(name, text) of each kind of which there is something to say."""
    rows = []
    if restarts:
        rows.append(("restarts", f"after step {_listed([f'{step:,}' for step in restarts])}"))
    if found.skipped_updates:
        at = f", at step {_listed([f'{step:,}' for step in found.skipped_steps])}" if found.skipped_steps else ""
        rows.append(
            ("skipped", f"{found.skipped_updates:,} update{'s' * (found.skipped_updates != 1)}, not finite{at}")
        )
    rows += [("halted", message.partition(";")[0]) for message in found.halted[-_SHOWN:]]
    if found.spikes:
        rows.append(("spikes", f"at step {_listed([f'{step:,}' for step in found.spikes])}"))
    rows += [("rollback", f"from the spike at step {r['spike']} to step {r['to']}") for r in found.rollbacks[-_SHOWN:]]
    rows += [
        ("slow rank", f"{rank}: up to {slow.worst_ratio:.2f} x the others, reported {slow.reports:,} time(s)")
        for rank, slow in sorted(found.slow_ranks.items())
    ]
    return rows


def _listed(texts: Sequence[str]) -> str:
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def time_split(steps: Lines) -> dict[str, float]:
    """Mean seconds per step by part, as ``accelbridge.train.step_times`` defines them; ``other`` is what of
    ``step_time`` is in no part. Empty for a run that recorded none."""
    timed = [line for line in steps if "time_forward" in line]
    if not timed:
        return {}

    def mean(name: str) -> float:
        return sum(float(line.get(name, 0.0)) for line in timed) / len(timed)

    split = {part: mean(f"time_{part}") for part in _PARTS}
    split["other"] = max(0.0, mean("step_time") - sum(split.values()))
    return split | {"wait": mean("time_wait"), "checkpoint": mean("time_checkpoint")}


def time_table(split: dict[str, float]) -> list[str]:
    """Lines of a table: part, milliseconds per step, share of the whole."""
    whole = sum(split.values()) or 1.0
    rows = [f"  {part:<11}{1e3 * seconds:>10.2f} ms{seconds / whole:>8.1%}" for part, seconds in split.items()]
    return ["time per step (mean, host)", *rows] if split else []
