"""The trainer on the simulated device: every run equals the CPU's bit for bit, as both use the same implementations."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelbridge import Trainer
from accelbridge.errors import OutOfMemoryError
from tests import cli
from tests.ranks import Rank, run_ranks
from tests.scenes import FOUR, TWO, Sections, same_bits, sigterm_saves, train_all
from tests.sim import build
from tests.sim.backend import BACKENDS, environment, site
from tests.sim.device import install
from tests.sim.names import HPU, RENAMED

STEPS = 6
COMMON: Sections = {
    # Implementations that both devices have.
    "backend": {"ops": {"attention": "reference", "adamw": "reference"}},
    "metrics": {"interval": 1},
    "train": {"steps": STEPS},
    "checkpoint": {"interval": STEPS // 2, "keep": 9},
}
RESUMED = {"resumed": f"ZeRO 3/checkpoints/step_{STEPS // 2}"}
WORLDS: dict[int, dict[str, Sections]] = {
    2: {**TWO, "resumed": TWO["ZeRO 3"], "evaluated": {"train": {"eval_interval": 3}}},
    4: FOUR,
}
"""Runs by the size of their world: those of tests/scenes.py, where new ones are added, and two of our own."""
ON_RENAMED = ("ZeRO 3", "tp 2, sequence parallel", "bfloat16", "float16", "dropout", "resumed", "evaluated")
"""The renamed key differs in its dispatch, autocast and random state, not in what the layouts do."""
ALL = tuple(name for runs in WORLDS.values() for name in runs)
SIMULATED = {BACKENDS[HPU].name: ALL, BACKENDS[RENAMED].name: ON_RENAMED}
RUNS = {"cpu": ALL, **SIMULATED}
CASES = [(backend, name) for backend, names in SIMULATED.items() for name in names]
Fitted = Callable[[str], Path]


def _fit(ctx: Rank, folder: Path, store: Path, backend: str, runs: dict[str, Sections]) -> None:
    """One rank of ``runs`` on ``backend``."""
    sys.path.insert(0, str(folder / "site"))
    os.environ |= environment(folder)
    common = {**COMMON, "backend": {"name": backend, **COMMON["backend"]}}
    if "evaluated" in runs:
        runs["evaluated"]["data"] = {"validation": str(store / "validation")}
    train_all(ctx, folder / backend, store, runs, common, RESUMED)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Fitted:
    """The folder with all runs of a backend; each backend and size of world has processes of its own."""
    build.library()  # not on the clock of the ranks
    folder = tmp_path_factory.mktemp("trainer")
    site(folder / "site")
    done = set()

    def of(backend: str) -> Path:
        if backend not in done:
            for size, runs in WORLDS.items():
                if here := {name: sections for name, sections in runs.items() if name in RUNS[backend]}:
                    run_ranks(_fit, size, folder, store, backend, here, timeout=300)
            done.add(backend)
        return folder / backend

    return of


def lines_of(output: Path) -> list[dict[str, Any]]:
    """What a run computed: losses, gradient norms and loss scales of its steps, losses of its evaluations."""
    names = ("event", "step", "loss", "grad_norm", "loss_scale", "skipped_updates")
    return [{name: line[name] for name in names if name in line} for line in cli.lines_of(output) if "loss" in line]


def last_checkpoint(output: Path) -> Path:
    return output / "checkpoints" / f"step_{STEPS}"


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_equals_the_cpu(backend: str, name: str, fitted: Fitted) -> None:
    ours, host = (fitted(on) / name for on in (backend, "cpu"))
    assert lines_of(ours) == lines_of(host)
    assert {line["step"] for line in lines_of(ours)} >= set(range(STEPS // 2 + 1, STEPS + 1))
    same_bits(last_checkpoint(ours), last_checkpoint(host), random_state=False)


@pytest.mark.parametrize("backend", SIMULATED)
def test_evaluation_was_compared(backend: str, fitted: Fitted) -> None:
    evaluations = [line for line in lines_of(fitted(backend) / "evaluated") if "event" in line]
    assert [line["step"] for line in evaluations] == [3, STEPS]


@pytest.mark.parametrize("backend", SIMULATED)
def test_an_overflow_and_updates_were_compared(backend: str, fitted: Fitted) -> None:
    assert 0 < lines_of(fitted(backend) / "float16")[-1]["skipped_updates"] < STEPS


@pytest.mark.parametrize("backend", SIMULATED)
def test_resume_is_bitwise(backend: str, fitted: Fitted) -> None:
    """Random state of the device included, which no other device has."""
    runs = fitted(backend)
    same_bits(last_checkpoint(runs / "resumed"), last_checkpoint(runs / "ZeRO 3"))


def _starved(ctx: Rank, folder: Path, store: Path, backend: str, key: str) -> str:
    """A run on a device that has no room for activations; its error."""
    sys.path.insert(0, str(folder / "site"))
    os.environ |= environment(folder)
    ctx.launched()
    trainer = Trainer(cli.recipe(folder / "starved", store, backend={"name": backend}))
    with trainer:
        trainer.setup()
        sim = install(key)
        with sim.capacity(sim.module.memory_allocated() + 2**18), pytest.raises(OutOfMemoryError) as caught:
            trainer.fit()
    return str(caught.value)


@pytest.mark.parametrize("key", [HPU, RENAMED])
def test_out_of_memory_becomes_advice(key: str, tmp_path: Path, store: Path) -> None:
    build.library()
    site(tmp_path / "site")
    (text,) = run_ranks(_starved, 1, tmp_path, store, BACKENDS[key].name, key, timeout=120)
    for part in ("out of memory. Tried to allocate", "parameters ", "train.microbatch_size 8 -> 4: saves about"):
        assert part in text


def test_sigterm_saves_and_leaves_with_its_own_code(tmp_path: Path, store: Path) -> None:
    build.library()
    site(tmp_path / "site")
    sigterm_saves(tmp_path, store, environment(tmp_path), backend={"name": BACKENDS[HPU].name})
