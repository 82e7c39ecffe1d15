"""Reports: what is derived follows from what was found, and a changed report is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from pydantic import ValidationError

import accelbridge
from accelbridge.conformance.certify import Asked, applicable, check_levels, chosen_cases, exit_code, perform
from accelbridge.conformance.mutants import mutants
from accelbridge.conformance.pool import Outcome, Target
from accelbridge.conformance.registry import LEVELS, cases, must_pass
from accelbridge.conformance.report import build
from accelbridge.conformance.report.model import Report, Waiver, parse, schema
from accelbridge.conformance.report.verify import difference, load, verify
from accelbridge.conformance.report.write import digests, leave_out_places, render
from accelbridge.conformance.selfproof import Pair
from accelbridge.conformance.status import Status, merge_ranks, worst

SAMPLE = ("MM-007", "COL-001")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certification of the CPU at core that ended after two tests: all others are missing."""
    out = tmp_path_factory.mktemp("report") / "R"
    perform(Asked(Target("cpu"), ("core",), only=SAMPLE, certify=True), out)
    return out


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return load(folder)


def tampered(folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> list[str]:
    """Faults that verify finds once report.json was changed and everything derived from it was made anew."""
    told = json.loads((folder / "report.json").read_text())
    change(told)
    for path in folder.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    for name, text in render(parse(json.dumps(told))).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "SHA256SUMS").write_text(digests(tmp_path))
    return verify(tmp_path)[0]


# ---------------------------------------------------------------------------------------------------- what it says


def test_two_tests_of_a_level_do_not_hold_it(report: Report) -> None:
    level = report.levels["core"]
    assert not level.held
    assert level.passed == 2
    assert len(level.blocking) == level.required - 2
    assert all(line.endswith(" MISSING") for line in level.blocking)
    assert "core NOT held" in report.headline
    assert exit_code(report) == 1


def test_rows_say_what_ran(report: Report) -> None:
    rows = {row.id: row for row in report.tests}
    assert set(rows) == set(SAMPLE)
    for row in rows.values():
        assert row.status == Status.PASS
        assert row.falsified is True
        assert row.on_device == "proven"
        assert row.evidence == "hardware"
        assert row.comparisons > 50
    assert [rank.rank for rank in rows["COL-001"].worlds[0].ranks] == [0, 1]


def test_junit_and_page_tell_the_same(folder: Path, report: Report) -> None:
    suite = ET.parse(folder / "junit.xml").getroot()
    assert suite.get("tests") == "2"
    assert {case.get("name") for case in suite} == set(SAMPLE)
    page = (folder / "report.html").read_text()
    assert report.headline in page
    assert "http" not in page.replace("http://www.w3.org", ""), "the page needs nothing else"
    assert "not certified" in (folder / "badge.svg").read_text()


def test_logs_name_no_place_of_this_machine(tmp_path: Path) -> None:
    frame = f'File "{torch.__file__}", line 1, in f; File "{accelbridge.__file__}", line 2; File "{json.__file__}"'
    (tmp_path / "world1-rank0.log").write_text(f"{frame}\n/home/someone/else.py\n")
    leave_out_places(tmp_path)
    text = (tmp_path / "world1-rank0.log").read_text()
    assert text == (
        'File "torch/__init__.py", line 1, in f; File "accelbridge/__init__.py", line 2; File "json/__init__.py"\n'
        "/home/someone/else.py\n"
    )


def test_the_schema_is_the_one_that_ships() -> None:
    shipped = Path(build.__file__).parent.parent / "spec" / "abcr-1.schema.json"
    assert json.loads(shipped.read_text()) == json.loads(json.dumps(schema()))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["tests"][0].update(comparisons=0),
        lambda r: r["tests"][0].update(status="GOOD"),
        lambda r: r["tests"][0].update(id="mm-7"),
        lambda r: r["suite"].update(sha256="0"),
        lambda r: r.update(extra=1),
        lambda r: r["tests"][0]["metrics"][0].update(value=None),
        lambda r: r.pop("levels"),
    ],
)
def test_what_breaks_the_schema_is_refused(report: Report, change: Callable[[dict[str, Any]], object]) -> None:
    told = report.model_dump(mode="json")
    change(told)
    with pytest.raises(ValidationError):
        parse(json.dumps(told))


# ------------------------------------------------------------------------------------------------------- tampering


