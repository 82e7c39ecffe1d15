"""Ray Train, real where it is installed (make test-ray): a killed worker, a cluster that is too small."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelbridge.errors import ConfigError
from accelbridge.launch.ray import RayJob, _resource, fit
from tests import cli

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed; make test-ray runs this")
SECTIONS: dict[str, Any] = {
    "train": {"steps": 200, "microbatch_size": 2},
    "checkpoint": {"interval": 20, "keep": 3},
    "metrics": {"interval": 5},
}


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """A short path for Ray's sockets, which would otherwise stay in the machine's temporary folder."""
    folder = tempfile.mkdtemp(prefix="abr")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start(folder: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "accelbridge.launch.ray", *arguments],
        env=cli.environment(RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def workers_of(driver: int) -> list[psutil.Process]:
    """The Ray workers that train: those that a trainer has made ranks hold a log of the run open."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if any("/logs/rank_" in file.path for file in process.open_files()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@needs_ray
def test_a_killed_worker_costs_nothing_but_time(tmp_path: Path, store: Path, ray_folder: str) -> None:
    straight = cli.write_recipe(tmp_path / "straight.yaml", store, **SECTIONS)
    done = cli.run("train", str(straight), "--nproc", "2")
    assert done.returncode == 0, done.stderr
    recipe = cli.write_recipe(tmp_path / "killed.yaml", store, **SECTIONS)
    output = tmp_path / "run-killed"
    running = start(ray_folder, str(recipe), "--workers", "2", "--max-failures", "1")
    try:
        cli.wait_for(lambda: (output / "checkpoints" / "step_40").exists(), 180, "a checkpoint")
        workers_of(running.pid)[-1].kill()
        out, _ = running.communicate(timeout=240)
    finally:
        if running.poll() is None:
            cli.kill_tree(running)
    assert running.returncode == 0, out
    assert "done: step 200" in out
    assert "restarts 1" in out
    losses = [
        {s: line["loss"] for s, line in cli.steps_of(folder).items()} for folder in (output, tmp_path / "run-straight")
    ]
    assert losses[0] == losses[1]
    (event,) = [line for line in cli.lines_of(output) if line.get("event") == "restart"]
    assert event["cause"].startswith("rank ")
    assert event["cause"].endswith(": died")


@needs_ray
def test_what_another_start_cannot_cure_ends_the_job(tmp_path: Path, ray_folder: str) -> None:
    data = cli.build_store(tmp_path / "source")
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", data, **{**SECTIONS, "train": {"steps": 100_000}})
    output = tmp_path / "run-recipe"
    running = start(ray_folder, str(recipe), "--workers", "2", "--max-failures", "9")
    try:
        cli.wait_for(lambda: (output / "checkpoints" / "step_20").exists(), 180, "a checkpoint")
        data.rename(tmp_path / "gone")
        workers_of(running.pid)[-1].kill()
        out, _ = running.communicate(timeout=200)
    finally:
        if running.poll() is None:
            cli.kill_tree(running)
    assert running.returncode == 2, out
    (error,) = [line for line in out.splitlines() if line.startswith("error: ")]
    assert "data.train" in error


@needs_ray
def test_a_cluster_that_is_too_small(tmp_path: Path, store: Path, ray_folder: str) -> None:
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store)
    running = start(ray_folder, str(recipe), "--workers", "2", "--resource", "CPU=500", "--wait", "1")
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 2, out
    assert "--workers 2 with CPU=500 each asked; the Ray cluster has CPU=" in out
    assert "got no more for 1 s" in out
    assert not (tmp_path / "run-recipe" / "metrics.jsonl").exists()


@needs_ray
def test_a_recipe_that_cannot_work_starts_nothing(tmp_path: Path, store: Path) -> None:
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store, parallel={"dp_shard": 4})
    with pytest.raises(ConfigError, match=r"parallel\.dp_shard 4 asked"):
        fit(RayJob(recipe, 2))
    assert not (tmp_path / "run-recipe").exists()


def test_ray_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as import finds it
    with pytest.raises(ConfigError, match=r"not installed; run pip install 'accelbridge\[ray\]'"):
        fit(RayJob(tmp_path / "recipe.yaml", 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": 0}, "--workers 0 asked"),
        ({"workers": -2}, "--workers -2 asked"),
        ({"max_failures": -2}, "--max-failures -2 asked"),
        ({"resources": {"CPU": 0.0}}, "--resource CPU=0 asked"),
    ],
)
def test_numbers_that_cannot_be(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(RayJob(tmp_path / "recipe.yaml", **{"workers": 2, **values}))


def test_resources_of_the_command_line() -> None:
    assert _resource("CPU=2") == ("CPU", 2.0)
    for text, message in (("CPU", "no ="), ("CPU=two", "no number")):
        with pytest.raises(ConfigError, match=message):
            _resource(text)
