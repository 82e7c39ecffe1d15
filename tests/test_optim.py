"""Schedules, parameter groups and the optimizer on shards."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from accelbridge import Trainer
from accelbridge.backend import World
from accelbridge.errors import ConfigError
from accelbridge.models.config import ModelConfig
from accelbridge.models.decoder import Decoder
from accelbridge.models.shapes import decoder_shapes
from accelbridge.portable.sharded_adamw import ShardedAdamW
from accelbridge.train.config import OptimizerConfig, TrainConfig
from accelbridge.train.groups import group_notes, rules
from accelbridge.train.optim import build_optimizer, freeze, learning_rate, set_learning_rate
from accelbridge.train.prepare import prepare
from tests import cli
from tests.ranks import Rank, run_ranks

# ------------------------------------------------------------------------------------------------------ schedules


def rates(steps: int, **settings: Any) -> list[float]:
    config = OptimizerConfig(lr=1.0, **settings)
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_wsd_warms_up_stays_and_decays() -> None:
    linear = rates(12, schedule="wsd", warmup_steps=4, decay_steps=4, decay_shape="linear", min_lr_ratio=0.0)
    assert linear == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    root = rates(12, schedule="wsd", warmup_steps=4, decay_steps=4, min_lr_ratio=0.0)
    assert root[:8] == linear[:8]
    assert root[8:] == pytest.approx([0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0])


def test_wsd_ends_at_the_lowest_rate_and_may_be_all_decay() -> None:
    floor = rates(10, schedule="wsd", decay_steps=10, decay_shape="linear", min_lr_ratio=0.2)
    assert floor[-1] == pytest.approx(0.2)
    assert floor == sorted(floor, reverse=True)
    assert floor[0] == pytest.approx(1 - 0.8 * 0.1)


def test_the_stable_phase_does_not_depend_on_the_end() -> None:
    settings = {"schedule": "wsd", "warmup_steps": 3, "decay_steps": 5}
    assert rates(20, **settings)[:15] == rates(40, **settings)[:15]


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_warm_up_reaches_the_peak(schedule: str) -> None:
    found = rates(12, schedule=schedule, warmup_steps=4, min_lr_ratio=0.1)
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert found[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("  lr: 0\n", 2, ["optimizer.lr asked as 0", "a number above 0", "set one that fits", "default 0.0003"]),
        ("  lr: -0.1\n", 2, ["optimizer.lr asked as -0.1", "a number above 0", "set one that fits"]),
        ("  schedule: wsd\n", 2, ["schedule wsd asked", "decay_steps is missing", "set decay_steps"]),
        ("  decay_steps: 5\n", 2, ["decay_steps 5 asked", "schedule is cosine", "set schedule: wsd"]),
        ("  schedule: constant\n  decay_shape: sqrt\n", 3, ["decay_shape sqrt asked", "schedule is constant"]),
        (
            "  schedule: wsd\n  warmup_steps: 600\n  decay_steps: 500\n",
            3,
            ["optimizer.warmup_steps 600", "optimizer.decay_steps 500", "train.steps is 1000"],
        ),
        ("  groups:\n  - pattern: a\n", 3, ["optimizer.groups.0", "without an effect", "set lr_scale"]),
        ("  groups:\n  - pattern: a\n    frozen: true\n    lr_scale: 2\n", 5, ["frozen and lr_scale", "remove one"]),
        ("  groups:\n  - pattern: a\n    lr_scale: 0\n", 4, ["optimizer.groups.0.lr_scale", "above 0"]),
        ("  groups:\n  - pattern: a\n    frozzen: true\n", 4, ['unknown key "frozzen"', 'did you mean "frozen"?']),
    ],
)
def test_settings_that_cannot_be(text: str, line: int, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"optimizer:\n{text}")
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(path)
    assert f"{path}:{line}: " in str(caught.value)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_rate_is_made_once_per_distinct_scale() -> None:
    config = OptimizerConfig(
        groups=[{"pattern": "0.*", "lr_scale": 0.5}, {"pattern": "1.*", "weight_decay": 0.3}]  # type: ignore[list-item]
    )
    optimizer = build_optimizer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), config)
    asked: list[float] = []

    def scalar(value: float) -> Tensor:
        asked.append(value)
        return torch.tensor(value)

    set_learning_rate(optimizer, 0.4, scalar)
    assert sorted(asked) == [0.2, 0.4]
    assert len(optimizer.param_groups) == 5
    assert all(float(g["lr"]) == pytest.approx(0.4 * g["lr_scale"]) for g in optimizer.param_groups)
    assert len({id(g["lr"]) for g in optimizer.param_groups}) == 2
    set_learning_rate(optimizer, 0.0, scalar)
    assert len({id(g["lr"]) for g in optimizer.param_groups}) == 2, "a rate of 0 shares no more than another"


# --------------------------------------------------------------------------------------------------------- groups

SHAPES = {"embed.weight": (7, 4), "layers.0.norm.weight": (4,), "layers.0.up.weight": (8, 4), "head.weight": (7, 4)}


def grouped(*groups: dict[str, Any], decay: float = 0.1) -> OptimizerConfig:
    return OptimizerConfig(weight_decay=decay, groups=list(groups))  # type: ignore[arg-type]


def test_the_first_group_that_matches_wins_and_the_rest_has_the_default() -> None:
    config = grouped(
        {"pattern": "*.norm.weight", "weight_decay": 0.4},
        {"pattern": ["layers.*", "embed.*"], "lr_scale": 0.5},
        {"pattern": "head*", "frozen": True},
    )
    found = rules(SHAPES, config)
    assert {name: (r.lr_scale, r.weight_decay, r.frozen) for name, r in found.items()} == {
        "embed.weight": (0.5, 0.1, False),
        "layers.0.norm.weight": (1.0, 0.4, False),
        "layers.0.up.weight": (0.5, 0.1, False),
        "head.weight": (1.0, 0.1, True),
    }
    assert group_notes(SHAPES, config) == [
        "optimizer group *.norm.weight: weight decay 0.4; 4 parameters in 1 tensor",
        "optimizer group layers.*, embed.*: lr x 0.5; 60 parameters in 2 tensors",
        "optimizer group head*: frozen; 28 parameters in 1 tensor",
        "optimizer group all others: weight decay of matrices only; 0 parameters in 0 tensors",
    ]
    assert group_notes(SHAPES, grouped()) == []


@pytest.mark.parametrize(
    ("groups", "parts"),
    [
        (["*.nrom.weight"], ['optimizer.groups.0.pattern "*.nrom.weight"', "closest is layers.0.norm.weight"]),
        (["layers.*", "*norm*"], ['optimizer.groups.1.pattern "*norm*"', "layers.0.norm.weight", "narrower"]),
        (["*"], ["freeze every parameter"]),
    ],
)
def test_patterns_without_effect_are_refused(groups: list[str], parts: list[str]) -> None:
    config = grouped(*({"pattern": pattern, "frozen": True} for pattern in groups))
    with pytest.raises(ConfigError) as caught:
        rules(SHAPES, config)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize("tied", [False, True])
def test_shapes_are_those_of_the_decoder(tied: bool) -> None:
    config = ModelConfig(vocab_size=19, dim=24, layers=2, heads=4, kv_heads=2, head_dim=8, tie_embeddings=tied)
    with torch.device("meta"):
        model = Decoder(config)
    assert list(decoder_shapes(config).items()) == [(n, tuple(p.shape)) for n, p in model.named_parameters()]


def test_groups_are_in_the_plan_and_errors_have_a_place(tmp_path: Path, store: Path) -> None:
    groups = [{"pattern": "*norm.weight", "lr_scale": 2.0}, {"pattern": "embed.weight", "frozen": True}]
    path = cli.write_recipe(tmp_path / "grouped.yaml", store, optimizer={"groups": groups})
    notes = prepare(TrainConfig.load(path), World(), writes=False).plan.notes
    assert "optimizer group *norm.weight: lr x 2; 160 parameters in 5 tensors" in notes
    assert "optimizer group embed.weight: frozen; 8224 parameters in 1 tensor" in notes
    cli.write_recipe(path, store, optimizer={"groups": [{"pattern": "norn.weight", "frozen": True}]})
    line = 1 + next(n for n, text in enumerate(path.read_text().splitlines()) if "norn" in text)
    with pytest.raises(ConfigError, match=rf"grouped\.yaml:{line}: .*the closest is norm\.weight"):
        prepare(TrainConfig.load(path), World(), writes=False)


class Net(nn.Module):
    """Enough of a model for every kind of group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(17, 12)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(2)])
        self.head = nn.Linear(12, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


GROUPS: list[dict[str, Any]] = [
    {"pattern": "layers.0.*", "frozen": True},
    {"pattern": "*.bias", "weight_decay": 0.5},
    {"pattern": ["head.*", "embed.*"], "lr_scale": 0.25},
]


def test_groups_update_as_written_out_by_hand() -> None:
    ours, theirs = Net(), Net()
    config = OptimizerConfig(lr=0.1, weight_decay=0.2, groups=GROUPS)  # type: ignore[arg-type]
    freeze(ours, config)
    optimizer = build_optimizer(ours, config)
    set_learning_rate(optimizer, 0.1)
    by_hand = torch.optim.AdamW(
        [
            {"params": [theirs.layers[1].weight], "lr": 0.1, "weight_decay": 0.2},
            {"params": [theirs.layers[1].bias, theirs.head.bias], "lr": 0.1, "weight_decay": 0.5},
            {"params": [theirs.head.weight, theirs.embed.weight], "lr": 0.025, "weight_decay": 0.2},
        ],
        betas=(0.9, 0.95),
    )
    start = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    for _ in range(3):
        for model, steps in ((ours, optimizer), (theirs, by_hand)):
            model(torch.arange(17)).square().sum().backward()
            steps.step()
            steps.zero_grad()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, start[name] if name.startswith("layers.0.") else other), name


