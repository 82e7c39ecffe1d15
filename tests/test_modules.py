"""Modules, data and losses of a user's own: what a decoder on ``ops`` never meets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelbridge import Trainer
from accelbridge.checkpoint.manifest import complete
from accelbridge.errors import CheckpointError, ConfigError, DataError
from accelbridge.train.config import OptimizerConfig
from accelbridge.train.optim import build_optimizer, learning_rate, materialise_state
from tests import cli
from tests.ranks import Rank, run_ranks


@pytest.fixture(autouse=True)
def one_process_is_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "ACCELBRIDGE_BACKEND"):
        monkeypatch.delenv(name, raising=False)


class Tokens:
    """``count`` samples of 8 tokens below 16, each followed by the next number."""

    def __init__(self, count: int = 24) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = (torch.arange(9) + index) % 16
        return {"tokens": numbers[:-1], "targets": numbers[1:]}


class Points:
    """Regression samples of 4 floats; ``key`` names the answer."""

    def __init__(self, count: int, key: str = "targets") -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 4, generator=generator)
        self.key = key

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], self.key: self.x[index].sum(0, keepdim=True)}


class SquaredError:
    """A loss that knows nothing of ignored targets."""

    def __init__(self, key: str = "targets") -> None:
        self.key = key

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return ((model(batch["x"]) - batch[self.key]) ** 2).sum()

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.tensor(batch[self.key].numel())


class Net(nn.Module):
    """Embedding, some layers, head; everything else is for a test to change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(16, 12)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.head = nn.Linear(12, 16)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


class Wrapped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()  # no units: everything is the root's

    def forward(self, tokens: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(tokens))


def recipe(output: Path, steps: int = 8, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "train": {"steps": steps, "global_batch_size": 12},
        "optimizer": {"lr": 1e-2},
        "metrics": {"interval": 1},
        "output": {"dir": str(output)},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return base


def losses(output: Path) -> list[float]:
    return [line["loss"] for _, line in sorted(cli.steps_of(output).items())]


# ------------------------------------------------------------------------------------------------------- modules


def as_rank(ctx: Rank, folder: Path, kinds: list[str]) -> None:
    os.environ |= {"RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.size), "LOCAL_RANK": str(ctx.rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ctx.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ctx.port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for kind in kinds:
        name, _, zero = kind.partition(" ")
        os.environ["TORCHELASTIC_RUN_ID"] = kind.replace(" ", "-")
        model = {"object": Wrapped, "tied": tied_across_units}[name]()
        Trainer(recipe(folder / kind, parallel={"zero": int(zero)}), model=model, data=Tokens()).fit()


def tied_across_units() -> nn.Module:
    model = Net()
    model.layers[2].weight = model.layers[0].weight
    return model


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_ranks(as_rank, 2, folder, [f"{name} {zero}" for name in ("object", "tied") for zero in (1, 2, 3)], timeout=120)
    return folder


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("name", "make"), [("object", Wrapped), ("tied", tied_across_units)])
def test_sharding_changes_nothing(name: str, make: Any, zero: int, on_two_ranks: Path, tmp_path: Path) -> None:
    Trainer(recipe(tmp_path), model=make(), data=Tokens()).fit()
    alone = losses(tmp_path)
    assert alone[-1] < alone[0] - 0.3
    assert losses(on_two_ranks / f"{name} {zero}") == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("meta", [False, True])
def test_a_tie_across_units_stays_one(meta: bool, tmp_path: Path) -> None:
    with torch.device("meta" if meta else "cpu"):
        model = tied_across_units()
    with Trainer(recipe(tmp_path), model=model, data=Tokens()) as trainer:
        trainer.setup()
        for step in range(2):
            trainer.train_step(trainer.loader.step(step))
        assert model.get_parameter("layers.2.weight") is model.get_parameter("layers.0.weight")
        assert len(list(model.parameters())) == 8


def test_a_buffer_keeps_its_values_where_parameters_are_filled(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = tied_across_units()
    model.register_buffer("table", torch.arange(4096.0) + 1)
    with Trainer(recipe(tmp_path), model=model, data=Tokens()) as trainer:
        trainer.setup()
        assert torch.equal(model.get_buffer("table"), torch.arange(4096.0) + 1)


def test_an_output_that_hides_its_tensors_is_refused(tmp_path: Path) -> None:
    class Hidden(Net):
        def forward(self, tokens: Tensor) -> Any:
            return SimpleNamespace(scores=super().forward(tokens))

    class Scores(SquaredError):
        def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
            return model(batch["tokens"]).scores.sum()

    with pytest.raises(ConfigError, match="returned a SimpleNamespace in which no tensor can be found"):
        Trainer(recipe(tmp_path), model=Hidden(), data=Tokens(), loss=Scores()).fit()


def test_a_parameter_without_gradient_can_be_resumed(tmp_path: Path) -> None:
    def model() -> nn.Module:
        net = Net()
        net.unused = nn.Linear(3, 3)
        return net

    Trainer(recipe(tmp_path, checkpoint={"interval": 4}), model=model(), data=Tokens()).fit()
    before = losses(tmp_path)
    for late in complete(tmp_path / "checkpoints")[1:]:
        for file in late.iterdir():
            file.unlink()
        late.rmdir()
    Trainer(recipe(tmp_path, checkpoint={"interval": 4}), model=model(), data=Tokens(), resume="auto").fit()
    assert losses(tmp_path) == before


def test_dropout_goes_on_where_it_was(tmp_path: Path) -> None:
    def model() -> nn.Module:
        net = Net()
        net.layers[1] = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5))
        return net

    straight, halved = tmp_path / "straight", tmp_path / "halved"
    Trainer(recipe(straight, checkpoint={"interval": 4}), model=model(), data=Tokens()).fit()
    middle = straight / "checkpoints" / "step_4"
    moved = halved / "checkpoints" / "step_4"
    moved.parent.mkdir(parents=True)
    middle.rename(moved)
    Trainer(recipe(halved), model=model(), data=Tokens(), resume="auto").fit()
    assert losses(halved) == losses(straight)[4:]


