"""The conformance suite over interpreted kernels: attention, quantization, scaled products. Its evidence is
"simulated", and says "interpreted" wherever a cell is named; no chip and no compiler has part in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelbridge.conformance.certify import Asked, perform
from accelbridge.conformance.pool import Outcome, Target
from accelbridge.conformance.registry import cases
from accelbridge.conformance.runner import run_cases
from accelbridge.conformance.status import Status
from tests.kernels.backend import NAME, site

FAMILIES = ("ATT", "F8", "CST", "MM")
SAMPLE = ("ATT-003", "ATT-005", "ATT-011", "F8-003", "F8-005", "F8-011")
LONG = {"TRN"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in site(tmp_path / "site").items():
        monkeypatch.setenv(name, value)
    return tmp_path


def wrong(outcome: Outcome) -> bool:
    return outcome.status not in (Status.PASS, Status.NOT_SUPPORTED)


def run(folder: Path, ids: list[str]) -> list[Outcome]:
    outcomes = run_cases(Target(NAME), [cases()[id] for id in ids], folder / "out", 4)
    assert {outcome.id for outcome in outcomes} == set(ids)
    return outcomes


def test_a_sample_holds(folder: Path) -> None:
    outcomes = run(folder, list(SAMPLE))
    assert [outcome for outcome in outcomes if wrong(outcome)] == []


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_holds(family: str, folder: Path) -> None:
    outcomes = run(folder, [id for id in cases() if id.startswith(f"{family}-")])
    assert [outcome for outcome in outcomes if wrong(outcome)] == []


def test_a_report_says_simulated_and_interpreted(folder: Path) -> None:
    report = perform(Asked(Target(NAME), ("fp8",), ("MM-001", "F8-005"), certify=False), folder / "out")
    assert "simulated" in report.headline
    assert "hardware" not in report.headline
    assert report.environment.chip.startswith("interpreted on ")
    assert {test.evidence for test in report.tests} == {"simulated"}
    products = [cell for cell in report.cells if cell.op == "scaled_mm"]
    assert {cell.claimed for cell in products} == {"full"}
    assert all(cell.reason.startswith("interpreted; ") for cell in products)
