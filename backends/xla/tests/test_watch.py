"""What a step does beside its one graph is told in the run's log, with the line that asked for it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from accelbridge import Trainer
from backends.xla.tests import environment, watch_worker

HERE = Path(__file__).parent
SETTLED = 2
"""Steps after which a compilation is told."""
pytestmark = environment.needs_torch_xla


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watch")
    env = environment.environment(folder / "site")
    environment.python(HERE / "watch_worker.py", folder, env=env)
    return folder


def counted(folder: Path, name: str) -> list[dict[str, int]]:
    return json.loads((folder / "found.json").read_text())[name]


def compiled(folder: Path, name: str) -> list[int]:
    return [step["compiled"] for step in counted(folder, name)]


def warnings(folder: Path, name: str) -> list[str]:
    """What the backend warned of, from the log of the run."""
    lines = (folder / name / "logs" / "rank_0.log").read_text().splitlines()
    return [line.split(" WARNING ", 1)[1] for line in lines if " WARNING " in line and "UserWarning" not in line]


def line_of(function: Any) -> str:
    """FILE:LINE of the first line of the body."""
    return f"{watch_worker.__file__}:{inspect.getsourcelines(function)[1] + 1}"


def test_a_step_that_does_nothing_beside_is_one_graph_and_silent(folder: Path) -> None:
    steps = counted(folder, "nothing")
    assert len(steps) == watch_worker.STEPS
    assert steps[0] == steps[-1], "the counters are constant: no compilation, nothing on the host, no read"
    assert warnings(folder, "nothing") == []


@pytest.mark.parametrize(("name", "asks"), [("item", watch_worker.read), ("tolist", watch_worker.listed)])
def test_a_read_is_named_with_its_line(folder: Path, name: str, asks: Any) -> None:
    told = warnings(folder, name)
    assert len(told) == 1, "each thing once"
    assert told[0].startswith(f"{line_of(asks)} reads a tensor on the host (aten::")


def test_an_operation_on_the_host_is_named_with_its_line(folder: Path) -> None:
    told = [text for text in warnings(folder, "nonzero") if text.startswith("aten::nonzero 1 times on the host")]
    assert len(told) == 1
    assert told[0].endswith(f"asked for by {line_of(watch_worker.found)}")


def test_a_graph_that_grows_is_told(folder: Path) -> None:
    assert compiled(folder, "grown")[-1] > compiled(folder, "grown")[SETTLED - 1]
    told = warnings(folder, "grown")
    assert len(told) == 1
    assert told[0].startswith("step 3 of this run compiled ")
    assert "a shape or a Python number in it changes from step to step" in told[0]


def test_batches_of_many_lengths_are_padded_to_few_and_that_is_said(folder: Path, tmp_path: Path) -> None:
    compilations = compiled(folder, "lengths")
    assert compilations[-1] == compilations[SETTLED - 1], "lengths 24, 20, 12, 24, 23, 13 are one program"
    log = (folder / "lengths" / "logs" / "rank_0.log").read_text()
    assert [log.count(f"batches of {length} tokens are padded to 24") for length in (24, 20, 12, 23, 13)] == [
        0,
        1,
        1,
        1,
        1,
    ]
    watch_worker.lengths(tmp_path / "cpu", "cpu", Trainer)
    ours, theirs = (_losses(path) for path in (folder / "lengths", tmp_path / "cpu"))
    assert len(ours) == watch_worker.STEPS
    assert ours == pytest.approx(theirs, rel=1e-5)


def _losses(output: Path) -> list[float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "event" not in line]
