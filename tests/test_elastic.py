"""Restarts: a killed rank, what is never retried, one store for several starts, two nodes of which one is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accelbridge.backend import World
from accelbridge.checkpoint.manifest import complete
from accelbridge.launch.agent import first_failure
from accelbridge.train.restart import Restart, restart_of, resume_after_restart
from accelbridge.train.rounds import meet
from accelbridge.train.world import world_from_environment
from tests import cli
from tests.ranks import Rank, run_ranks
from tests.scenes import same_bits

SECTIONS: dict[str, Any] = {
    "train": {"steps": 60, "microbatch_size": 2},
    "checkpoint": {"interval": 10, "keep": 9},
    "metrics": {"interval": 2},
}
TRAIN = ["-m", "accelbridge", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def losses(output: Path) -> dict[int, float]:
    return {step: line["loss"] for step, line in cli.steps_of(output).items()}


def events(output: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in cli.lines_of(output) if line.get("event") == kind]


def ranks_of(launcher: int) -> dict[int, psutil.Process]:
    """The ranks of a running launcher, by rank."""
    found = {}
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            variables = process.environ()
        except psutil.Error:
            continue
        if "RANK" in variables and "accelbridge" in " ".join(process.cmdline()):
            found.setdefault(int(variables["RANK"]), process)
    return found


def started(output: Path, steps: int) -> bool:
    return (output / "metrics.jsonl").exists() and len(cli.steps_of(output)) > steps


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """The run without a failure."""
    folder = tmp_path_factory.mktemp("straight")
    done = cli.run("train", str(cli.write_recipe(folder / "straight.yaml", store, **SECTIONS)), "--nproc", "2")
    assert done.returncode == 0, done.stderr
    return folder / "run-straight"


# ------------------------------------------------------------------------------------------------- one host


def test_a_killed_rank_costs_nothing_but_time(tmp_path: Path, store: Path, straight: Path) -> None:
    recipe = cli.write_recipe(tmp_path / "killed.yaml", store, **SECTIONS)
    output = tmp_path / "run-killed"
    running = cli.start("train", str(recipe), "--nproc", "2", "--max-restarts", "1")
    at, rank = random.randrange(2, 40), random.randrange(2)  # in the message of what fails below
    cli.wait_for(lambda: started(output, at), 60, f"step {at}")
    ranks_of(running.pid)[rank].kill()
    out, _ = running.communicate(timeout=90)
    assert running.returncode == 0, (at, rank, out)
    assert f"restart 1 of 1: rank {rank}: ended by signal 9" in out
    assert losses(output) == losses(straight), (at, rank)
    same_bits(output / "checkpoints" / "step_60", straight / "checkpoints" / "step_60")
    (event,) = events(output, "restart")
    assert event["count"] == 1
    assert event["cause"] == f"rank {rank}: ended by signal 9; see OUTPUT/logs"
    assert event["step"] == events(output, "start")[-1]["step"]
    assert 0 <= event["lost_steps"] <= 60
    assert "started again by the launcher (restart 1)" in (output / "logs" / "rank_0.log").read_text()


@pytest.mark.full
def test_killed_before_any_checkpoint_it_starts_over(tmp_path: Path, store: Path) -> None:
    sections = {**SECTIONS, "checkpoint": {"interval": 0}, "train": {"steps": 400}}
    recipe = cli.write_recipe(tmp_path / "early.yaml", store, **sections)
    output = tmp_path / "run-early"
    running = cli.start("train", str(recipe), "--nproc", "1", "--max-restarts", "2")
    cli.wait_for(lambda: started(output, 4), 60, "a few steps")
    ranks_of(running.pid)[0].kill()
    out, _ = running.communicate(timeout=90)
    assert running.returncode == 0, out
    assert sorted(cli.steps_of(output)) == list(range(1, 401))
    (event,) = events(output, "restart")
    assert (event["step"], event["count"]) == (0, 1)
    assert event["lost_steps"] >= 4
    assert (output / "metrics.1.jsonl").exists(), "the lines of the steps that were lost are kept"


BROKEN = """
import os
if os.environ.get("RANK") == "1":
    from accelbridge.errors import DataError
    from accelbridge.train import trainer
    def broken(*_, **__):
        {what}
    trainer.Trainer.train_step = broken
