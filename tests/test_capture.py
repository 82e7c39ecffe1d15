"""``train.capture``: bit for bit what a run without it gives, on a device whose graphs replay a tape (tests/taped.py);
and refused, before anything starts, where a graph would not give that. No graph of a GPU was recorded for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelbridge import Trainer
from accelbridge.backend import World
from accelbridge.errors import AccelbridgeError, ConfigError
from accelbridge.portable.capture import CapturedPasses
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import choose_target, prepare
from tests import cli
from tests.ranks import Rank, run_ranks
from tests.scenes import Sections, same_bits
from tests.taped import TapedDevice, TapeGraph, taped_cpu

STEPS = 5
RUNS: dict[str, tuple[int, Sections]] = {
    "one microbatch": (8, {}),
    "two": (4, {}),
    "four": (2, {}),
    "dropout": (4, {"model": {"dropout": 0.1}}),
    "bfloat16": (4, {"precision": {"compute": "bfloat16", "params": "bfloat16", "reduce": "bfloat16"}}),
    "tied": (4, {"model": {"tie_embeddings": True}}),
    "frozen": (4, {"optimizer": {"groups": [{"pattern": "*norm.weight", "frozen": True}]}}),
    "deterministic": (4, {"train": {"deterministic": True}}),
    "evaluated": (4, {"train": {"eval_interval": 2}}),
}
"""Rows of a microbatch, of 8 of a step, and what else is special."""
SAMPLE = ("one microbatch", "four", "dropout")
"""Of every run of all tests; the others are in a full one."""


def recipe(output: Path, store: Path, capture: bool, microbatch: int, sections: Sections) -> dict[str, Any]:
    os.environ["TORCHELASTIC_RUN_ID"] = output.name
    made = cli.recipe(output, store, metrics={"interval": 1}, backend={"name": "cpu"})
    made["data"]["validation"] = str(store / "validation")
    for section, values in sections.items():
        made.setdefault(section, {}).update(values)
    made["train"] |= {"steps": STEPS, "microbatch_size": microbatch, "capture": capture}
    return made


def _fit(ctx: Rank, folder: Path, store: Path, names: list[str]) -> dict[str, tuple[int, int]]:
    """Train these runs without and with capture; calls of the model with gradients in the latter, and replays."""
    ctx.launched()
    with taped_cpu():
        return {run: _fit_both(folder, store, run) for run in names}


def _fit_both(folder: Path, store: Path, run: str) -> tuple[int, int]:
    microbatch, sections = RUNS[run]
    Trainer(recipe(folder / run, store, False, microbatch, sections)).fit()
    trainer = Trainer(recipe(folder / f"{run}, captured", store, True, microbatch, sections))
    trainer.setup()
    calls: list[None] = []
    trainer.model.register_forward_pre_hook(lambda *_: calls.extend([None] * torch.is_grad_enabled()))
    before = TapeGraph.replays
    trainer.fit()
    return len(calls), TapeGraph.replays - before


@pytest.fixture(scope="module")
def fitted(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, store: Path
) -> tuple[Path, dict[str, tuple[int, int]]]:
    """The folder with the runs that are asked for, and what each counted."""
    folder = tmp_path_factory.mktemp("captured")
    asked = [item for item in request.session.items if isinstance(item, pytest.Function) and _fit_is_for(item)]
    names = [item.callspec.params["run"] for item in asked]
    return folder, run_ranks(_fit, 1, folder, store, names, timeout=600)[0]


def _fit_is_for(item: pytest.Function) -> bool:
    return item.originalname == test_a_captured_run_is_bitwise_the_other.__name__ and item.path == Path(__file__)


def said(output: Path) -> list[list[Any]]:
    """The numbers of a run's lines, without what it says of memory, of which a tape takes a lot."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "event")
    return [[line.get(key) for key in keys] for line in cli.lines_of(output) if line.get("event") != "memory"]


