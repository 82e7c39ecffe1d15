"""The simulated device proves itself: two ranks with a device each, and accelbridge's own trainer on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelbridge import Trainer
from tests import cli
from tests.ranks import Rank, run_ranks
from tests.sim import build
from tests.sim.backend import BACKENDS, site
from tests.sim.device import HPU, RENAMED
from tests.sim.distributed import PROBES, run_all

KEYS = (HPU, RENAMED)
ByRank = list[dict[str, str]]


@pytest.fixture(scope="module")
def results() -> Callable[[str], ByRank]:
    """What became of every probe on both ranks, by key."""
    build.library()  # not on the clock of the ranks
    found: dict[str, ByRank] = {}

    def of(name: str) -> ByRank:
        if name not in found:
            found[name] = run_ranks(run_all, 2, name, timeout=120)
        return found[name]

    return of


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", PROBES)
def test_probe(key: str, name: str, results: Callable[[str], ByRank]) -> None:
    failures = {rank: found[name] for rank, found in enumerate(results(key)) if found[name]}
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())


# ------------------------------------------------------------------------------------------- accelbridge's trainer

PORTABLE = {"attention": "reference", "adamw": "reference"}
"""Implementations that both devices have."""
RUNS: dict[str, dict[str, Any]] = {"plain": {"zero": 3}, "checked": {"zero": 3, "check_collectives": True}}
"""The section ``parallel`` by run: native groups, and groups through which accelbridge passes every call."""
STEPS = 6
Lines = dict[int, dict[str, Any]]


def _fit(ctx: Rank, folder: Path, store: Path, backend: str, runs: list[str]) -> None:
    """One rank of ``runs`` on ``backend``, one after the other."""
    sys.path.insert(0, str(folder / "site"))
    os.environ |= {
        "RANK": str(ctx.rank),
        "LOCAL_RANK": str(ctx.rank),
        "WORLD_SIZE": str(ctx.size),
        "LOCAL_WORLD_SIZE": str(ctx.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ctx.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        # A backend from outside the core is probed in a process of its own, which imports torch.
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(Path(__file__).parent.parent)]),
        "ACCELBRIDGE_PROBE_SECONDS": "60",
    }
    for name in runs:
        os.environ["TORCHELASTIC_RUN_ID"] = name
        recipe = cli.recipe(folder / f"{backend}-{name}", store, parallel=RUNS[name], train={"steps": STEPS})
        recipe |= {"backend": {"name": backend, "ops": PORTABLE}, "metrics": {"interval": 1}}
        Trainer(recipe).fit()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Callable[[str, str], Lines]:
    """The steps of a run by backend and name; each backend has a pair of processes of its own."""
    build.library()
    folder = tmp_path_factory.mktemp("trainer")
    site(folder / "site")
    done = set()

    def of(backend: str, name: str) -> Lines:
        if backend not in done:
            run_ranks(_fit, 2, folder, store, backend, ["plain"] if backend == "cpu" else list(RUNS), timeout=180)
            done.add(backend)
        return cli.steps_of(folder / f"{backend}-{name}")

    return of


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", RUNS)
def test_trainer_equals_the_cpu(key: str, name: str, fitted: Callable[[str, str], Lines]) -> None:
    """ZeRO 3 on two ranks: losses and gradient norms of every step, bit for bit."""
    ours, host = fitted(BACKENDS[key].name, name), fitted("cpu", "plain")
    assert sorted(ours) == list(range(1, STEPS + 1))
    for value in ("loss", "grad_norm"):
        assert [ours[step][value] for step in sorted(ours)] == [host[step][value] for step in sorted(host)]
