"""The trainer with the tables of six GPUs over the simulated device: it follows them, and learns what it learns on the
CPU. Simulated: the arithmetic is the host's."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelbridge.precision.recipe import VARIANTS
from tests import cli
from tests.ranks import Rank, run_ranks
from tests.scenes import Sections, train_all
from tests.sim import build
from tests.sim.backend import environment, site
from tests.sim.tables import CHIPS, POINTS, TABLES

SCALINGS = ("tensor", "row", "block", "mx")
COMMON: Sections = {"metrics": {"interval": 1}, "train": {"steps": 3}}
RUNS: dict[str, Sections] = {
    "bfloat16": {"precision": {"compute": "bfloat16"}},
    **{name: {"precision": {"compute": "fp8", "fp8": {"scaling": name, "exclude": []}}} for name in SCALINGS},
}
CASES = [(gpu, run) for gpu in CHIPS for run in RUNS]
Fitted = Callable[[str], Path]


def variant_of(gpu: str) -> str:
    backend = TABLES[gpu]
    facts = backend.capabilities("", backend.facts.usual_software("2.13.0")).facts
    return str(facts["fp8.variant"]).split()[0]


def _fit(ctx: Rank, folder: Path, store: Path, backend: str, runs: dict[str, Sections]) -> None:
    sys.path.insert(0, str(folder / "site"))
    os.environ |= environment(folder)
    choice = {"name": backend, "on_unsupported": "fallback", "ops": {"attention": "reference", "adamw": "reference"}}
    train_all(ctx, folder / backend, store, runs, {**COMMON, "backend": choice})


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Fitted:
    """The folder with all runs of a GPU's table, or of the CPU in the same variant of fp8."""
    build.library()
    folder = tmp_path_factory.mktemp("tables")
    site(folder / "site", POINTS)
    done: dict[str, Path] = {}

    def of(backend: str) -> Path:
        if backend not in done:
            name, _, variant = backend.partition("/")
            runs: Any = json.loads(json.dumps(RUNS))
            for run in runs.values() if variant else ():
                run["precision"].get("fp8", {})["variant"] = variant
            run_ranks(_fit, 1, folder, store, name, runs, timeout=200)
            done[backend] = (folder / name).rename(folder / backend.replace("/", "-"))
        return done[backend]

    return of


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in cli.lines_of(output) if "loss" in line]


@pytest.mark.parametrize(("gpu", "run"), CASES)
def test_it_learns_what_the_cpu_does(gpu: str, run: str, fitted: Fitted) -> None:
    """Sums are padded and cut differently, so within 2% and not to the bit."""
    found = losses(fitted(TABLES[gpu].name) / run)
    assert len(found) == 3
    assert found == pytest.approx(losses(fitted(f"cpu/{variant_of(gpu)}") / run), rel=0.02)


@pytest.mark.parametrize(("gpu", "run"), [case for case in CASES if case[1] in SCALINGS])
def test_its_plan_is_the_tables(gpu: str, run: str, fitted: Fitted) -> None:
    plan = json.loads((fitted(TABLES[gpu].name) / run / "plan.json").read_text(encoding="utf-8"))
    assert plan["contract"]["chip"].startswith("simulated with the table of ")
    rows = {row["op"]: row for row in plan["ops"] if row["op"].startswith("fp8_linear")}
    assert len(rows) == 3
    backend = TABLES[gpu]
    table = backend.capabilities("", backend.facts.usual_software("2.13.0")).table
    e4m3, e5m2 = VARIANTS[variant_of(gpu)]
    for op, row in rows.items():
        assert row["dtypes"]["operands"] == (e4m3 if op == "fp8_linear, forward" else f"{e5m2} x {e4m3}")
        cell = table["scaled_mm", row["dtypes"]["operands"], row["dtypes"]["scales"]]
        assert (row["support"], row["note"]) == (cell.level, cell.reason)
        assert row["note"].startswith("simulated:")
    padded = [note for note in plan["notes"] if "padded with zeros to multiples of" in note]
    multiples = {limit.multiple for key, cell in table.items() if key[0] == "scaled_mm" for limit in cell.limits}
    assert bool(padded) is any(row["support"] == "full" for row in rows.values())
    assert not padded or int(padded[0].rsplit(" ", 1)[1]) in multiples
