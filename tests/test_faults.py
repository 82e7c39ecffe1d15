"""Faults in real runs: a sample here, all of them in full, which ``python -m tests.faults`` also writes to docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.measure import faults_of, play
from tests.faults.scenes import SCENES, Scene
from tests.faults.table import MARKDOWN, read


@pytest.mark.parametrize(
    "scene", [pytest.param(s, marks=() if s.sample else pytest.mark.full, id=s.name) for s in SCENES]
)
def test_fault(scene: Scene, tmp_path: Path, store: Path) -> None:
    outcome = play(scene, tmp_path / "scene", store)
    assert faults_of(scene, outcome) == [], f"{outcome.said}\n{outcome.logs}"


def test_the_table_is_of_these_faults_and_none_went_wrong() -> None:
    rows = read()
    assert rows.keys() <= {scene.name for scene in SCENES}
    assert len(rows) >= 30
    assert {name: row["wrong"] for name, row in rows.items() if row["wrong"]} == {}
    text = MARKDOWN.read_text(encoding="utf-8")
    assert all(f"| {name} |" in text for name in rows)
