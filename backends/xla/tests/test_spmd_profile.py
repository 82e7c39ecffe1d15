"""The conformance suite under the spmd execution model: what it says of this backend, and that it can say otherwise.

Four virtual devices: the vendor's runtime and partitioner on no chip.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from accelbridge.conformance.registry import cases
from backends.xla.tests import environment

HERE = Path(__file__).parent
PASSES = [*(f"COL-{number:03}" for number in range(1, 23)),
          "FLT-007", "FLT-008", "FLT-009", "FLT-010", "FLT-014", "STR-001", "STR-002", "STR-003"]  # fmt: skip
NO_QUESTION = ["COL-023", "FLT-001", "FLT-002", "FLT-003", "FLT-004", "FLT-005", "FLT-006", "FLT-011", "FLT-012",
               "FLT-017", "FLT-019", "FLT-021", "FLT-022"]  # fmt: skip


pytestmark = environment.needs_torch_xla


def conform(folder: Path, ids: list[str], **variables: str) -> dict[str, dict[str, Any]]:
    """The rows of a report about these tests, by id."""
    env = environment.environment(folder / "site") | variables
    levels = "core,train,fp8,scale"
    asked = ("conform", "run", "--backend", "xla", "--level", levels, "--only", ",".join(ids))
    environment.python("-m", "accelbridge", *asked, "--out", folder / "R", env=env, timeout=1800)
    return {row["id"]: row for row in json.loads((folder / "R" / "report.json").read_text())["tests"]}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return conform(tmp_path_factory.mktemp("conform"), [*PASSES, *NO_QUESTION])


def test_every_id_has_a_meaning_of_its_own() -> None:
    asked = {id: case for id, case in cases().items() if id.startswith(("COL", "STR", "FLT"))}
    texts = {id: case.spmd for id, case in asked.items() if isinstance(case.spmd, str)}
    assert sorted(texts) == NO_QUESTION
    assert len(set(texts.values())) == len(texts), "a reason shared is no reason"
    assert asked.keys() == {*PASSES, *NO_QUESTION, "FLT-016"}  # which speaks of products and attention


@pytest.mark.parametrize("id", PASSES)
def test_what_is_asked_is_right(rows: dict[str, dict[str, Any]], id: str) -> None:
    row = rows[id]
    assert (row["status"], row["message"]) == ("PASS", "")
    assert row["property"] == cases()[id].asserted("spmd")
    assert [world["world"] for world in row["worlds"]] == [1]


@pytest.mark.parametrize("id", NO_QUESTION)
def test_what_is_not_asked_says_why(rows: dict[str, dict[str, Any]], id: str) -> None:
    row = rows[id]
    assert (row["status"], row["code"], row["message"]) == ("NOT_SUPPORTED", "SPMD", cases()[id].spmd)


def test_what_is_asked_travels_between_devices(tmp_path: Path) -> None:
    """Right values alone would also come of tensors that lie whole on each device."""
    dump = tmp_path / "dump"
    conform(tmp_path, ["COL-008", "COL-009"], XLA_FLAGS=f"--xla_dump_to={dump} --xla_dump_hlo_as_text")
    programs = " ".join(path.read_text() for path in dump.glob("*after_optimizations.txt"))
    found = set(re.findall(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(", programs))
    assert found >= {"all-reduce", "all-gather", "all-to-all", "collective-permute"}


# ---------------------------------------------------------------------------------------------------- self-proof


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of each test under each defect, and whether that is what must."""
    folder = tmp_path_factory.mktemp("mutants")
    env = environment.environment(folder / "site")
    environment.python(HERE / "spmd_mutants.py", folder, env=env, timeout=1800)
    return json.loads((folder / "found.json").read_text())


def test_a_defect_is_caught_by_its_assertion(mutants: dict[str, dict[str, Any]]) -> None:
    told = {f"{name} {id}: {row}" for name, rows in mutants.items() for id, row in rows.items() if not row["good"]}
    assert not told


def test_every_body_is_killed_by_a_defect(mutants: dict[str, dict[str, Any]]) -> None:
    families = ("COL", "FLT", "CKP", "TRN")
    bodies = {id for id, case in cases().items() if id.startswith(families) and callable(case.spmd)}
    assert {id for rows in mutants.values() for id in rows} == bodies