def test_evaluation_leaves_frozen_modules_in_eval_mode(tmp_path: Path) -> None:
    model = Net()
    model.layers[0].eval()
    with Trainer(recipe(tmp_path), model=model, data=Tokens(), validation=Tokens(5)) as trainer:
        trainer.evaluate()
        assert model.training
        assert not model.layers[0].training


def test_float_inputs_meet_bfloat16_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    low = recipe(tmp_path, precision={"compute": "bf16"})
    Trainer(low, model=model, data=Points(24), loss=SquaredError()).fit()
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def empty() -> nn.Module:
    net = Net()
    net.nothing = nn.Parameter(torch.empty(0, 4))
    return net


def scalar() -> nn.Module:
    net = Net()
    net.scale = nn.Parameter(torch.tensor(1.0))
    return net


class Stateful(Net):
    def get_extra_state(self) -> Any:
        return {"a": 1}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (frozen, "without a trainable parameter"),
        (empty, "parameter nothing, which has no elements"),
        (scalar, "parameter scale, which has no dimension"),
        (Stateful, r"root \(Stateful\) has get_extra_state"),
    ],
)
def test_models_that_cannot_train_are_refused(make: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected):
        Trainer(recipe(tmp_path), model=make(), data=Tokens()).fit()


def test_a_function_is_not_a_loss(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loss asked as a function; it needs"):
        Trainer(recipe(tmp_path / "x"), model=Net(), data=Tokens(), loss=lambda model, batch: 0)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def twice(ctx: Rank, folder: Path, port: int) -> None:
    os.environ |= {"RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.size), "LOCAL_RANK": str(ctx.rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ctx.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name in ("first", "second"):
        Trainer(recipe(folder / name), model=Net(), data=Tokens()).fit()


def test_the_same_ranks_may_train_twice_without_a_launcher(tmp_path: Path) -> None:
    run_ranks(twice, 2, tmp_path, cli.free_port())
    assert losses(tmp_path / "first") == losses(tmp_path / "second")


# ------------------------------------------------------------------------------------------- evaluation and resume


@pytest.mark.parametrize("key", ["targets", "y"])
def test_padding_does_not_count_in_any_loss(key: str, tmp_path: Path) -> None:
    model, points = nn.Linear(4, 1), Points(13, key)
    true = SquaredError(key)(model, {"x": points.x, key: points.x.sum(1, keepdim=True)}).item() / 13
    with Trainer(
        recipe(tmp_path), model=model, data=Points(24, key), validation=points, loss=SquaredError(key)
    ) as trainer:
        assert trainer.evaluate() == pytest.approx(true, rel=1e-5)


def test_next_token_loss_over_a_ragged_tail(tmp_path: Path) -> None:
    model, tokens = Net(), Tokens(17)
    rows = [tokens[i] for i in range(17)]
    logits = model(torch.stack([row["tokens"] for row in rows]))
    true = nn.functional.cross_entropy(logits.flatten(0, 1), torch.cat([row["targets"] for row in rows])).item()
    with Trainer(recipe(tmp_path), model=model, data=Tokens(), validation=tokens) as trainer:
        assert trainer.evaluate() == pytest.approx(true, rel=1e-5)


def test_a_failing_evaluation_loses_no_training(tmp_path: Path) -> None:
    class Untargeted(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return super().__getitem__(index) | {"targets": torch.full((8,), -100)}

    with pytest.raises(DataError, match="validation data has no targets"):
        Trainer(recipe(tmp_path), model=Net(), data=Tokens(), validation=Untargeted()).fit()
    assert [p.name for p in complete(tmp_path / "checkpoints")] == ["step_8"]


def test_validation_data_is_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the validation data .* has no samples"):
        Trainer(recipe(tmp_path / "x"), model=Net(), data=Tokens(), validation=Tokens(0))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"train": {"seed": 9}}, "train.seed was 0, is 9"),
        ({"train": {"global_batch_size": 6}}, "train.global_batch_size was 12, is 6"),
        ({"data": {"shuffle": False}}, "data.shuffle was True, is False"),
        ({}, "the training data was 24 samples of .*, is 20 samples of"),
    ],
)
def test_a_resume_that_would_see_other_samples_is_refused(changed: Any, named: str, tmp_path: Path) -> None:
    Trainer(recipe(tmp_path), model=Net(), data=Tokens()).fit()
    data = Tokens() if changed else Tokens(20)
    longer = recipe(tmp_path, **changed)
    longer["train"]["steps"] = 12
    with pytest.raises(CheckpointError, match=named):
        Trainer(longer, model=Net(), data=data, resume="auto")
    longer["checkpoint"] = {"allow_other_data": True}
    assert Trainer(longer, model=Net(), data=data, resume="auto").fit().step == 12


# ------------------------------------------------------------------------------------------------------ optimizer


def test_vectors_are_not_decayed() -> None:
    model = Net()
    model.embed.requires_grad_(False)
    matrices, vectors = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in matrices["params"]} == {2}
    assert {p.ndim for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == 8


def test_materialised_state_is_that_of_a_first_update() -> None:
    models = [Net(), Net()]
    optimizers = [build_optimizer(m, OptimizerConfig(lr=0.1, weight_decay=0.2)) for m in models]
    before = [p.clone() for p in models[0].parameters()]
    materialise_state(optimizers[0])
    assert all(torch.equal(a, b) for a, b in zip(before, models[0].parameters(), strict=True))
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(3):
            model(torch.arange(8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_learning_rate_at_the_edges() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 20) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[-1] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(OptimizerConfig(lr=1.0, schedule="constant"), 7, 20) == 1.0
