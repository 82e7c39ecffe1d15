"""Re-checks of a report by whoever is handed it, and the difference of two."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from accelbridge.conformance.registry import NEEDS, must_pass
from accelbridge.conformance.report import build
from accelbridge.conformance.report.identity import must_pass_sha, suite_identity
from accelbridge.conformance.report.model import Report, parse
from accelbridge.conformance.report.write import digests, render
from accelbridge.conformance.status import Status
from accelbridge.errors import ConfigError


def load(path: Path) -> Report:
    """The report in folder ``path``, or in the file itself. ConfigError where there is none, or it breaks the
    schema."""
    file = path / "report.json" if path.is_dir() else path
    try:
        return parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} asked as a report; it holds no report.json; name the folder given as --out"
        ) from None
    except (ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} asked as a report; it does not follow the schema abcr-1: {error}") from None


def verify(folder: Path) -> tuple[list[str], list[str]]:
    """(faults, notes) of the report in ``folder``. A fault means that the report does not say what was found."""
    report = load(folder)
    faults = [*_files(folder, report), *_events(folder, report), *_completeness(report), *_conclusions(report)]
    identity, notes = suite_identity(), []
    if report.suite.sha256 != identity["sha256"]:
        notes.append("made by another version of the suite than this one: its tests cannot be compared")
    if report.suite.unmodified is False:
        faults.append("the suite's files were not those of its distribution")
    if report.suite.unmodified is None:
        notes.append("made from a source checkout, whose files nobody recorded")
    if report.run.mode != "certify" or report.run.filters:
        notes.append("a run with filters or in development mode: it certifies nothing")
    return faults, notes


def _files(folder: Path, report: Report) -> list[str]:
    faults = []
    recorded = folder / "SHA256SUMS"
    if not recorded.exists():
        return ["SHA256SUMS is missing"]
    said, found = recorded.read_text().splitlines(), digests(folder).splitlines()
    for line in sorted(set(said) ^ set(found)):
        name = line.split("  ", 1)[-1]
        faults.append(
            f"{name}: {'changed or missing' if line in said else 'changed or added'} since the report was written"
        )
    for name, text in render(report).items():
        path = folder / name
        if path.exists() and path.read_text(encoding="utf-8") != text:
            faults.append(f"{name} does not say what report.json says")
    return faults


def _events(folder: Path, report: Report) -> list[str]:
    """The log of events must tell the same of every test at every world size."""
    path = folder / "events.jsonl"
    if not path.exists():
        return ["events.jsonl is missing"]
    try:
        events = [json.loads(line) for line in path.read_text().splitlines()]
        ended = {(e["id"], e["world"]): e["status"] for e in events if e["event"] == "end"}
    except (ValueError, KeyError, TypeError):
        return ["events.jsonl cannot be read as events"]
    told = {(test.id, world.world): world.status.value for test in report.tests for world in test.worlds}
    return [
        f"{id} at {world} ranks: {ended.get((id, world))} in events.jsonl, {told.get((id, world))} in the report"
        for id, world in sorted({*ended, *told})
        if ended.get((id, world)) != told.get((id, world))
    ]


def _completeness(report: Report) -> list[str]:
    if report.run.mode != "certify":
        return []
    needed = {needed for level in report.run.levels for needed in NEEDS[level]}
    faults = [f"level {level} is missing" for level in sorted(needed - set(report.levels))]
    there = {test.id for test in report.tests}
    for level in sorted(needed):
        if report.suite.must_pass.get(level) == must_pass_sha(level):
            faults += [f"{id} is mandatory in {level} and missing" for id in must_pass(level) if id not in there]
    return faults


def _conclusions(report: Report) -> list[str]:
    """What follows from the rows must be what is written above them."""
    faults, tests = [], {test.id: test for test in report.tests}
    if len(tests) != len(report.tests):
        faults.append("a test id appears twice")
    for test in report.tests:
        gravest = build.worst(world.status for world in test.worlds)
        if test.status not in (gravest, Status.WAIVED, Status.XPASS_WAIVER):
            faults.append(f"{test.id} is said to be {test.status.value}; its ranks say {gravest.value}")
        if report.run.mode == "certify" and test.status == Status.PASS and not test.falsified:
            faults.append(f"{test.id} passed and was not falsified")
    if report.summary != build.summary(report.tests):
        faults.append("the summary does not count the tests")
    same_lists = all(report.suite.must_pass.get(level) == must_pass_sha(level) for level in report.levels)
    if same_lists and report.levels != build.levels(report.run.levels, tests):
        faults.append("the levels do not follow from the tests")
    complete = set(report.levels) >= {needed for level in report.run.levels for needed in NEEDS[level]}
    if same_lists and complete and report.headline != build.headline(report.run.levels, report.levels, report.tests):
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