"""


def path_with(folder: Path) -> str:
    """PYTHONPATH with ``folder``, whose sitecustomize imports accelbridge before ``-m`` adds the current folder."""
    return os.pathsep.join([str(folder), str(Path(__file__).parent.parent)])


def test_what_a_restart_cannot_cure_is_not_retried(tmp_path: Path, store: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(what="raise DataError('these data are not there')"))
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store)
    done = cli.run("train", str(recipe), "--nproc=2", "--max-restarts=3", PYTHONPATH=path_with(tmp_path))
    assert done.returncode == 2, done
    assert "error: rank 1: these data are not there" in done.stderr
    assert "restart" not in done.stderr


@pytest.mark.full
def test_a_crash_is_retried_as_often_as_allowed(tmp_path: Path, store: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(what="os._exit(7)"))
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store)
    done = cli.run("train", str(recipe), "--nproc=2", "--max-restarts=1", PYTHONPATH=path_with(tmp_path))
    assert done.returncode == 7, done
    assert "restart 1 of 1: rank 1: exit code 7 without a message" in done.stderr
    assert "error: rank 1: exit code 7" in done.stderr
    (event,) = events(tmp_path / "run-recipe", "restart")
    assert event["cause"].startswith("rank 1: exit code 7")


def test_a_run_that_stops_on_sigterm_stays_stopped(tmp_path: Path, store: Path) -> None:
    sections = {**SECTIONS, "train": {"steps": 100_000}}
    recipe = cli.write_recipe(tmp_path / "stop.yaml", store, **sections)
    output = tmp_path / "run-stop"
    running = cli.start("train", str(recipe), "--nproc", "2", "--max-restarts", "3")
    cli.wait_for(lambda: started(output, 4), 60, "a few steps")
    ranks_of(running.pid)[1].send_signal(signal.SIGTERM)  # to one rank: all stop with it
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 75, out
    assert "restart" not in out
    assert len(complete(output / "checkpoints")) >= 1


# ---------------------------------------------------------------------------------------- which failure was first

NOW = int(time.time())


@pytest.mark.parametrize(
    ("ends", "first", "code", "curable"),
    [
        # by rank: exit code, seconds after NOW at which its report says it failed (None: no report), and was found
        ({0: (1, 0.2, 0), 1: (-9, None, 0)}, 1, -9, True),  # killed: the other's report is about that
        ({0: (1, 0.2, 0), 1: (2, 0.1, 0)}, 1, 2, False),
        ({0: (-15, None, 1), 1: (1, 0.1, 0)}, 1, 1, True),  # ended by the agent
        ({0: (1, 0.1, 0), 1: (-9, None, 30)}, 0, 1, True),  # hung, and ended by the agent at last
        ({0: (75, None, 0), 1: (-15, None, 1)}, 0, 75, False),  # stopped, and on its way out
        ({0: (75, None, 0), 1: (75, None, 0)}, 0, 75, False),
        ({0: (-15, None, 0), 1: (-15, None, 0)}, 0, -15, True),
    ],
)
def test_the_first_failure(
    tmp_path: Path, ends: dict[int, tuple[int, float | None, int]], first: int, code: int, curable: bool
) -> None:
    failures = {}
    for rank, (exit_code, failed_at, found) in ends.items():
        file = tmp_path / f"{rank}.json"
        if failed_at is not None:
            file.write_text(json.dumps({"message": "what it said", "failed_at": NOW + failed_at}))
        failures[rank] = ProcessFailure(rank, 1000 + rank, exit_code, str(file))
        if failed_at is None:
            failures[rank].timestamp = NOW + found
    found_first = first_failure(failures)
    assert (found_first.rank, found_first.exit_code, found_first.curable) == (first, code, curable)


def test_a_requeued_slurm_job_is_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_")) or name == "RANK"]:
        monkeypatch.delenv(name)
    names = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "MASTER_ADDR": "node0"}
    for name, value in {**names, "SLURM_RESTART_COUNT": "3"}.items():
        monkeypatch.setenv(name, value)
    world = world_from_environment()
    assert (world.rank, world.size, world.restart) == (1, 2, 3)


# ------------------------------------------------------------------------------- what --resume means afterwards


@pytest.mark.parametrize(
    ("asked", "restart", "saved", "meant"),
    [
        ("none", 0, True, "none"),
        ("none", 1, True, "auto"),
        ("none", 1, False, "auto"),
        ("auto", 3, False, "auto"),
        ("elsewhere/step_4", 0, True, "elsewhere/step_4"),
        ("elsewhere/step_4", 1, True, "auto"),
        ("elsewhere/step_4", 1, False, "elsewhere/step_4"),
    ],
)
def test_resume_after_a_restart(tmp_path: Path, asked: str, restart: int, saved: bool, meant: str) -> None:
    if saved:
        (tmp_path / "step_10").mkdir()
        (tmp_path / "step_10" / "manifest.json").write_text("{}")
    assert resume_after_restart(asked, restart, tmp_path) == meant


def test_the_cause_is_what_the_run_itself_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert restart_of(tmp_path, 0, 0) is None
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"event": "start", "step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    unknown = Restart(2, 1, "not told by the launcher; see OUTPUT/logs", 1)
    assert restart_of(tmp_path, 2, 0) == unknown
    monkeypatch.setenv("ACCELBRIDGE_RESTART_CAUSE", "rank 1: ended by signal 9")
    assert restart_of(tmp_path, 2, 0) == unknown, "of an earlier launch"
    assert restart_of(tmp_path, 2, 1) == Restart(2, 1, "rank 1: ended by signal 9", 1)
    file.rename(tmp_path / "metrics.1.jsonl")
    file.write_text('{"event": "start", "step": 0}\n{"step": 1}\n{"event": "stopped", "step": 1}\n')
    assert restart_of(tmp_path, 1, 0) == Restart(1, 2, "stopped by SIGTERM", 0)


# ---------------------------------------------------------------------------------- one store, several starts


def _starts(ctx: Rank, late: float) -> list[tuple[str, int]]:
    """Three starts of the same ranks on one store, whose agents count restarts differently."""
    found = []
    for count in range(3):
        world = World(ctx.rank, ctx.size, run_id="r", restart=count if ctx.rank == 0 else 0)
        if ctx.rank == 0 and count:
            time.sleep(late)  # the others read what the start before left, and must not take it
        store, agreed = meet(ctx.store(), world, 20)
        if ctx.rank == 0:
            store.set("mark", str(count))
        found.append((store.get("mark").decode(), agreed.restart))
    return found


def test_ranks_meet_those_of_their_own_start() -> None:
    for result in run_ranks(_starts, 3, 0.2):
        assert result == [("0", 0), ("1", 1), ("2", 2)]


def test_absent_ranks_do_not_hold_the_others_for_ever() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    for rank in range(2):
        began = time.monotonic()
        meet(server, World(rank, 3, run_id="r"), 0.3)
        assert 0.3 <= time.monotonic() - began < 3


# ----------------------------------------------------------------------------------------------- stock torchrun


@pytest.mark.full
def test_stock_torchrun_restarts_too(tmp_path: Path, store: Path, straight: Path) -> None:
    recipe = cli.write_recipe(tmp_path / "stock.yaml", store, **SECTIONS)
    output = tmp_path / "run-stock"
    running = subprocess.Popen(
        [
            *TORCHRUN,
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=1",
            "-m",
            "accelbridge",
            "train",
            str(recipe),
        ],
        env=cli.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        cli.wait_for(lambda: started(output, 12), 90, "a checkpoint")
        ranks_of(running.pid)[1].kill()
        out, _ = running.communicate(timeout=90)
    finally:
        if running.poll() is None:
            cli.kill_tree(running)
    assert running.returncode == 0, out
    assert losses(output) == losses(straight)
    (event,) = events(output, "restart")
    assert event["cause"] == "not told by the launcher; see OUTPUT/logs"
