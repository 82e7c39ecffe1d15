"""Training on TorchTPU without a TPU: the numbers of the CPU backend, resuming, and checkpoints that move both ways.

Evidence: what is computed ran on the vendor's runtime, on no chip; collectives are simulated (:mod:`.on_host`).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelbridge_xla.eager import facts
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
    close(fitted(on_host.NAME, 1) / "bfloat16", fitted("cpu", 1) / "bfloat16", rel=2e-2)


def test_one_process_resumes_bit_for_bit(fitted: Fitted) -> None:
    _resumed_bit_for_bit(fitted(on_host.NAME, 1), "one")


def test_memory_that_the_runtime_does_not_count_is_not_told(fitted: Fitted) -> None:
    lines = cli.steps_of(fitted(on_host.NAME, 1) / "one")
    assert all(line.get("memory_peak") is None for line in lines.values())


def _resumed_bit_for_bit(runs: Path, whole: str) -> None:
    steps = cli.steps_of(runs / f"{whole}, resumed")
    assert list(steps) == list(range(HALF + 1, STEPS + 1))
    resumed, straight = (runs / name / "checkpoints" / f"step_{STEPS}" for name in (f"{whole}, resumed", whole))
    same_bits(resumed, straight)


# ----------------------------------------------------------------------------------------------- two processes


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_train_as_the_cpu_does(name: str, fitted: Fitted) -> None:
    close(fitted(on_host.NAME, 2) / name, fitted("cpu", 2) / name)


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
    env: dict[str, Any] = {**on_host.environment(site)}
    done = cli.run("explain", str(recipe), "--backend", on_host.NAME, **env)
    assert done.returncode == 0, done.stderr
    for part in ("torch_tpu 0.2.0", on_host.CHIP, "(simulated)", "not flash: ", "not splash: "):
        assert part in done.stdout, done.stdout


# ---------------------------------------------------------------------------------------- what importing torch does


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    hidden = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "TPU_LIBRARY_PATH")
    env = {name: value for name, value in os.environ.items() if name not in hidden} | variables
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_importing_torch_without_libtpu_ends_the_process() -> None:
    """Where torch_tpu is loaded with torch: why make test-tpu, and our README, switch that off."""
    assert importlib.util.find_spec("libtpu") is None
    done = _python("import torch")
    assert done.returncode
    assert "Traceback" not in done.stderr  # no exception that could be caught
    assert "Environment variable TPU_LIBRARY_PATH is not set" in done.stderr


def test_loading_with_torch_registers_no_device_without_a_chip() -> None:
    code = (
        "import sys, accelbridge; assert 'torch' not in sys.modules\n"
        "import torch; assert 'torch_tpu' in sys.modules\n"
        "assert torch.compile.__code__.co_filename == torch.__file__\n"
        "try: torch.device('tpu')\n"
        "except RuntimeError as error: print(error)"
    )
    done = _python(code, TPU_LIBRARY_PATH=str(on_host.plugin_library()))
    assert done.returncode == 0, done.stderr
    assert "device type" in done.stdout


def test_what_the_vendor_replaces_in_torch_is_known(tmp_path: Path) -> None:
    """README.md lists it; none of it is ours."""
    code = (
        "import os; from accelbridge.plugins import load_backend\n"
        "from accelbridge.backend import World; from accelbridge.conformance.patched import patched_names\n"
        f"backend = load_backend('{on_host.NAME}'); os.environ |= backend.collectives.environment(World())\n"
        "backend.device.bind(World()); print(*patched_names(), sep='\\n')"
    )
    done = _python(code, **on_host.environment(on_host.site(tmp_path)))
    assert done.returncode == 0, done.stderr
    names = {line.split(" ")[0] for line in done.stdout.splitlines() if "torch_tpu" in line}
    assert names == set(facts.REPLACED)