# --------------------------------------------------------------------------------------------------- on two ranks


class Tokens:
    """``count`` samples of 8 tokens below 17, each followed by the next number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = (torch.arange(9) * (1 + index % 3) + index) % 17
        return {"tokens": numbers[:-1], "targets": numbers[1:]}


def recipe(output: Path, steps: int, **optimizer: Any) -> dict[str, Any]:
    return {
        "train": {"steps": steps, "global_batch_size": 4, "eval_interval": 3},
        "optimizer": {"lr": 1e-2, "schedule": "constant", **optimizer},
        "metrics": {"interval": 1},
        "output": {"dir": str(output)},
    }


class Recording(Trainer):
    """Keeps the ids of the samples that it trained on."""

    def train_step(self, microbatches: list[dict[str, Tensor]]) -> dict[str, Any]:
        self.seen = [*getattr(self, "seen", []), *(i for b in microbatches for i in b["sample_ids"].tolist())]
        return super().train_step(microbatches)


def scenes(ctx: Rank, folder: Path) -> dict[str, Any]:
    os.environ |= {"RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.size), "LOCAL_RANK": str(ctx.rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ctx.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ctx.port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    found: dict[str, Any] = {}

    def run(name: str, output: Path, steps: int, resume: str = "none", **optimizer: Any) -> None:
        os.environ["TORCHELASTIC_RUN_ID"] = name
        trainer = Recording(
            recipe(output, steps, **optimizer), model=Net(), data=Tokens(10), validation=Tokens(5), resume=resume
        )
        result = trainer.fit()
        found[name] = {
            "seen": trainer.seen,
            "validation_loss": result.validation_loss,
            "notes": trainer.plan.notes,
        }

    run("straight", folder / "straight", 10, groups=GROUPS)
    run("first half", folder / "halves", 5, groups=GROUPS)
    run("second half", folder / "halves", 10, "auto", groups=GROUPS)
    dist.init_process_group("gloo", store=ctx.store(), rank=ctx.rank, world_size=ctx.size)
    found["same bits"] = updates_are_those_of_adamw()
    return found


def updates_are_those_of_adamw() -> bool:
    """ShardedAdamW against torch's AdamW, both on DTensors with an uneven shard, random values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    equal = []
    for fused in (False, True):
        torch.manual_seed(1)
        whole = [torch.randn(7, 5), torch.randn(1), torch.randn(3, 2, 2)]
        gradients = [[torch.randn_like(t) for t in whole] for _ in range(3)]
        results = []
        for kind in (torch.optim.AdamW, ShardedAdamW):
            parameters = [nn.Parameter(distribute_tensor(t.clone(), mesh, [Shard(0)])) for t in whole]
            optimizer = kind(parameters, lr=0.1, weight_decay=0.3, fused=fused)
            for step in gradients:
                for parameter, gradient in zip(parameters, step, strict=True):
                    parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
                optimizer.step()
            states = [optimizer.state[p] for p in parameters]
            results.append([t for p, s in zip(parameters, states, strict=True) for t in (p, s["exp_avg"], s["step"])])
        equal += [torch.equal(_whole(a), _whole(b)) for a, b in zip(*results, strict=True)]
    return all(equal)


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(scenes, 2, folder, timeout=120)


