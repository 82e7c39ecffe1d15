"""A run saves when it is asked to, before its time is up, and when it fails."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from accelbridge import Trainer
from accelbridge.checkpoint.manifest import complete
from accelbridge.train import emergency
from accelbridge.train.loss import NextTokenLoss
from tests import cli
from tests.ranks import Rank, outcomes, run_ranks
from tests.scenes import same_bits

STEPS = 8
FAILS_AT = 5
"""Steps that are done when something fails; the last checkpoint before it is of step 4."""


@pytest.fixture(autouse=True)
def clean_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is the whole world, whatever started pytest."""
    for name in ("RANK", "WORLD_SIZE", "ACCELBRIDGE_BACKEND", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)


def events(output: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in cli.lines_of(output) if line.get("event") == kind]


# -------------------------------------------------------------------------------------------------- when asked


def test_sigusr1_to_the_launcher_saves_and_the_run_goes_on(tmp_path: Path, store: Path) -> None:
    recipe = cli.write_recipe(tmp_path / "long.yaml", store, train={"steps": 100_000}, metrics={"interval": 2})
    output = tmp_path / "run-long"
    checkpoints = output / "checkpoints"
    running = cli.start("train", str(recipe), "--nproc", "2")
    try:
        launcher = psutil.Process(running.pid)
        cli.wait_for(lambda: len(launcher.children()) >= 2, 60, "ranks")
        running.send_signal(signal.SIGUSR1)  # long before a rank can take it: it waits
        cli.wait_for(lambda: len(complete(checkpoints)) == 1, 90, "a checkpoint")
        running.send_signal(signal.SIGUSR1)
        cli.wait_for(lambda: len(complete(checkpoints)) == 2, 60, "another checkpoint")
        steps = len(cli.steps_of(output))
        cli.wait_for(lambda: len(cli.steps_of(output)) > steps, 60, "more steps")
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=60)
    finally:
        cli.kill_tree(running) if running.poll() is None else None
    assert running.returncode == 75, said
    assert said.count("SIGUSR1: checkpoint at step") == 2
    reasons = [event.get("reason") for event in events(output, "checkpoint")]
    assert reasons == ["SIGUSR1", "SIGUSR1", "SIGTERM"]


# ---------------------------------------------------------------------------------------------- before time is up


def timed(folder: Path, store: Path, **sections: Any) -> tuple[float, Path]:
    recipe = cli.recipe(folder, store, metrics={"interval": 1}, **sections)
    recipe["train"]["steps"] = 100_000
    trainer = Trainer(recipe)
    began = time.time()
    result = trainer.fit()
    assert result.stopped
    (saved,) = complete(folder / "checkpoints")
    assert saved.name == f"step_{result.step}"
    (stopped,) = events(folder, "stopped")
    assert stopped["reason"] == "time limit"
    return time.time() - began, saved


def test_a_limit_of_its_own(tmp_path: Path, store: Path) -> None:
    seconds, _ = timed(tmp_path, store, train={"max_seconds": 6}, checkpoint={"before_seconds": 3})
    assert 1.0 < seconds < 6.0


def test_the_end_of_the_slurm_job(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = int(time.time()) + 8
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end))
    timed(tmp_path, store, checkpoint={"before_seconds": 4})
    assert time.time() < end


def test_under_a_launcher_the_code_says_try_again(tmp_path: Path, store: Path) -> None:
    recipe = cli.write_recipe(tmp_path / "r.yaml", store, train={"steps": 100_000, "max_seconds": 1})
    done = cli.run("train", str(recipe), "--nproc", "2")
    assert done.returncode == 75, done.stdout + done.stderr
    assert "time limit: checkpoint at step" in done.stdout
    assert len(complete(tmp_path / "run-r" / "checkpoints")) == 1


# ----------------------------------------------------------------------------------------------- when it fails


class Bug(Exception):
    """What goes wrong in these runs."""


@contextmanager
def before_the_step(ctx: Rank) -> Iterator[None]:
    real = Trainer.train_step

    def fails(self: Trainer, microbatches: Any) -> Any:
        if self.step == FAILS_AT:
            raise Bug
        return real(self, microbatches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", fails)
        yield


@contextmanager
def after_the_forward_pass(ctx: Rank) -> Iterator[None]:
    """Parameters are gathered, and there is a graph."""
    real, calls = NextTokenLoss.__call__, []

    def fails(self: Any, model: Any, batch: Any) -> Any:
        loss = real(self, model, batch)
        calls.append(1)
        if len(calls) == FAILS_AT + 1:
            raise Bug
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NextTokenLoss, "__call__", fails)
        yield


@contextmanager
def before_the_update(ctx: Rank) -> Iterator[None]:
    """There are gradients."""
    real = Trainer._update

    def fails(self: Trainer, *args: Any) -> Any:
        if self.step == FAILS_AT:
            raise Bug
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_update", fails)
        yield


