"""The trainer as users run it: real processes, bfloat16, kill and resume, signals, two nodes.

That layouts agree is in tests/parity.py, and float16 in tests/test_loss_scale.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelbridge.checkpoint.manifest import complete
from tests import cli
from tests.ranks import run_ranks
from tests.scenes import ONE, TWO, Steps, same_bits, sigterm_saves, train_all

PAIRS = {name: TWO[name] for name in ("collectives checked", "bfloat16")}
TOLERANCE = 1e-5
"""Relative, over 20 float32 steps: layouts differ only in the order of sums."""


def train(path: Path, store: Path, nproc: int = 1, **sections: Any) -> Steps:
    """Train a small recipe to its end through the command line and return its step lines."""
    recipe = cli.write_recipe(path, store, **sections)
    done = cli.run("train", str(recipe), "--nproc", str(nproc))
    assert done.returncode == 0, done.stderr
    return cli.steps_of(path.parent / f"run-{path.stem}")


def close(ours: Steps, theirs: Steps, tolerance: float = TOLERANCE) -> None:
    """Losses and gradient norms of all steps within ``tolerance``, relative."""
    assert ours.keys() == theirs.keys()
    for step, line in ours.items():
        for value in ("loss", "grad_norm"):
            assert line[value] == pytest.approx(theirs[step][value], rel=tolerance), f"step {step} {value}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: Path) -> dict[str, Steps]:
    """20 steps of the same recipe, on one rank and in special ways on two."""
    folder = tmp_path_factory.mktemp("runs")
    for size, group in ((1, ONE), (2, PAIRS)):
        run_ranks(train_all, size, folder, store, group, timeout=240)
    return {name: cli.steps_of(folder / name) for name in (*ONE, *PAIRS)}


def test_loss_falls(runs: dict[str, Steps]) -> None:
    assert runs["reference"][20]["loss"] < runs["reference"][1]["loss"] - 1.0


def test_checked_collectives_change_nothing(runs: dict[str, Steps]) -> None:
    close(runs["collectives checked"], runs["reference"])


def test_bfloat16_compute_follows_float32(runs: dict[str, Steps]) -> None:
    low, full = runs["bfloat16"], runs["reference"]
    # Roundings of 2**-8 in a handful of layers: the first step shows their size, later ones how they add up.
    assert low[1]["grad_norm"] == pytest.approx(full[1]["grad_norm"], rel=0.01)
    for step, line in low.items():
        assert line["loss"] == pytest.approx(full[step]["loss"], rel=0.01), f"step {step}"
    assert runs["bfloat16"][20]["loss"] != runs["reference"][20]["loss"]


def test_kill_and_resume_is_bitwise(tmp_path: Path, store: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 60, "microbatch_size": 2},
        "checkpoint": {"interval": 20, "keep": 9},
    }
    straight = train(tmp_path / "straight.yaml", store, 2, **sections)

    recipe = cli.write_recipe(tmp_path / "killed.yaml", store, **sections)
    output = tmp_path / "run-killed"
    running = cli.start("train", str(recipe), "--nproc", "2")
    cli.wait_for(lambda: bool(complete(output / "checkpoints")), 60, "the first checkpoint")
    cli.kill_tree(running)
    assert not (output / "checkpoints" / "step_60").exists(), "the run ended before it could be killed"

    done = cli.run("train", str(recipe), "--nproc", "2", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    resumed = cli.steps_of(output)
    assert {s: line["loss"] for s, line in resumed.items()} == {s: line["loss"] for s, line in straight.items()}
    same_bits(output / "checkpoints" / "step_60", tmp_path / "run-straight" / "checkpoints" / "step_60")


def test_sigterm_saves_and_leaves_with_its_own_code(tmp_path: Path, store: Path) -> None:
    sigterm_saves(tmp_path, store)


def test_ranks_leave_with_a_killed_launcher_and_others_wait_for_them(tmp_path: Path, store: Path) -> None:
    recipe = cli.write_recipe(tmp_path / "orphans.yaml", store, train={"steps": 100_000})
    output = tmp_path / "run-orphans"
    running = cli.start("train", str(recipe), "--nproc", "2")
    cli.wait_for(lambda: (output / "metrics.jsonl").exists() and bool(cli.steps_of(output)), 60, "a step")
    ranks = psutil.Process(running.pid).children(recursive=True)
    refused = cli.run("train", str(recipe), "--resume", "auto")
    assert refused.returncode == 2, refused.stderr
    assert "is writing a run there" in refused.stderr
    running.kill()
    running.wait()
    assert len(ranks) >= 2
    assert psutil.wait_procs(ranks, timeout=10)[1] == []


@pytest.mark.full
def test_two_agents_on_one_host_are_two_nodes(tmp_path: Path, store: Path, runs: dict[str, Steps]) -> None:
    recipe = cli.write_recipe(tmp_path / "nodes.yaml", store)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{cli.free_port()}", "--local-addr=127.0.0.1"]
    agents = [
        subprocess.Popen(
            [*torchrun, f"--node-rank={node}", "-m", "accelbridge", "train", str(recipe)],
            env=cli.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outs = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outs
    close(cli.steps_of(tmp_path / "run-nodes"), runs["reference"])
