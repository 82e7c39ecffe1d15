"""From results of tests to the parts of a report, by rules that ``verify`` applies again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelbridge.conformance.evidence import weakest
from accelbridge.conformance.pool import Outcome, nearest_to_limits
from accelbridge.conformance.registry import LEVELS, NEEDS, Case, must_pass
from accelbridge.conformance.report.model import Cell, Fact, Level, Metric, Test, Waiver, WorldResult
from accelbridge.conformance.status import HOLDS, Status, worst


@dataclass(frozen=True)
class Result:
    """One test: what became of it at each world size, and whether it could be falsified."""

    case: Case
    outcomes: tuple[Outcome, ...]
    falsified: tuple[bool | None, ...]
    execution: str = "eager"
    """The model under which it ran, which can give an id another meaning."""


def number(value: float) -> float | str:
    """A JSON number, or the name of what is none."""
    return value if math.isfinite(value) else {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")


def test_row(result: Result, evidence: str, waivers: Iterable[Waiver]) -> Test:
    """The row of one test."""
    case, outcomes = result.case, result.outcomes
    status = worst(outcome.status for outcome in outcomes)
    worst_outcome = next((o for o in outcomes if o.status == status), None)
    code = worst_outcome.code if worst_outcome else ""
    status, waiver = _waived(case.id, status, code, waivers)
    tried = [red for red in result.falsified if red is not None]
    metrics = nearest_to_limits(metric for outcome in outcomes for metric in outcome.metrics)
    proven = bool(outcomes) and all(outcome.on_device == "proven" for outcome in outcomes)
    return Test(
        id=case.id,
        revision=case.revision,
        level=case.level,
        property=case.asserted(result.execution),
        status=status,
        code=code,
        message=worst_outcome.message if worst_outcome else "nothing was heard of it",
        duration_s=round(sum(outcome.duration_s for outcome in outcomes), 3),
        comparisons=sum(outcome.comparisons for outcome in outcomes),
        falsified=all(tried) if tried else None,
        on_device="proven" if proven else "unproven",
        evidence=evidence,  # pyright: ignore[reportArgumentType]
        emulated=any(outcome.emulated for outcome in outcomes),
        metrics=[Metric(**{**m, **{k: number(m[k]) for k in ("value", "limit", "margin")}}) for m in metrics],
        worlds=[_world(outcome) for outcome in outcomes],
        waiver=waiver,
    )


def _world(outcome: Outcome) -> WorldResult:
    kept = {name: getattr(outcome, name) for name in WorldResult.model_fields}
    return WorldResult(**{**kept, "duration_s": round(outcome.duration_s, 3)})


def _waived(id: str, status: Status, code: str, waivers: Iterable[Waiver]) -> tuple[Status, str]:
    for waiver in waivers:
        if id in waiver.tests:
            if status == Status.PASS:
                return Status.XPASS_WAIVER, waiver.id
            if f"{status}:{code}" == waiver.expect:
                return Status.WAIVED, waiver.id
    return status, ""


def levels(asked: Sequence[str], tests: Mapping[str, Test], patched: Sequence[str] = ()) -> dict[str, Level]:
    """Whether each level that the ``asked`` ones rest upon is held: every id of its list must be there and pass, or
    be declared absent where the level can do without it (:data:`HOLDS`), and torch be as it was installed (``patched``
    names what is not)."""
    needed = {needed for level in asked for needed in NEEDS[level]}
    return {level: _level(must_pass(level), tests, patched) for level in LEVELS if level in needed}


def _level(required: list[str], tests: Mapping[str, Test], patched: Sequence[str]) -> Level:
    found = {id: tests[id].status if id in tests else Status.MISSING for id in required}
    there = [tests[id] for id in required if id in tests]
    blocking = [f"{id} {status.value}" for id, status in found.items() if status not in HOLDS]
    blocking += [f"torch PATCHED {name}" for name in patched]
    return Level(
        held=Status.PASS in found.values() and not blocking,
        required=len(required),
        passed=sum(status == Status.PASS for status in found.values()),
        waived=sum(status == Status.WAIVED for status in found.values()),
        not_supported=sum(status == Status.NOT_SUPPORTED for status in found.values()),
        evidence=weakest([test.evidence for test in there]),  # pyright: ignore[reportArgumentType]
        emulated=any(test.emulated for test in there),
        blocking=blocking,
    )


def headline(asked: Sequence[str], found: Mapping[str, Level], tests: Iterable[Test]) -> str:
    """One line: what was asked, whether it is held, and the weakest evidence among its mandatory tests."""
    counted, rows = [], list(tests)
    for level in asked:
        parts = [found[name] for name in NEEDS[level]]
        required, passed = sum(p.required for p in parts), sum(p.passed for p in parts)
        held = "held" if all(p.held for p in parts) else "NOT held"
        proof = weakest([p.evidence for p in parts]) + (", in part emulated" if any(p.emulated for p in parts) else "")
        waived, absent = sum(p.waived for p in parts), sum(p.not_supported for p in parts)
        counted.append(
            f"{level} {held}: {passed}/{required} pass, {absent} not supported, {waived} waived; evidence: {proof}"
        )
    falsified = [row.falsified for row in rows if row.falsified is not None]
    return "; ".join(counted) + f"; falsified {sum(falsified)}/{len(rows)}"


def summary(tests: Iterable[Test]) -> dict[str, int]:
    """Tests by status."""
    counts = Counter(test.status.value for test in tests)
    return {status.value: counts[status.value] for status in Status if counts[status.value]}


def cells(claimed: Iterable[Mapping[str, str]], results: Iterable[Result], tests: Mapping[str, Test]) -> list[Cell]:
    """The capability table with what tests say of each cell: refuted by one that failed, proven by one that passed."""
    by_cell: dict[tuple[str, ...], set[str]] = {}
    for result in results:
        for cell in (tuple(cell) for outcome in result.outcomes for cell in outcome.cells):
            by_cell.setdefault(cell, set()).add(result.case.id)
    rows = []
    for cell in claimed:
        ids = sorted(by_cell.get((cell["op"], cell["dtype"], cell["variant"]), ()))
        statuses = {tests[id].status for id in ids}
        if cell["level"] == "unsupported":
            verdict = "not claimed"
        elif statuses - {Status.PASS, Status.WAIVED, Status.NOT_SUPPORTED}:
            verdict = "refuted"
        else:
            verdict = "proven" if Status.PASS in statuses else "not shown"
        rows.append(
            Cell(op=cell["op"], dtype=cell["dtype"], variant=cell["variant"], claimed=cell["level"],  # pyright: ignore[reportArgumentType]
                 reason=cell["reason"], lowering=cell["lowering"], verdict=verdict, tests=ids)
        )  # fmt: skip
    return rows


def facts(stated: Mapping[str, Any], results: Iterable[Result]) -> list[Fact]:
    """What the backend states beside what probes found."""
    probed = {name: value for result in results for outcome in result.outcomes for name, value in outcome.notes.items()}
    return [
        Fact(
            name=name,
            stated=str(stated.get(name, "")),
            probed=str(probed.get(name, "")),
            agrees=str(stated[name]) == str(probed[name]) if name in stated and name in probed else None,
        )
        for name in sorted({*stated, *probed})
    ]
