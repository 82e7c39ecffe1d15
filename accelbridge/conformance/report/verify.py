"""Re-checks of a report by whoever is handed it, and the difference of two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from accelbridge.conformance.certify import applicable, known_waivers
from accelbridge.conformance.evidence import STRENGTHS
from accelbridge.conformance.pool import Outcome
from accelbridge.conformance.registry import NEEDS, cases, must_pass
from accelbridge.conformance.report import build
from accelbridge.conformance.report.identity import must_pass_sha, suite_identity
from accelbridge.conformance.report.model import Report, Subject, parse
from accelbridge.conformance.report.write import digests, render
from accelbridge.conformance.status import Status
from accelbridge.errors import ConfigError


def load(path: Path) -> Report:
    """The report in folder ``path``, or in the file itself. ConfigError where there is none, or it breaks the
    schema."""
    file = path / "report.json" if path.is_dir() else path
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(
            f"{path} asked as a report; it holds no report.json; name the folder given as --out"
        ) from None
    except (ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} asked as a report; it does not follow the schema abcr-1: {error}") from None


def verify(folder: Path) -> tuple[list[str], list[str]]:
    """(faults, notes) of the report in ``folder``. A fault means that the report does not say what was found."""
    report = load(folder)
    faults = [*_files(folder, report), *_events(folder, report), *_completeness(report), *_conclusions(report)]
    notes = []
    if report.suite.sha256 != suite_identity()["sha256"]:
        faults.insert(
            0, f"made by another suite than this one (its accelbridge is {report.suite.version}): verify it there"
        )
    if report.suite.unmodified is False:
        faults.append("the suite's files were not those of its distribution")
    if report.suite.unmodified is None:
        notes.append("made from a source checkout, whose files nobody recorded")
    if report.run.mode != "certify" or report.run.filters:
        notes.append("a run with filters or in development mode: it certifies nothing")
    return faults, notes


def _files(folder: Path, report: Report) -> list[str]:
    recorded, faults = folder / "SHA256SUMS", []
    if not recorded.is_file():
        return ["SHA256SUMS is missing"]
    said, found = recorded.read_text(errors="replace").splitlines(), digests(folder).splitlines()
    for line in sorted(set(said) ^ set(found)):
        name = line.split("  ", 1)[-1]
        faults.append(
            f"{name}: {'changed or missing' if line in said else 'changed or added'} since the report was written"
        )
    for name, text in render(report).items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif path.read_text(encoding="utf-8", errors="replace") != text:
            faults.append(f"{name} does not say what report.json says")
    return faults


def _events(folder: Path, report: Report) -> list[str]:
    """What the events tell, put together by the same rules, must be what the report says."""
    path = folder / "events.jsonl"
    if not path.exists():
        return ["events.jsonl is missing"]
    try:
        events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        introduction = next((e for e in events if e["event"] == "introduction"), None)
        execution = introduction["backend"]["execution"] if introduction else "unknown"
        results = _results([e for e in events if e["event"] == "end"], execution)
    except (ValueError, KeyError, TypeError):
        return ["events.jsonl cannot be read as events of this suite"]
    strength = introduction["strength"] if introduction else STRENGTHS[0]
    waivers = applicable(known_waivers(), report.backend.name, report.environment.chip, report.run.finished)
    rows = {r.case.id: build.test_row(r, strength, waivers) for r in results}
    told = {row.id: row for row in report.tests}
    faults = [f"{id}: events.jsonl tells otherwise" for id in sorted({*rows, *told}) if rows.get(id) != told.get(id)]
    if introduction is None:
        return faults
    faults += [] if report.waivers == waivers else ["the waivers are not those of the suite"]
    said = Subject.model_validate(introduction["backend"])
    faults += [] if report.backend == said else ["the backend is not the one of events.jsonl"]
    same = all(report.environment.model_dump()[key] == introduction[key] for key in _INTRODUCED)
    faults += [] if same else ["the environment is not the one of events.jsonl"]
    if report.cells != build.cells(introduction["cells"], results, rows):
        faults.append("the cells do not follow from the tests")
    if report.facts != build.facts(introduction["stated"], results):
        faults.append("the facts do not follow from the tests")
    return faults


_INTRODUCED = ("chip", "devices", "torch", "software", "patched")
"""Of the environment, what a rank of the backend has said."""


def _results(ends: list[dict[str, Any]], execution: str) -> list[build.Result]:
    """Results from their events, in order."""
    by_id: dict[str, list[dict[str, Any]]] = {}
    for event in ends:
        by_id.setdefault(event["id"], []).append(event)
    return [
        build.Result(cases()[id], tuple(map(_outcome, found)), tuple(event["falsified"] for event in found), execution)
        for id, found in by_id.items()
    ]


def _outcome(event: dict[str, Any]) -> Outcome:
    fields = {name: value for name, value in event.items() if name not in ("event", "falsified")}
    cells = [tuple(cell) for cell in fields["cells"]]
    return Outcome(**{**fields, "status": Status(fields["status"]), "cells": cells})


def _completeness(report: Report) -> list[str]:
    if report.run.mode != "certify":
        return []
    needed = sorted({needed for level in report.run.levels for needed in NEEDS[level]})
    faults = [f"level {level} is missing" for level in needed if level not in report.levels]
    there = {test.id for test in report.tests}
    for level in needed:
        if report.suite.must_pass.get(level) != must_pass_sha(level):
            faults.append(f"the mandatory ids of {level} were others than this suite's")
        faults += [f"{id} is mandatory in {level} and missing" for id in must_pass(level) if id not in there]
    return faults


def _conclusions(report: Report) -> list[str]:
    """What follows from the rows must be what is written above them."""
    faults, tests = [], {test.id: test for test in report.tests}
    if len(tests) != len(report.tests):
        faults.append("a test id appears twice")
    if report.run.mode == "certify":
        unproven = [test for test in report.tests if test.status == Status.PASS and not test.falsified]
        faults += [f"{test.id} passed and was not falsified" for test in unproven]
    if report.summary != build.summary(report.tests):
        faults.append("the summary does not count the tests")
    levels = build.levels(report.run.levels, tests, report.environment.patched)
    if report.levels != levels:
        faults.append("the levels do not follow from the tests")
    if report.headline != build.headline(report.run.levels, levels, report.tests):
        faults.append("the headline does not follow from the levels")
    return faults


def difference(old: Report, new: Report) -> list[str]:
    """What changed from one report to the next: tests by status, cells by verdict, facts."""
    lines = []
    before, after = {t.id: t for t in old.tests}, {t.id: t for t in new.tests}
    for id in sorted({*before, *after}):
        was, now = (side[id].status.value if id in side else "absent" for side in (before, after))
        if was != now:
            lines.append(f"{id}  {was} -> {now}  {after[id].message if id in after else ''}".rstrip())
    old_cells = {(c.op, c.dtype, c.variant): c for c in old.cells}
    new_cells = {(c.op, c.dtype, c.variant): c for c in new.cells}
    for key in sorted({*old_cells, *new_cells}):
        was, now = (f"{s[key].claimed}, {s[key].verdict}" if key in s else "absent" for s in (old_cells, new_cells))
        if was != now:
            lines.append(f"{' '.join(key).strip()}  {was} -> {now}")
    old_facts, new_facts = ({f.name: f.probed or f.stated for f in r.facts} for r in (old, new))
    changed = [name for name in sorted({*old_facts, *new_facts}) if old_facts.get(name) != new_facts.get(name)]
    return [*lines, *(f"{n}  {old_facts.get(n, 'absent')} -> {new_facts.get(n, 'absent')}" for n in changed)]