def parameters(run: Path) -> dict[str, Tensor]:
    """Those of the last checkpoint, whole."""
    state = {f"model.{name}": torch.empty_like(p) for name, p in Net().named_parameters()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(run / "checkpoints" / "step_10"), no_dist=True)
    return {name.removeprefix("model."): t for name, t in state.items()}


def test_groups_and_frozen_parameters_survive_a_resume(folder: Path, two: list[dict[str, Any]]) -> None:
    straight, resumed = (parameters(folder / run) for run in ("straight", "halves"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    start = dict(Net().named_parameters())
    unchanged = [name for name in straight if torch.equal(straight[name], start[name])]
    assert unchanged == ["layers.0.weight", "layers.0.bias"]
    assert "optimizer group layers.0.*: frozen; 156 parameters in 2 tensors" in two[0]["second half"]["notes"]


def test_updates_on_shards_are_those_of_adamw(two: list[dict[str, Any]]) -> None:
    assert two[0]["same bits"]
    assert two[1]["same bits"]


def test_ten_samples_in_batches_of_four_are_each_seen_once_per_epoch(two: list[dict[str, Any]]) -> None:
    seen = [rank["straight"]["seen"] for rank in two]
    assert [len(ids) for ids in seen] == [20, 20]
    per_step = [sorted(seen[0][2 * s : 2 * s + 2] + seen[1][2 * s : 2 * s + 2]) for s in range(10)]
    # Epoch e has the ids 10 e .. 10 e + 9, each a different sample: the third step has the last two of one epoch
    # and the first two of the next, and nothing is padded, dropped or repeated.
    assert per_step == [list(range(4 * s, 4 * s + 4)) for s in range(10)]


def test_a_ragged_evaluation_on_two_ranks_is_that_of_one(
    folder: Path, two: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    losses = {rank["straight"]["validation_loss"] for rank in two}
    one = Trainer(recipe(tmp_path, 10, groups=GROUPS), model=Net(), data=Tokens(10), validation=Tokens(5)).fit()
    model = Net()
    model.load_state_dict(parameters(folder / "straight"))
    rows = [Tokens(5)[i] for i in range(5)]  # five of which 2 ranks x 2 rows take four at a time
    logits = model(torch.stack([row["tokens"] for row in rows]))
    by_hand = nn.functional.cross_entropy(logits.flatten(0, 1), torch.cat([row["targets"] for row in rows])).item()
    assert len(losses) == 1
    assert losses.pop() == pytest.approx(by_hand, rel=1e-6)
    assert one.validation_loss == pytest.approx(by_hand, rel=1e-5)
