"""The parity table: a part measured anew, what is kept of all of it, and faults that it has to show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity import faults
from tests.parity.compare import Cells, compare
from tests.parity.envelope import Envelope, envelopes, permuted_runs
from tests.parity.measure import Run, build_store, run_rows
from tests.parity.rows import REFERENCES, ROWS, SIM_ROWS, SPMD_ROWS, TORCHTPU_ROWS, Row
from tests.parity.table import JSON, MARKDOWN, markdown, read
from tests.ranks import run_ranks

SAMPLE = [
    "shard 2, ZeRO 3",
    "tp 2, sequence parallel",
    "shard 2 x tp 2, accumulation 4",
    "shard 2, recompute selective",
    "dropout 0.1, shard 2 x tp 2, sequence parallel",
    "nn.Dropout, shard 2",
]
"""Rows that are measured each time; ``make parity`` measures all of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def store(folder: Path) -> Path:
    return build_store(folder)


@pytest.fixture(scope="module")
def runs(folder: Path, store: Path) -> dict[str, Run]:
    return run_rows([*REFERENCES, *(row for row in ROWS if row.name in SAMPLE)], folder, store)


@pytest.fixture(scope="module")
def bounds(runs: dict[str, Run], folder: Path, store: Path) -> dict[str, Envelope]:
    return envelopes(runs, run_ranks(permuted_runs, 1, folder, store, REFERENCES, 4, timeout=900)[0])


@pytest.mark.parametrize("name", SAMPLE)
def test_within_bounds(name: str, runs: dict[str, Run], bounds: dict[str, Envelope]) -> None:
    row = next(row for row in ROWS if row.name == name)
    cells = compare(row, runs, bounds)
    assert cells.faults() == [], cells
    measured = {part for part, cell in (("forced", cells.gradient), ("same", cells.same)) if cell is not None}
    assert measured == row.parts & {"forced", "same"}


def test_something_is_learned(runs: dict[str, Run]) -> None:
    losses = runs["1 device"].losses
    assert losses[20] < losses[1] - 0.7
    assert runs["1 device"].norms[1] > 1.0, "clipping is a part of what is compared"


@pytest.fixture(scope="module")
def faulty(runs: dict[str, Run], folder: Path, store: Path) -> dict[str, Run]:
    """Every deliberate fault, in a row of its own."""
    rows = [replace(case.row, name=case.fault.__name__) for case in faults.CASES]
    return {**runs, **run_rows(rows, folder, store, {case.fault.__name__: case.fault for case in faults.CASES})}


@pytest.mark.parametrize("case", faults.CASES, ids=lambda case: case.fault.__name__)
def test_the_table_shows(case: faults.Case, faulty: dict[str, Run], bounds: dict[str, Envelope]) -> None:
    row = replace(case.row, name=case.fault.__name__)
    assert case.cells <= set(compare(row, faulty, bounds).faults())


def test_the_committed_table_is_whole_and_within_bounds() -> None:
    lines = read()
    assert [name for row in (*ROWS, *SIM_ROWS, *SPMD_ROWS, *TORCHTPU_ROWS) if (name := row.name) not in lines] == []
    assert {name: found for name, line in lines.items() if (found := line.faults())} == {}
    assert markdown(lines) == MARKDOWN.read_text(), f"{MARKDOWN.name} is not what {JSON.name} says; run make parity"


def test_bounds_are_kept_by_numbers_only() -> None:
    inside = Cells(loss=1e-5, norm=1e-6, gradient=1e-6, free_norm=4.0, weights=4.0, same="", moved=1e-5, twin="")
    assert inside.faults() == []
    assert replace(inside, gradient=2e-6, rounding=4.0).faults() == []
    assert replace(inside, gradient=2e-6, rounding=4.1).faults() == ["gradient"]
    for name in ("loss", "norm", "gradient", "free_norm", "weights", "moved"):
        assert replace(inside, **{name: float("nan")}).faults() == [name]
        assert replace(inside, **{name: 4.1}).faults() == [name]
    assert replace(inside, same="loss of step 11", twin="model.norm.weight").faults() == ["same", "twin"]


def test_every_row_has_a_reference_of_one_device() -> None:
    by_name: dict[str, Row] = {row.name: row for row in (*ROWS, *SIM_ROWS)}
    assert len(by_name) == len(ROWS) + len(SIM_ROWS)
    for row in by_name.values():
        assert by_name[row.reference].devices == 1
