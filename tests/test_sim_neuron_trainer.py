"""The trainer on the double of AWS's SDK: with portable ops every run equals the CPU's bit for bit; with the vendor's
attention it learns the same. Simulated: the host computes, and no Neuron device was near."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import cli
from tests.contracts import neuron
from tests.ranks import Rank, run_ranks
from tests.scenes import FOUR, TWO, Sections, same_bits, train_all
from tests.sim import build

STEPS = 6
PORTABLE: dict[str, Any] = {"ops": {"attention": "reference", "adamw": "reference"}}
COMMON: Sections = {
    "metrics": {"interval": 1},
    "train": {"steps": STEPS},
    "checkpoint": {"interval": STEPS // 2, "keep": 9},
}
RESUMED = {"resumed": f"ZeRO 3/checkpoints/step_{STEPS // 2}"}
WORLDS: dict[int, dict[str, Sections]] = {
    2: {
        **{name: TWO[name] for name in ("ZeRO 3", "tp 2", "tp 2, sequence parallel", "dropout", "bfloat16")},
        "resumed": TWO["ZeRO 3"],
    },
    4: FOUR,
}
RUNS = [name for runs in WORLDS.values() for name in runs]
Fitted = Callable[[str], Path]


def _fit(ctx: Rank, folder: Path, store: Path, backend: dict[str, Any], runs: dict[str, Sections]) -> list[str]:
    """One rank of ``runs``; which paths the double's attention took."""
    neuron.enter(folder)
    name = backend["name"]
    out = folder / (name if backend.get("ops") else f"{name} vendor")
    train_all(ctx, out, store, runs, {**COMMON, "backend": backend}, RESUMED)
    if name != "neuron":
        return []
    from torch_neuronx import _attention  # pyright: ignore[reportMissingImports]

    return sorted(set(_attention.paths))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build.library()  # not on the clock of the ranks
    return neuron.site(tmp_path_factory.mktemp("neuron"))


@pytest.fixture(scope="module")
def fitted(folder: Path, store: Path) -> Fitted:
    """The folder with all runs of a backend."""
    done = set()

    def of(backend: str) -> Path:
        if backend not in done:
            for size, runs in WORLDS.items():
                run_ranks(_fit, size, folder, store, {"name": backend, **PORTABLE}, dict(runs), timeout=300)
            done.add(backend)
        return folder / backend

    return of


def lines_of(output: Path) -> list[dict[str, Any]]:
    names = ("event", "step", "loss", "grad_norm", "skipped_updates")
    return [{name: line[name] for name in names if name in line} for line in cli.lines_of(output) if "loss" in line]


def last_checkpoint(output: Path) -> Path:
    return output / "checkpoints" / f"step_{STEPS}"


@pytest.mark.parametrize("name", RUNS)
def test_equals_the_cpu(name: str, fitted: Fitted) -> None:
    ours, host = (fitted(backend) / name for backend in ("neuron", "cpu"))
    assert lines_of(ours) == lines_of(host)
    assert {line["step"] for line in lines_of(ours)} >= set(range(STEPS // 2 + 1, STEPS + 1))
    same_bits(last_checkpoint(ours), last_checkpoint(host), random_state=False)


def test_resume_is_bitwise(fitted: Fitted) -> None:
    """Random state of the device included, which no other device has."""
    runs = fitted("neuron")
    same_bits(last_checkpoint(runs / "resumed"), last_checkpoint(runs / "ZeRO 3"))


def test_the_vendors_attention_learns_the_same(folder: Path, store: Path, fitted: Fitted) -> None:
    """Both paths of the double's, which is written from the formula and in float64."""
    long: Sections = {"train": {"seq_len": 512, "global_batch_size": 2}, "data": {"document_mask": False}}
    runs = {"short": {}, "long": long}
    vendor: dict[str, Any] = {"name": "neuron"}
    (paths,) = run_ranks(_fit, 1, folder, store, vendor, runs, timeout=200)
    assert paths == ["decomposed", "nki"]
    run_ranks(_fit, 1, folder, store, {"name": "cpu", **PORTABLE}, runs, timeout=200)
    chosen = {}
    for name in runs:
        ours, host = folder / "neuron vendor" / name, folder / "cpu" / name
        found = [line["loss"] for line in lines_of(ours)]
        assert found == pytest.approx([line["loss"] for line in lines_of(host)], rel=1e-5)
        plan = json.loads((ours / "plan.json").read_text(encoding="utf-8"))
        chosen[name] = next(row["implementation"] for row in plan["ops"] if row["op"] == "attention")
    assert chosen == {"short": "sdpa", "long": "nki_flash"}


assert "torch_neuronx" not in sys.modules  # only the ranks import it