def test_an_honest_report_agrees_but_is_incomplete(folder: Path) -> None:
    faults, _ = verify(folder)
    assert faults
    assert all("is mandatory in core and missing" in fault for fault in faults)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r["levels"]["core"].update(held=True, blocking=[]), "levels do not follow"),
        (lambda r: r.update(headline="core held"), "headline does not follow"),
        (lambda r: r["tests"][0].update(status="FAIL"), "events.jsonl tells otherwise"),
        (lambda r: r["tests"][0].update(falsified=None), "was not falsified"),
        (lambda r: r["tests"].pop(), "events.jsonl tells otherwise"),
        (lambda r: r["tests"].append(r["tests"][0]), "appears twice"),
        (lambda r: r.update(summary={"PASS": 53}), "does not count"),
        (lambda r: r["suite"].update(unmodified=False), "not those of its distribution"),
        (lambda r: r["levels"].pop("core"), "level core is missing"),
        (lambda r: r["tests"][0].update(evidence="vendor runtime"), "events.jsonl tells otherwise"),
        (lambda r: r["tests"][0].update(comparisons=10**9), "events.jsonl tells otherwise"),
        (lambda r: r["tests"][0].update(status="WAIVED", waiver="W-1"), "events.jsonl tells otherwise"),
        (lambda r: r["cells"][0].update(verdict="proven"), "cells do not follow"),
        (lambda r: r["environment"].update(chip="x99"), "environment is not the one"),
        (lambda r: r["backend"].update(accelerator=True), "backend is not the one"),
        (lambda r: r["suite"].update(sha256="0" * 64), "made by another suite"),
        (lambda r: r["suite"].update(must_pass=dict.fromkeys(r["suite"]["must_pass"], "0" * 64)), "were others"),
    ],
)
def test_a_report_that_was_changed_with_care_is_noticed(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    assert any(says in fault for fault in tampered(folder, tmp_path, change))


@pytest.mark.parametrize("name", ["report.json", "junit.xml", "report.html", "events.jsonl"])
def test_a_file_that_was_touched_is_named(folder: Path, name: str) -> None:
    path = folder / name
    kept = path.read_bytes()
    try:
        path.write_bytes(kept + b"\n")
        assert any(fault.startswith(name) for fault in verify(folder)[0])
        path.unlink()
        if name != "report.json":
            assert any(fault.startswith(name) for fault in verify(folder)[0])
    finally:
        path.write_bytes(kept)


def test_diff_names_what_changed(report: Report) -> None:
    assert difference(report, report) == []
    told = report.model_dump(mode="json")
    told["tests"][0].update(status="FAIL", message="off by one")
    told["cells"][0].update(claimed="unsupported", verdict="not claimed")
    lines = difference(report, parse(json.dumps(told)))
    assert len(lines) == 2
    assert "PASS -> FAIL  off by one" in lines[0]
    assert "unsupported, not claimed" in lines[1]


# ------------------------------------------------------------------------------------------------- rules by hand


def test_the_gravest_status_counts() -> None:
    assert worst([]) == Status.MISSING
    assert worst([Status.PASS, Status.FAIL, Status.MISTRUSTED]) == Status.FAIL
    assert merge_ranks([Status.PASS, Status.NOT_SUPPORTED]) == Status.DIVERGENT
    assert merge_ranks([Status.PASS, Status.TIMEOUT]) == Status.TIMEOUT
    assert merge_ranks([Status.PASS, Status.PASS]) == Status.PASS


def _row(status: Status, code: str = "", waivers: tuple[Waiver, ...] = ()) -> Any:
    case = cases()["MM-007"]
    outcome = Outcome(case.id, 1, status, code, comparisons=5)
    return build.test_row(build.Result(case, (outcome,), (None,)), "hardware", waivers)


def _waiver(**changes: Any) -> Waiver:
    entry = {
        "id": "W-1", "tests": ["MM-007"], "backend": "acme", "expect": "FAIL:BOUND", "url": "https://example.org/1",
        "reason": "measured", "expires": "2027-01-01", "approved_by": "us",
    }  # fmt: skip
    return Waiver.model_validate(entry | changes)


def test_a_waiver_excuses_one_failure_and_no_other() -> None:
    waiver = (_waiver(),)
    assert _row(Status.FAIL, "BOUND", waiver).status == Status.WAIVED
    assert _row(Status.FAIL, "EXACT", waiver).status == Status.FAIL
    assert _row(Status.CRASH, "BOUND", waiver).status == Status.CRASH
    assert _row(Status.PASS, "", waiver).status == Status.XPASS_WAIVER


def test_a_waiver_holds_for_its_backend_chip_and_time(report: Report) -> None:
    when = report.run.started
    assert applicable([_waiver()], "acme", "x", when)
    assert not applicable([_waiver()], "other", "x", when)
    assert not applicable([_waiver(devices=["y"])], "acme", "x", when)
    assert not applicable([_waiver(expires="2026-01-01")], "acme", "x", when)


def test_pairs_are_judged_by_the_assertion() -> None:
    mutant = mutants()["G11"]

    def verdict(status: Status, code: str = "") -> str:
        return Pair(mutant, "MM-007", (Outcome("MM-007", 1, status, code),)).verdict

    assert verdict(Status.FAIL, "EXACT") == "killed"
    assert verdict(Status.FAIL, "RAISED") == "WRONG REASON"
    assert verdict(Status.CRASH, "EXACT") == "WRONG REASON"
    assert verdict(Status.PASS) == "SURVIVED"


def test_every_level_has_tests_and_every_test_a_place() -> None:
    listed = [id for level in LEVELS for id in must_pass(level)]
    assert sorted(listed) == sorted(cases()), "a new id becomes mandatory, or is left out, on purpose"
    for level in LEVELS:
        assert all(cases()[id].level == level for id in must_pass(level))
    assert [c.id for c in chosen_cases(check_levels(["core"]), ())]


def test_every_test_is_killed_by_a_mutant_and_every_pair_exists() -> None:
    killed = {id for mutant in mutants().values() for id in mutant.kills}
    assert killed <= set(cases())
    assert killed == set(cases())