@contextmanager
def within_the_update(ctx: Rank) -> Iterator[None]:
    real = Trainer._update

    def fails(self: Trainer, *args: Any) -> Any:
        found = real(self, *args)
        if self.step == FAILS_AT:
            raise Bug
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_update", fails)
        yield


@contextmanager
def with_nan(ctx: Rank) -> Iterator[None]:
    real = Trainer.train_step

    def fails(self: Trainer, microbatches: Any) -> Any:
        if self.step == FAILS_AT:
            with torch.no_grad():
                next(self.model.parameters()).fill_(float("nan"))
            raise Bug
        return real(self, microbatches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", fails)
        yield


SAVED = {
    "before the step": before_the_step,
    "after the forward pass": after_the_forward_pass,
    "before the update": before_the_update,
}
LOST = {
    "within the update": (within_the_update, "the update of step 6 had begun"),
    "with NaN": (with_nan, "parameters are not finite"),
}


def fail(recipe: dict[str, Any]) -> None:
    try:
        Trainer(recipe).fit()
    except (Bug, RuntimeError):  # or what a lost neighbour leads to
        return
    raise AssertionError("nothing failed")


def failing(ctx: Rank, folder: Path, store: Path) -> None:
    """One rank of a run without a fault, and of runs that fail and start again."""
    ctx.launched()
    emergency.LISTEN_SECONDS = 1.0
    faults = {"straight": None} | SAVED | {name: fault for name, (fault, _) in LOST.items()}
    for name, fault in faults.items():
        recipe = cli.recipe(folder / name, store, checkpoint={"interval": 4, "keep": 9}, metrics={"interval": 3})
        recipe["train"]["steps"] = STEPS
        if fault is not None:
            os.environ["TORCHELASTIC_RUN_ID"] = name
            with fault(ctx):
                fail(recipe)
            gc.collect()  # the groups of what has failed, which its traceback held
        os.environ["TORCHELASTIC_RUN_ID"] = name + ", again"
        Trainer(recipe, resume="auto").fit()


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_run_that_fails_saves_its_last_whole_step(tmp_path: Path, store: Path, size: int) -> None:
    run_ranks(failing, size, tmp_path, store, timeout=200)
    straight = cli.steps_of(tmp_path / "straight")
    for name in SAVED:
        output = tmp_path / name
        assert [p.name for p in complete(output / "checkpoints")] == ["step_4", "step_5", "step_8"], name
        assert [e.get("reason") for e in events(output, "checkpoint")] == [None, "an error", None]
        assert [e["step"] for e in events(output, "start")] == [0, 5]
        steps = cli.steps_of(output)
        assert list(steps) == list(range(1, STEPS + 1)), "one line per step, those before the error among them"
        assert {s: line["loss"] for s, line in steps.items()} == {s: line["loss"] for s, line in straight.items()}
        same_bits(output / "checkpoints" / "step_8", tmp_path / "straight" / "checkpoints" / "step_8")
        for rank in range(size):
            assert "emergency checkpoint of step 5" in (output / "logs" / f"rank_{rank}.log").read_text()
    for name, (_, reason) in LOST.items():
        assert [p.name for p in complete(tmp_path / name / "checkpoints")] == ["step_4", "step_8"], name
        said = (tmp_path / name / "logs" / f"rank_{size - 1}.log").read_text()
        assert "no emergency checkpoint of step 5" in said
        assert reason in said, said


def one_fails(ctx: Rank, folder: Path, store: Path) -> None:
    """Rank 1 fails while rank 0 waits for it in a collective."""
    ctx.launched()
    emergency.LISTEN_SECONDS = 1.0
    recipe = cli.recipe(folder, store, checkpoint={"interval": 4})
    recipe["train"]["steps"] = STEPS
    with before_the_step(ctx) if ctx.rank == 1 else nullcontext():
        Trainer(recipe).fit()


def test_an_error_on_one_rank_delays_nobody(tmp_path: Path, store: Path) -> None:
    ended = outcomes(one_fails, 2, tmp_path, store, timeout=60)
    assert [o.error for o in ended] != ["", ""]
    assert ended[1].error == "Bug"
    assert ended[0].error not in ("", "timeout")
    said = (tmp_path / "logs" / "rank_1.log").read_text()
    assert "no emergency checkpoint of step 5: rank 0 did not answer within 1 s" in said
    assert [p.name for p in complete(tmp_path / "checkpoints")] == ["step_4"]


def test_an_interruption_is_no_failure(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Trainer, microbatches: Any) -> Any:
        raise KeyboardInterrupt

    recipe = cli.recipe(tmp_path, store)
    monkeypatch.setattr(Trainer, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Trainer(recipe).fit()
    assert complete(tmp_path / "checkpoints") == []
