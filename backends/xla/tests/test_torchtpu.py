"""Training on TorchTPU without a TPU: the numbers of the CPU backend, resuming, and checkpoints that move both ways.

Evidence: what is computed ran on the vendor's runtime, on no chip; collectives are simulated (:mod:`.on_host`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.xla.tests import on_host
from tests import cli
from tests.ranks import Rank, run_ranks
from tests.scenes import TWO, Sections, same_bits, train_all

pytestmark = on_host.needs_torch_tpu

STEPS = 6
HALF = STEPS // 2
COMMON: Sections = {"metrics": {"interval": 1}, "train": {"steps": STEPS}, "checkpoint": {"interval": HALF, "keep": 9}}
ONE: dict[str, Sections] = {"one": {}, "bfloat16": TWO["bfloat16"]}
SHARDED = "ZeRO 3"
LAYOUTS = (SHARDED, "replicate 2", "ZeRO 1, accumulating", "tp 2, sequence parallel", "dropout", "recompute full")
RUNS: dict[int, dict[str, Sections]] = {1: ONE, 2: {name: TWO[name] for name in LAYOUTS}}
"""By the number of processes."""
AGAIN = {1: {"one, resumed": "one"}, 2: {"ZeRO 3, resumed": SHARDED}}
"""Runs that start from the checkpoint which a run of the same backend wrote half way."""
MOVED = "ZeRO 3, moved"
"""The same from a checkpoint of the other backend."""
FAMILIES = {"cpu": on_host.NAME, on_host.NAME: "cpu"}


def _fit(ctx: Rank, folder: Path, store: Path, backend: str, moved: bool) -> None:
    """One rank of the runs of a world."""
    sys.path.insert(0, str(folder / "site"))
    os.environ |= on_host.environment(folder / "site")
    common = {**COMMON, "backend": {"name": backend}}
    runs: dict[str, Sections] = {MOVED: TWO[SHARDED]} if moved else {**RUNS[ctx.size]}
    runs |= {} if moved else {name: RUNS[ctx.size][whole] for name, whole in AGAIN[ctx.size].items()}
    resume = {name: f"{whole}/checkpoints/step_{HALF}" for name, whole in AGAIN[ctx.size].items()}
    resume[MOVED] = f"../{FAMILIES[backend]}/{SHARDED}/checkpoints/step_{HALF}"
    train_all(ctx, folder / backend, store, runs, common, resume)


Fitted = Callable[..., Path]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """The folder with all runs of a backend in a world of some size; started when first asked for."""
    folder = tmp_path_factory.mktemp("torchtpu")
    on_host.site(folder / "site")
    store = cli.build_store(folder / "store")
    done: set[tuple[str, int, bool]] = set()

    def make(backend: str, size: int, moved: bool) -> None:
        if (backend, size, moved) not in done:
            run_ranks(_fit, size, folder, store, backend, moved, timeout=900, env=on_host.environment(folder / "site"))
            done.add((backend, size, moved))

    def of(backend: str, size: int, moved: bool = False) -> Path:
        make(backend, size, False)
        if moved:
            make(FAMILIES[backend], size, False)
            make(backend, size, True)
        return folder / backend

    return of


def values(output: Path, name: str) -> list[float]:
    return [line[name] for line in cli.steps_of(output).values()]


def close(ours: Path, theirs: Path, first: int = 1, rel: float = 1e-4) -> None:
    """Losses and gradient norms agree, of all steps from ``first`` on."""
    assert list(cli.steps_of(ours)) == list(range(first, STEPS + 1))
    for name in ("loss", "grad_norm"):
        assert values(ours, name) == pytest.approx(values(theirs, name)[first - 1 :], rel=rel), name


# ------------------------------------------------------------------------------------------------ one process


def test_one_process_trains_as_the_cpu_does(fitted: Fitted) -> None:
    ours, theirs = (fitted(backend, 1) / "one" for backend in (on_host.NAME, "cpu"))
    close(ours, theirs)
    assert values(ours, "loss")[-1] < values(ours, "loss")[0]


def test_bfloat16_trains_as_the_cpu_does(fitted: Fitted) -> None:
    """Products are rounded once by both; sums over rows are not in one order."""
    close(*(fitted(backend, 1) / "bfloat16" for backend in (on_host.NAME, "cpu")), rel=2e-2)


def test_one_process_resumes_bit_for_bit(fitted: Fitted) -> None:
    _resumed_bit_for_bit(fitted(on_host.NAME, 1), "one")


def test_memory_that_the_runtime_does_not_count_is_not_told(fitted: Fitted) -> None:
    lines = cli.steps_of(fitted(on_host.NAME, 1) / "one")
    assert all(line.get("memory_peak") is None for line in lines.values())


def _resumed_bit_for_bit(runs: Path, whole: str) -> None:
    steps = cli.steps_of(runs / f"{whole}, resumed")
    assert list(steps) == list(range(HALF + 1, STEPS + 1))
    same_bits(*(runs / name / "checkpoints" / f"step_{STEPS}" for name in (f"{whole}, resumed", whole)))


# ----------------------------------------------------------------------------------------------- two processes


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_train_as_the_cpu_does(name: str, fitted: Fitted) -> None:
    close(*(fitted(backend, 2) / name for backend in (on_host.NAME, "cpu")))


def test_two_processes_resume_bit_for_bit(fitted: Fitted) -> None:
    _resumed_bit_for_bit(fitted(on_host.NAME, 2), SHARDED)


@pytest.mark.parametrize("backend", FAMILIES)
def test_a_checkpoint_of_two_ranks_moves(backend: str, fitted: Fitted) -> None:
    """From the CPU to TorchTPU, and back."""
    moved, whole = fitted(backend, 2, True) / MOVED, fitted(FAMILIES[backend], 2) / SHARDED
    close(moved, whole, first=HALF + 1)


# ------------------------------------------------------------------------------------------------------- plan


def test_the_plan_says_what_serves_and_what_is_simulated(tmp_path: Path, fitted: Fitted) -> None:
    recipe = cli.write_recipe(tmp_path / "run.yaml", fitted(on_host.NAME, 1).parent / "store")
    site = on_host.site(tmp_path / "site")
    done = cli.run("explain", str(recipe), "--backend", on_host.NAME, **on_host.environment(site))
    assert done.returncode == 0, done.stderr
    for part in ("torch_tpu 0.2.0", on_host.CHIP, "(simulated)", "not flash: ", "not splash: "):
        assert part in done.stdout, done.stdout
