"""Two agents of torchrun on one host stand for two nodes: one is lost, the run goes on without it, it comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelbridge.checkpoint.manifest import complete, read
from accelbridge.errors import CheckpointError
from tests import cli
from tests.test_elastic import ranks_of

pytestmark = pytest.mark.full
PER_NODE = 2
SECTIONS: dict[str, Any] = {
    "train": {"steps": 100_000, "seq_len": 16},
    # The rate does not depend on the number of steps, so that a run that ends earlier can be compared.
    "optimizer": {"schedule": "constant", "lr": 1e-4},
    "checkpoint": {"interval": 10, "keep": 4},
    "metrics": {"interval": 2},
}
SLOW = """
import time
from accelbridge.train import trainer
step = trainer.Trainer.train_step
def slow(self, microbatches):
    time.sleep(0.1)
    return step(self, microbatches)
trainer.Trainer.train_step = slow
"""
"""10 steps a second at most: a node has to go and come while the run lasts."""


class Nodes:
    """Agents that share a rendezvous, which the first one hosts, and with ``shared`` also its store."""

    def __init__(self, recipe: Path, max_restarts: int = 5, nnodes: str = "1:2", shared: bool = False) -> None:
        conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
        self._command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={PER_NODE}"]
        self._command += [f"--nnodes={nnodes}"]
        self._command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{cli.free_port()}", "--rdzv-id=elastic"]
        self._command += ["--local-addr=127.0.0.1", f"--rdzv-conf={conf}", f"--max-restarts={max_restarts}"]
        self._command += ["-m", "accelbridge", "train", str(recipe), "--resume", "auto"]
        self._folder = recipe.parent
        self._environment = {} if shared else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        (self._folder / "sitecustomize.py").write_text(SLOW)
        self._all: list[subprocess.Popen[str]] = []

    def add(self) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(self._folder), str(Path(__file__).parent.parent)])
        with (self._folder / f"agent{len(self._all)}.log").open("w") as log:
            agent = subprocess.Popen(
                self._command,
                env=cli.environment(PYTHONPATH=path, **self._environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._all.append(agent)
        return agent

    def said(self) -> str:
        return "\n".join(path.read_text()[-5000:] for path in sorted(self._folder.glob("agent*.log")))

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._all:
            if agent.poll() is None:
                cli.kill_tree(agent)


def saved_by(output: Path, ranks: int, after: int) -> int:
    """The step of the newest checkpoint of a world of ``ranks`` that is beyond ``after``; 0 where there is none."""
    folders = [path for path in complete(output / "checkpoints") if int(path.name.removeprefix("step_")) > after]
    for path in reversed(folders):
        try:
            manifest = read(path)
        except CheckpointError:  # it has just been deleted, as the oldest are
            continue
        if manifest.world_size == ranks:
            return manifest.step
    return 0


def test_a_node_is_lost_and_comes_back(tmp_path: Path, store: Path) -> None:
    straight = cli.write_recipe(
        tmp_path / "straight.yaml", store, **{**SECTIONS, "train": {"steps": 600, "seq_len": 16}}
    )
    recipe = cli.write_recipe(tmp_path / "nodes.yaml", store, **SECTIONS)
    output = tmp_path / "run-nodes"
    with Nodes(recipe) as nodes:
        nodes.add()
        cli.wait_for(lambda: (output / "metrics.jsonl").exists(), 90, "the first node alone")
        lost = nodes.add()
        cli.wait_for(lambda: saved_by(output, 4, 0) > 0, 120, "both nodes")
        at = saved_by(output, 4, 0)
        cli.kill_tree(lost)
        cli.wait_for(lambda: saved_by(output, 2, at) > 0, 120, "the node that is left")
        alone = saved_by(output, 2, at)
        nodes.add()
        cli.wait_for(lambda: saved_by(output, 4, alone) > 0, 120, "both nodes again")
    done = cli.run("train", str(straight))
    assert done.returncode == 0, done.stderr
    ours, theirs = cli.steps_of(output), cli.steps_of(tmp_path / "run-straight")
    assert min(ours) == 1
    assert sorted(ours) == list(range(1, max(ours) + 1)), "no step is missing"
    common = ours.keys() & theirs.keys()
    assert len(common) > at
    worst = max(abs(ours[step]["loss"] / theirs[step]["loss"] - 1) for step in common)
    assert worst < 1e-5
    lost_steps = [line["lost_steps"] for line in cli.lines_of(output) if line.get("event") == "restart"]
    assert len(lost_steps) >= 3, nodes.said()
    assert min(lost_steps) == 0, "a node that comes costs nothing: the others save before they make room"


@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_dies_on_one_of_two_nodes(tmp_path: Path, store: Path, shared: bool) -> None:
    """The agent of the other node may take part in the restart without counting it."""
    recipe = cli.write_recipe(tmp_path / "rank.yaml", store, **SECTIONS)
    output = tmp_path / "run-rank"
    with Nodes(recipe, nnodes="2", shared=shared) as nodes:
        agents = [nodes.add(), nodes.add()]
        for agent in agents:
            at = max((int(path.name.removeprefix("step_")) for path in complete(output / "checkpoints")), default=0)
            cli.wait_for(lambda at=at: saved_by(output, 2 * PER_NODE, at) > 0, 120, "a checkpoint by all")
            ranks_of(agent.pid)[max(ranks_of(agent.pid))].kill()
        at = saved_by(output, 2 * PER_NODE, 0)
        cli.wait_for(lambda: saved_by(output, 2 * PER_NODE, at + 10) > 0, 120, "a checkpoint after two deaths")
    steps = cli.steps_of(output)
    assert sorted(steps) == list(range(1, max(steps) + 1)), "no step is missing"


def test_a_layout_that_does_not_adapt_ends_the_run(tmp_path: Path, store: Path) -> None:
    recipe = cli.write_recipe(tmp_path / "fixed.yaml", store, **{**SECTIONS, "parallel": {"dp_shard": 4}})
    output = tmp_path / "run-fixed"
    with Nodes(recipe, max_restarts=1) as nodes:
        first, second = nodes.add(), nodes.add()
        cli.wait_for(lambda: saved_by(output, 4, 0) > 0, 120, "both nodes")
        cli.kill_tree(second)
        first.wait(timeout=120)
        assert first.returncode == 1, nodes.said()
        assert "parallel.dp_shard 4 asked, which takes 4 devices; the run has 2" in nodes.said()
    assert complete(output / "checkpoints"), "what was saved is still there"
