"""Runs of the suite that end in a report."""

from __future__ import annotations

import secrets
import tomllib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from accelbridge.conformance.evidence import STRENGTHS
from accelbridge.conformance.pool import Outcome, Target
from accelbridge.conformance.registry import LEVELS, NEEDS, Case, cases
from accelbridge.conformance.report import build
from accelbridge.conformance.report.identity import environment, suite_identity
from accelbridge.conformance.report.model import Report, Waiver
from accelbridge.conformance.report.write import leave_out_places, write
from accelbridge.conformance.runner import LOGS, PUBLIC_SEED, Runner
from accelbridge.conformance.status import Status
from accelbridge.errors import BackendError, ConfigError, did_you_mean
from accelbridge.plugins import Candidate, survey

HELD, NOT_HELD, SUITE_ERROR, NOTHING_RAN = 0, 1, 2, 3
"""Exit codes."""


@dataclass(frozen=True)
class Asked:
    """What to run."""

    target: Target
    levels: tuple[str, ...]
    only: tuple[str, ...] = ()
    """Ids or beginnings of ids; empty: all."""
    certify: bool = True


def check_levels(levels: Sequence[str]) -> tuple[str, ...]:
    """The levels asked, in order; ConfigError for one that is unknown."""
    if not levels:
        raise ConfigError(f"no level asked; known: {', '.join(LEVELS)}")
    for level in levels:
        if level not in LEVELS:
            raise ConfigError(f'level "{level}" asked; known: {", ".join(LEVELS)}{did_you_mean(level, list(LEVELS))}')
    return tuple(level for level in LEVELS if level in levels)


def chosen_cases(levels: Sequence[str], only: Sequence[str]) -> list[Case]:
    """The tests of ``levels`` and of those they rest upon, narrowed to ``only``. ConfigError for an id that matches
    nothing."""
    needed = {needed for level in levels for needed in NEEDS[level]}
    known = {id: case for id, case in cases().items() if case.level in needed}
    for pattern in only:
        if not any(id.startswith(pattern) for id in known):
            where = "in these levels" if any(id.startswith(pattern) for id in cases()) else "in the suite"
            raise ConfigError(f'test "{pattern}" asked; no id {where} begins so{did_you_mean(pattern, list(known))}')
    picked = [case for id, case in known.items() if not only or id.startswith(tuple(only))]
    # Cheap and basic first; what needs new processes last.
    return sorted(picked, key=lambda case: (case.fresh, LEVELS.index(case.level), case.worlds))


def perform(asked: Asked, out: Path, say: Callable[[Outcome, bool | None], None] = lambda _o, _f: None) -> Report:
    """Run what is ``asked`` and write the report into ``out``, which must be new or empty. A backend that cannot even
    start gets a report too, in which every test says why."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} asked for the report; it is a file or not empty; name a new folder")
    started, chosen = datetime.now(UTC), chosen_cases(asked.levels, asked.only)
    fresh = secrets.randbelow(2**31) if asked.certify else None
    seeds = (PUBLIC_SEED,) if fresh is None else (PUBLIC_SEED, fresh)
    with Runner(asked.target, out, seeds=seeds) as runner:
        try:
            introduction = runner.introduce()
        except BackendError:
            introduction = _stranger(asked.target)
        results = [_result(runner, case, asked.certify, say) for case in chosen]
    report = _report(asked, introduction, results, (started, datetime.now(UTC)), fresh)
    leave_out_places(out / LOGS)
    write(report, out)
    return report


def _result(runner: Runner, case: Case, certify: bool, say: Callable[[Outcome, bool | None], None]) -> build.Result:
    outcomes, falsified = [], []
    for outcome, red in runner.run(case, falsified=certify):
        say(outcome, red)
        outcomes.append(outcome)
        falsified.append(red)
    return build.Result(case, tuple(outcomes), tuple(falsified), "spmd" if runner.spmd else "eager")


def _stranger(target: Target) -> dict[str, Any]:
    """What can be said of a backend of which no process started."""
    candidate = next(iter(survey([target.backend])), Candidate(target.backend))
    probe = candidate.probe
    return {
        "backend": {
            "name": target.backend,
            "distribution": candidate.distribution,
            "version": candidate.version,
            "api_version": candidate.api_version,
            "accelerator": candidate.accelerator,
            "device_type": "unknown",
            "execution": "unknown",
            "options": dict(target.options),
        },
        "chip": probe.devices[0].chip if probe.devices else "unknown",
        "devices": [vars(device) for device in probe.devices],
        "software": dict(probe.software),
        "facts": dict(probe.facts),
        "torch": version("torch"),
        "cells": [],
        "patched": [],
        "strength": STRENGTHS[0],
    }


def _report(
    asked: Asked,
    introduction: Mapping[str, Any],
    results: Sequence[build.Result],
    times: tuple[datetime, datetime],
    fresh: int | None,
) -> Report:
    backend = introduction["backend"]
    waivers = applicable(known_waivers(), backend["name"], introduction["chip"], times[1])
    tests = {r.case.id: build.test_row(r, introduction["strength"], waivers) for r in results}
    found = build.levels(asked.levels, tests, introduction["patched"])
    return Report(
        format="abcr-1",
        headline=build.headline(asked.levels, found, tests.values()),
        suite=suite_identity(),  # pyright: ignore[reportArgumentType]
        run={  # pyright: ignore[reportArgumentType]
            "id": uuid.uuid4().hex,
            "mode": "certify" if asked.certify else "run",
            "started": times[0],
            "finished": times[1],
            "public_seed": PUBLIC_SEED,
            "fresh_seed": fresh,
            "filters": list(asked.only),
            "levels": list(asked.levels),
        },
        backend=backend,
        environment=environment(dict(introduction)),  # pyright: ignore[reportArgumentType]
        levels=found,
        summary=build.summary(tests.values()),
        tests=list(tests.values()),
        cells=build.cells(introduction["cells"], results, tests),
        facts=build.facts(introduction.get("stated", {}), results),
        waivers=list(waivers),
    )


def known_waivers() -> list[Waiver]:
    """Those that the suite ships."""
    text = files("accelbridge.conformance.spec").joinpath("waivers.toml").read_text()
    return [Waiver.model_validate(entry) for entry in tomllib.loads(text).get("waiver", [])]


def applicable(waivers: Sequence[Waiver], backend: str, chip: str, when: datetime) -> list[Waiver]:
    """Those of ``waivers`` that hold for this backend and chip and have not expired."""
    return [
        waiver
        for waiver in waivers
        if waiver.backend == backend
        and (not waiver.devices or chip in waiver.devices)
        and when.date() <= waiver.expires
    ]


def exit_code(report: Report) -> int:
    """0 every level asked is held (of a run with filters: every test that ran passed), 1 not, 2 the suite itself
    failed, 3 nothing ran."""
    statuses = [test.status for test in report.tests]
    if all(test.status == Status.RESOURCE_ERROR or test.code == "START" for test in report.tests):
        return NOTHING_RAN
    if Status.INTERNAL_ERROR in statuses:
        return SUITE_ERROR
    if report.run.mode == "certify":
        return HELD if all(level.held for level in report.levels.values()) else NOT_HELD
    fine = {Status.PASS, Status.WAIVED, Status.NOT_SUPPORTED}
    return HELD if set(statuses) <= fine else NOT_HELD
