"""The conformance suite with the tables of six GPUs over the simulated device. What passes shows that tables, limits
and refusals hold together with the suite; it is evidence for no chip, and its report says "simulated". What states how
a GPU computes cannot pass here, where the host's arithmetic stands in for it: such tests are named, with the reason,
and have to fail in just that way."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from accelbridge.conformance.certify import Asked, perform
from accelbridge.conformance.pool import Outcome, Target
from accelbridge.conformance.registry import cases
from accelbridge.conformance.runner import run_cases
from accelbridge.conformance.status import Status
from tests.sim import build
from tests.sim.backend import environment, site
from tests.sim.tables import CHIPS, POINTS, TABLES

SAMPLE = ("INF-003", "INF-007", "MM-001", "MM-004", "F8-005", "F8-008", "F8-011")
"""Of every default run: what is claimed is probed, limits are kept, and what is refused is refused."""
LEVELS = ("core", "train", "fp8", "offload")
"""Of a full run. What the trainer does with these tables is in test_sim_tables.py too."""
ALL = frozenset(CHIPS)


class Cannot(NamedTuple):
    """A test that the simulated device cannot pass with these GPUs' tables."""

    gpus: frozenset[str]
    code: str
    why: str
    status: Status = Status.FAIL


CANNOT: dict[str, Cannot] = {
    "MM-004": Cannot(frozenset({"a100", "h100"}), "PROBE", "the table states sums rounded toward zero; the "
                     "host's round to nearest"),
    "F8-008": Cannot(frozenset({"h100"}), "FACT", "the table states sums of 14 bits; the emulation's have 24"),
    "INF-007": Cannot(frozenset({"mi250x"}), "PROBE", "the table states that products flush subnormal numbers; the "
                      "host's keep them"),
    "INF-005": Cannot(ALL, "CAPABILITY", "the table claims that 8-bit floats move; the simulated library has none"),
    "COL-020": Cannot(ALL, "RAISED", "the same: the simulated library moves no 8-bit floats"),
    "INF-006": Cannot(ALL, "ERROR", "the simulated library takes operations that the table states as absent"),
    "OFF-007": Cannot(ALL, "ERROR", "the simulated host ends with its address space, not with memory"),
    "MEM-003": Cannot(ALL, "EXACT", "the simulated device copies without looking for an overlap"),
    "COL-021": Cannot(ALL, "ERROR", "the simulated library moves no 16-bit integers, and is not lowered to others"),
    "FLT-001": Cannot(ALL, "DIED", "gloo, below the simulated library, ends the process on another size", Status.CRASH),
    "FLT-002": Cannot(ALL, "DIED", "the same, on another type", Status.CRASH),
    "FLT-021": Cannot(ALL, "ERROR", "gloo, below the simulated library, takes no notice; the table allows no such"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    build.library()
    site(tmp_path / "site", POINTS)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def judge(gpu: str, outcome: Outcome) -> str:
    """What is wrong with an outcome; "" where it is what it has to be."""
    cannot = CANNOT.get(outcome.id)
    if cannot is not None and gpu in cannot.gpus:
        as_named = (outcome.status, outcome.code) == (cannot.status, cannot.code)
        return "" if as_named else f"not as named ({cannot.why}): {outcome}"
    good = outcome.status in (Status.PASS, Status.NOT_SUPPORTED) and (
        outcome.on_device == "proven" or not outcome.cells
    )
    return "" if good else str(outcome)


def run(gpu: str, folder: Path, ids: list[str]) -> list[str]:
    outcomes = run_cases(Target(TABLES[gpu].name), [cases()[id] for id in ids], folder / "out", 4)
    assert {outcome.id for outcome in outcomes} == set(ids)
    return [text for outcome in outcomes if (text := judge(gpu, outcome))]


@pytest.mark.parametrize("gpu", CHIPS)
def test_a_sample_holds(gpu: str, folder: Path) -> None:
    assert run(gpu, folder, list(SAMPLE)) == []


@pytest.mark.full
@pytest.mark.parametrize("gpu", CHIPS)
def test_all_of_it_holds_but_what_is_named(gpu: str, folder: Path) -> None:
    assert run(gpu, folder, [id for id, case in cases().items() if case.level in LEVELS]) == []


def test_a_report_says_simulated(folder: Path) -> None:
    report = perform(
        Asked(Target(TABLES["h100"].name), ("core",), ("INF-003", "MM-001"), certify=False), folder / "out"
    )
    assert "simulated" in report.headline
    assert report.environment.chip.startswith("simulated with the table of NVIDIA H100")
    assert {test.evidence for test in report.tests} == {"simulated"}
    assert all(cell.reason.startswith("simulated") for cell in report.cells if cell.claimed != "unsupported")
