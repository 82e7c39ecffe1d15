"""Activations, parameters and moments of the simulated device on the host, whose memory is not the device's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from accelbridge import Trainer
from tests import cli
from tests.parity.rows import SIM_ROWS, Row
from tests.ranks import Rank, run_ranks
from tests.sim import build
from tests.sim.backend import environment, site
from tests.test_host_memory import ON_HOST, recipe_of

ROW = next(row for row in SIM_ROWS if row.name == "simulated, shard 2")


def fit_all(
    ctx: Rank, row: Row, folder: Path, store: Path, compute: str, forms: list[str]
) -> dict[str, tuple[set[str], int]]:
    ctx.launched()
    sys.path.insert(0, str(folder / "site"))
    os.environ |= environment(folder)
    found: dict[str, tuple[set[str], int]] = {}
    for name in ("device", *forms):
        os.environ["TORCHELASTIC_RUN_ID"] = name
        recipe = recipe_of(row, folder / name, store, ON_HOST.get(name, {}), 3)
        trainer = Trainer({**recipe, "precision": {"compute": compute}})
        trainer.fit()
        waited = trainer.host_pool.high_water if trainer.host_pool is not None else 0
        found[name] = {p.device.type for p in trainer.model.parameters()}, waited
    return found


@pytest.mark.parametrize(
    ("compute", "forms"), [("float32", list(ON_HOST)), ("float16", ["everything"]), ("bfloat16", ["everything"])]
)
def test_losses_keep_their_bits(tmp_path: Path, store: Path, compute: str, forms: list[str]) -> None:
    build.library()
    site(tmp_path / "site")
    for found in run_ranks(fit_all, 2, ROW, tmp_path, store, compute, forms, timeout=400):
        for name, (homes, waited) in found.items():
            on_host = ON_HOST.get(name, {})
            assert (homes == {"cpu"}) == ("parameters" in on_host), name
            assert bool(waited) == ("activations" in on_host), name
    want = cli.steps_of(tmp_path / "device")
    for name in forms:
        for step, line in cli.steps_of(tmp_path / name).items():
            assert (line["loss"], line["grad_norm"]) == (want[step]["loss"], want[step]["grad_norm"]), (name, step)
