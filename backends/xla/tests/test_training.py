"""Training on virtual devices: the numbers of the CPU backend, one graph, and checkpoints that move both ways.

The vendor's runtime on no chip: what is shown here is the realisation of layouts and the numbers, not any TPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelbridge.models.decoder import Decoder
from accelbridge.train.trainer import Trainer
from backends.xla.tests import environment, worker

HERE = Path(__file__).parent
STEPS = 20


HALF = worker.HALF
pytestmark = environment.needs_torch_xla


def recipe(folder: Path, store: Path, name: str, **parallel: int) -> Path:
    """Two microbatches a step, groups of parameters, and a rate that is 0 at the last step."""
    sections: dict[str, Any] = {
        "model": {"vocab_size": 288, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64},
        "data": {"train": str(store / "train")},
        "train": {
            "steps": STEPS,
            "seq_len": 32,
            "global_batch_size": 8,
            "microbatch_size": 4 // parallel.get("data", 1),
        },
        "parallel": {key: value for key, value in parallel.items() if key != "data"},
        "optimizer": {
            "lr": 3e-3,
            "warmup_steps": 2,
            "min_lr_ratio": 0.0,
            "weight_decay": 0.1,
            "groups": [{"pattern": "embed.*", "lr_scale": 0.5}, {"pattern": "layers.1.ffn_norm.*", "frozen": True}],
        },
        "checkpoint": {"interval": HALF, "keep": 3},
        "metrics": {"interval": 4},
        "output": {"dir": str(folder / f"run-{name}")},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(sections))
    return path


def lines(folder: Path, name: str) -> dict[int, dict[str, float]]:
    text = (folder / f"run-{name}" / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, text) if "event" not in line}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of this file: the CPU's whole, on one rank and on two, ours whole, and the second halves from a
    checkpoint of the CPU's two ranks and from ours, there and back."""
    folder = tmp_path_factory.mktemp("xla")
    env = environment.environment(folder / "site")
    store = folder / "store"
    package = environment.ROOT / "accelbridge"
    build = ("data", "build", package, store, "--suffix", ".py", "--validation-fraction", "0.1")
    environment.python("-m", "accelbridge", *build, env=env)
    Trainer(recipe(folder, store, "cpu"), backend="cpu").fit()
    two_ranks(recipe(folder, store, "two_ranks", data=2), env)
    for name in ("whole", "own", "from_cpu", "guarded"):
        recipe(folder, store, name, tp=2, data=2)
    environment.python(HERE / "worker.py", "train", folder, env=env)
    back = recipe(folder, store, "cpu_from_xla", data=2)
    worker.copy_half(folder, "whole", "cpu_from_xla")
    two_ranks(back, env, "--resume", "auto")
    return folder


def two_ranks(recipe: Path, env: dict[str, str], *options: str) -> None:
    """A run of the CPU backend: parameters, gradients and moments are cut in two."""
    environment.python("-m", "accelbridge", "train", recipe, "--backend", "cpu", "--nproc", "2", *options, env=env)


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "found.json").read_text())


def test_losses_and_norms_are_those_of_one_cpu_process(folder: Path) -> None:
    ours, theirs = lines(folder, "whole"), lines(folder, "cpu")
    assert list(ours) == list(theirs) == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert [ours[s][key] for s in ours] == pytest.approx([theirs[s][key] for s in theirs], rel=1e-4)
    assert ours[STEPS]["loss"] < 0.9 * ours[1]["loss"]
    assert ours[STEPS]["lr"] == 0.0


def test_a_step_is_one_graph(found: dict[str, Any]) -> None:
    compiled = [counts["compiled"] for counts in found["counters"]]
    assert len(compiled) == STEPS
    assert compiled[1] - compiled[0] == 0  # the first step's graph serves the second
    assert compiled[HALF - 1] == compiled[1]  # reading metrics compiles nothing
    assert compiled[-1] == compiled[HALF]  # nor does a rate of 0


def test_an_update_that_is_not_finite_is_masked_in_the_graph(found: dict[str, Any]) -> None:
    guarded = found["guarded"]
    assert guarded["error"].startswith("step 3: the loss is nan, arising on rank 0 (run again, rank 0: the loss itself")
    assert guarded["step"] == 2
    assert guarded["unchanged"]


def test_nothing_of_a_step_falls_back_to_the_host(found: dict[str, Any]) -> None:
    names = {name for counts in found["counters"] for name in counts} - {"compiled"}
    assert names <= {"aten::_local_scalar_dense"}, "reading metrics is the only fallback"


def test_parameters_and_moments_stay_sharded(found: dict[str, Any]) -> None:
    places = found["places"]
    assert len(places) == 20  # all but the frozen one
    for name, (parameter, moment) in places.items():
        assert parameter == moment, name
        assert parameter != "{replicated}", name
    assert places["layers.0.attention.q.weight"][0] == "{devices=[2,2]0,2,1,3}"  # tp, dp_shard
    assert places["layers.0.attention.o.weight"][0] == "{devices=[2,2]0,1,2,3}"  # dp_shard, tp
    assert places["norm.weight"][0] == "{devices=[2,2]0,1,2,3 last_tile_dim_replicate}"


def test_resuming_continues_bit_for_bit(folder: Path, found: dict[str, Any]) -> None:
    assert found["whole_start"] == 0
    assert found["own_start"] == found["from_cpu_start"] == HALF
    whole, own = lines(folder, "whole"), lines(folder, "own")
    assert list(own) == list(range(HALF + 1, STEPS + 1))
    assert [own[s]["loss"] for s in own] == [whole[s]["loss"] for s in own]


@pytest.mark.parametrize("name", ["from_cpu", "cpu_from_xla"])
def test_checkpoints_move_between_the_execution_models(folder: Path, name: str) -> None:
    """From two ranks of the CPU to 2 x 2 devices, and back, against a run that was never interrupted."""
    cpu, moved = lines(folder, "cpu"), lines(folder, name)
    assert list(moved) == list(range(HALF + 1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert [moved[s][key] for s in moved] == pytest.approx([cpu[s][key] for s in moved], rel=1e-4)


# -------------------------------------------------------------------------------------------------- layouts


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("layouts")
    environment.python(HERE / "worker.py", "layouts", folder, env=environment.environment(folder / "site"))
    return folder, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", list(worker.LAYOUTS))
def test_gradients_are_those_of_plain_torch(layouts: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, found = layouts
    model = Decoder(worker.config(worker.LAYOUTS[name][1]))
    model.reset_parameters(0)
    dropped = worker.masks(model)
    loss = worker.gradients(model, worker.batch(model.config.vocab_size))
    assert found[name]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.double().square().sum() for g in wanted.values()]).sum().sqrt()
    assert found[name]["norm"] == pytest.approx(norm.item(), rel=1e-5)
    given = torch.load(folder / f"{name}.pt", weights_only=True)
    assert given["masks"].keys() == dropped.keys()
    assert len(dropped) == (3 if model.config.dropout else 0)
    for module, mask in dropped.items():
        assert torch.equal(given["masks"][module], mask), module
        assert 0.05 < mask.float().mean() < 0.15, "one in ten is dropped, if this draws anything"
    assert given["gradients"].keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        error = (given["gradients"][parameter] - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-6, parameter