@pytest.mark.parametrize("run", [pytest.param(run, marks=[] if run in SAMPLE else [pytest.mark.full]) for run in RUNS])
def test_a_captured_run_is_bitwise_the_other(run: str, fitted: tuple[Path, dict[str, tuple[int, int]]]) -> None:
    folder, found = fitted
    microbatches = STEPS * (8 // RUNS[run][0])
    assert found[run] == (2, microbatches - 1)  # as always, while recording, and never again
    plain, captured = folder / run, folder / f"{run}, captured"
    assert said(plain) == said(captured)
    last = Path("checkpoints", f"step_{STEPS}")
    same_bits(plain / last, captured / last)


class Poisoned(nn.Module):
    """Not a number in the step where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x / x.amax(-1, keepdim=True))


class Squares:
    """A loss of one's own."""

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(batch["x"]).square().sum()

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.full((), len(batch["x"]), dtype=torch.float32)


def rows(zero: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.zeros(4) if n == zero else torch.arange(1.0, 5.0) + n} for n in range(40)]


def _poisoned(ctx: Rank, folder: Path, store: Path) -> str:
    ctx.launched()
    config = recipe(folder / "poisoned", store, True, 4, {"guards": {"nonfinite": "stop"}})
    del config["model"], config["data"]["train"], config["data"]["validation"]
    config["data"]["shuffle"] = False
    try:
        with taped_cpu():
            Trainer(config, model=Poisoned(), data=rows(27), loss=Squares()).fit()
    except AccelbridgeError as error:
        return str(error)
    return ""


def test_a_captured_step_is_run_again_to_find_what_is_not_finite(tmp_path: Path, store: Path) -> None:
    (said,) = run_ranks(_poisoned, 1, tmp_path, store, timeout=120)
    assert said.startswith("step 4: ")
    assert "the output of the model in microbatch 1 is not finite" in said or "the output of head" in said
    assert "the parameters are those after step 3" in said


# ------------------------------------------------------------------------------------------ what a graph must not hold


def captured(passes: Callable[[Mapping[str, Tensor]], Tensor], *parameters: nn.Parameter) -> CapturedPasses:
    return CapturedPasses(TapedDevice(), parameters, passes)


def weight(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def test_gradients_add_up_in_buffers_that_the_optimizer_may_let_go_of() -> None:
    w, unused = weight(2.0, 3.0), weight(1.0)

    def passes(inputs: Mapping[str, Tensor]) -> Tensor:
        loss = (w * inputs["x"]).sum()
        loss.backward()
        return loss.detach()

    call = captured(passes, w, unused)
    for step in range(3):
        for microbatch in range(2):
            assert call({"x": torch.tensor([1.0, 10.0 + step])}).item() == 2 + 3 * (10 + step)
            assert w.grad is not None
            assert w.grad.tolist() == [microbatch + 1.0, (microbatch + 1) * (10.0 + step)]
        assert unused.grad is None
        w.grad = None


def test_numbers_of_the_host_are_those_of_the_recording() -> None:
    """What the double is for: a step that is baked in shows."""
    w, step = weight(1.0), 0

    def passes(inputs: Mapping[str, Tensor]) -> Tensor:
        loss = (w * inputs["x"] * step).sum()
        loss.backward()
        return loss.detach()

    call, seen = captured(passes, w), []
    for step in range(1, 5):  # noqa: B007 (passes() reads it)
        seen.append(call({"x": torch.ones(1)}).item())
        w.grad = None
    assert seen == [1, 2, 2, 2]


def draws(w: nn.Parameter, x: Tensor) -> Tensor:
    return nn.functional.dropout(w * x, 0.5)


def reads(w: nn.Parameter, x: Tensor) -> Tensor:
    return w * x.sum().item()


def picks(w: nn.Parameter, x: Tensor) -> Tensor:
    return (w * x)[x > 0]


def brings(w: nn.Parameter, x: Tensor) -> Tensor:
    return w * x * torch.tensor([2.0, 3.0])


FORBIDDEN = [
    (draws, "draws from the device's generator"),
    (reads, "cannot be recorded: aten::_local_scalar_dense"),
    (picks, "cannot be recorded: aten::index"),
    (brings, "cannot be recorded: aten::lift_fresh"),
]


@pytest.mark.parametrize(("forward", "part"), FORBIDDEN, ids=[forward.__name__ for forward, _ in FORBIDDEN])
def test_what_a_graph_cannot_hold_is_refused(forward: Callable[[nn.Parameter, Tensor], Tensor], part: str) -> None:
    w = weight(1.0, 2.0)

    def passes(inputs: Mapping[str, Tensor]) -> Tensor:
        loss = forward(w, inputs["x"]).sum()
        loss.backward()
        return loss.detach()

    call = captured(passes, w)

    def twice() -> None:
        for _ in range(2):
            call({"x": torch.ones(2)})

    with pytest.raises(ConfigError, match=part) as refused:
        twice()
    assert "set train.capture: false" in str(refused.value)


def test_other_shapes_and_other_parameters_are_refused() -> None:
    w, v, used = weight(1.0), weight(1.0), [0]

    def passes(inputs: Mapping[str, Tensor]) -> Tensor:
        loss = ((w, v)[used[0]] * inputs["x"]).sum()
        loss.backward()
        return loss.detach()

    call = captured(passes, w, v)
    call({"x": torch.ones(2)})
    for inputs in ({"x": torch.ones(3)}, {"x": torch.ones(2, dtype=torch.bfloat16)}, {"y": torch.ones(2)}):
        with pytest.raises(ConfigError, match=r"a microbatch is .*, and the first one was x \[2\] float32"):
            call(inputs)
    used[0] = 1
    with pytest.raises(ConfigError, match="give gradients to different parameters"):
        call({"x": torch.ones(2)})


# ----------------------------------------------------------------------------------------------- refused by the recipe

ASSUMED = """
model: {vocab_size: 1024, dim: 256, layers: 2, heads: 2}
train: {seq_len: 256, global_batch_size: 8, steps: 1, capture: true}
precision: {compute: bfloat16, params: bfloat16, reduce: bfloat16}
output: {dir: unused}
"""
REFUSED = [
    ("h100", 2, (), "has 2 devices: sharded parameters are gathered into memory that is freed after use"),
    ("h100", 1, ("precision.params=float32",), "compute bfloat16, params float32 and reduce bfloat16"),
    ("h100", 1, ("precision.compute=fp8",), "fp8 decides on the host"),
    ("h100", 1, ("memory.recompute=full",), "recomputation reads the generators' states"),
    ("h100", 1, ("train.compile=true",), "compiled code checks on the host"),
    ("mi300x", 1, (), r"HIP before ROCm 7\.14 does not report .*here is (6|7)\.\d"),
    ("x86_64", 1, (), "the backend states no graphs"),
]


def plan_notes(folder: Path, chip: str, devices: int, asked: tuple[str, ...], **software: str) -> str:
    from accelbridge.assume import Assumption

    path = folder / "recipe.yaml"
    path.write_text(ASSUMED, encoding="utf-8")
    config = TrainConfig.load(path, asked)
    target = choose_target(config, assumed=Assumption(chip, devices, software))
    return " ".join(prepare(config, World(size=devices), target=target, writes=False).plan.notes)


@pytest.mark.parametrize(("chip", "devices", "asked", "part"), REFUSED)
def test_a_recipe_that_no_graph_can_serve_is_refused(
    tmp_path: Path, chip: str, devices: int, asked: tuple[str, ...], part: str
) -> None:
    with pytest.raises(AccelbridgeError, match=f"train.capture asked; .*{part}") as refused:
        plan_notes(tmp_path, chip, devices, asked)
    assert "train.capture: false" in str(refused.value)


@pytest.mark.parametrize(("chip", "software"), [("h100", {}), ("b200", {}), ("mi300x", {"rocm": "7.14"})])
def test_the_plan_of_one_device_says_that_it_captures(tmp_path: Path, chip: str, software: dict[str, str]) -> None:
    assert "the passes of a microbatch are one graph" in plan_notes(tmp_path, chip, 1, (), **software)
    assert "one graph" not in plan_notes(tmp_path, chip, 1, ("train.capture=false",), **software)


def test_a_module_that_draws_is_refused(tmp_path: Path) -> None:
    from accelbridge.assume import Assumption
    from accelbridge.train.run_plan import Provided

    path = tmp_path / "recipe.yaml"
    path.write_text(ASSUMED.replace("model:", "#"), encoding="utf-8")
    config = TrainConfig.load(path)
    target = choose_target(config, assumed=Assumption("h100", 1, {}))
    provided = Provided(model=True, loss=True, random=["Dropout"])
    with pytest.raises(ConfigError, match="Dropout draws from the device's generator"):
        prepare(config, World(), target=target, writes=False, provided=provided)
