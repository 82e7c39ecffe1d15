"""float16: the loss scale, updates that overflow, and what is on the wire in low precision."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelbridge import Trainer
from accelbridge.backend import World
from accelbridge.errors import ConfigError
from accelbridge.portable.process_group import InterposedGroup
from accelbridge.portable.sharded_adamw import local
from accelbridge.train.config import LossScaleConfig, TrainConfig
from accelbridge.train.loss_scale import LossScale
from accelbridge.train.prepare import prepare
from tests import cli
from tests.ranks import Rank, run_ranks

STEPS = 12
DYNAMIC = {"initial": 1024.0, "growth_interval": 3}
REFERENCE = {"ops": {"adamw": "reference"}}

# ------------------------------------------------------------------------------------------------------ by itself


def scaled(make: Callable[..., torch.optim.Optimizer], choice: Any) -> tuple[LossScale, torch.optim.Optimizer]:
    torch.manual_seed(2)
    parameters = [nn.Parameter(torch.rand(3, 4)), nn.Parameter(torch.rand(5))]
    return LossScale(choice, torch.device("cpu")), make(parameters, lr=0.1)


def update(scale: LossScale, optimizer: torch.optim.Optimizer, poison: float | None = None) -> None:
    """One update with gradients of one, scaled; ``poison`` replaces a single element."""
    parameters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter) * scale.scale
    if poison is not None:
        assert parameters[1].grad is not None
        parameters[1].grad[2] = poison
    scale.unscale_(parameters)
    scale.step(optimizer, nn.utils.clip_grad_norm_(parameters, 1.0))


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    states = [t for p in parameters for t in optimizer.state[p].values()]
    return [local(t).detach().clone() for t in [*parameters, *states]]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_leaves_everything_as_it_was(fused: bool, poison: float) -> None:
    scale, optimizer = scaled(lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=fused), "dynamic")
    update(scale, optimizer)
    before = snapshot(optimizer)
    update(scale, optimizer, poison)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer), strict=True))
    assert (scale.scale.item(), scale.skipped.item()) == (32768.0, 1)
    update(scale, optimizer)
    assert not torch.equal(before[0], snapshot(optimizer)[0])
    assert {s["step"].item() for s in optimizer.state.values()} == {2.0}
    assert (scale.scale.item(), scale.skipped.item()) == (32768.0, 1)


def test_the_scale_does_not_change_the_update() -> None:
    results = []
    for choice in (1.0, 4096.0):  # powers of two, so that scaling rounds nothing
        scale, optimizer = scaled(torch.optim.AdamW, choice)
        for _ in range(3):
            update(scale, optimizer)
        results.append(snapshot(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_scale_grows_after_enough_updates_in_a_row_and_stays_within_bounds() -> None:
    choice = LossScaleConfig(initial=8.0, growth_interval=3, growth=4.0, backoff=0.25, min=2.0)
    scale, optimizer = scaled(torch.optim.AdamW, choice)
    seen = []
    for poison in (None, None, float("inf"), None, None, None, None, float("inf"), float("inf"), float("inf")):
        update(scale, optimizer, poison)
        seen.append(scale.scale.item())
    assert seen == [8, 8, 2, 2, 2, 8, 8, 2, 2, 2]
    assert scale.skipped.item() == 4
    scale.scale.fill_(3e38)
    for _ in range(3):
        update(scale, optimizer)
    assert scale.scale.item() == pytest.approx(3e38)  # growing would leave float32


def test_a_fixed_scale_stays() -> None:
    scale, optimizer = scaled(torch.optim.AdamW, 16)
    update(scale, optimizer, float("inf"))
    assert (scale.scale.item(), scale.skipped.item()) == (16.0, 1)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{compute: fp16, loss_scale: 0}", ["loss_scale asked as 0", "dynamic or a number above 0 or a section"]),
        ("{compute: fp16, loss_scale: static}", ['"static" (text)', "dynamic or a number above 0"]),
        ("{compute: fp16, loss_scale: {growth: 1}}", ["precision.loss_scale.growth asked as 1", "above 1"]),
        ("{compute: fp16, loss_scale: {initial: 0.5}}", ["min 1 asked", "initial is 0.5", "set min"]),
        ("{loss_scale: 1024}", ["loss_scale asked", "compute is float32", "remove loss_scale"]),
    ],
)
def test_scales_that_cannot_be(text: str, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"precision: {text}\n")
    with pytest.raises(ConfigError) as caught:
        TrainConfig.load(path)
    assert [part for part in [f"{path}:1: ", *parts] if part not in str(caught.value)] == []


def test_float16_needs_float32_parameters(tmp_path: Path, store: Path) -> None:
    config = cli.recipe(tmp_path, store, precision={"compute": "fp16", "params": "bf16"})
    with pytest.raises(ConfigError, match=r"precision\.params bfloat16 asked; .* set precision.params: float32"):
        Trainer(config)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("dynamic", "loss scale: from 65536, x 2 after 2000 updates without overflow, x 0.5 after one; "),
        ({"initial": 1024.0}, "loss scale: from 1024, x 2 after 2000 updates without overflow, x 0.5 after one; "),
        (4096, "loss scale: 4096 throughout; "),
    ],
)
def test_the_plan_says_how_the_loss_is_scaled(scale: Any, expected: str) -> None:
    def notes(**precision: Any) -> list[str]:
        config = TrainConfig.of({"model": cli.TINY_MODEL, "precision": precision})
        return [n for n in prepare(config, World(), writes=False).plan.notes if n.startswith("loss scale")]

    assert notes(compute="fp16", loss_scale=scale) == [
        f"{expected}updates whose gradients overflow are skipped on all ranks"
    ]
    assert notes(compute="bf16") == []


# --------------------------------------------------------------------------------------------------- on two ranks


def world(ctx: Rank, folder: Path, store: Path) -> dict[str, Any]:
    os.environ |= {"RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.size), "LOCAL_RANK": str(ctx.rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ctx.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ctx.port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}

    def trainer(name: str, output: str = "", steps: int = STEPS, resume: str = "none", **sections: Any) -> Trainer:
        os.environ["TORCHELASTIC_RUN_ID"] = name.replace(" ", "-")
        base: dict[str, Any] = {
            "train": {"steps": steps, "microbatch_size": 2},
            "optimizer": {"schedule": "constant"},
            "metrics": {"interval": 1},
        }
        return Trainer(cli.recipe(folder / (output or name), store, **base, **sections), resume=resume)

    half = {"compute": "fp16", "loss_scale": DYNAMIC}
    trainer("float32").fit()
    trainer("float16", precision=half).fit()
    trainer("float16 on the reference", precision=half, backend=REFERENCE).fit()
    trainer("fixed", precision={"compute": "fp16", "loss_scale": 4096}).fit()
    trainer("first half", "halves", 6, precision=half).fit()
    trainer("second half", "halves", precision=half, resume="auto").fit()
    trainer("from float16 to float32", "converted", 6, precision=half).fit()
    trainer("from float16 to float32, second half", "converted", 8, resume="auto").fit()
    trainer("to float16, first half", "to float16", 6).fit()
    trainer("to float16, second half", "to float16", 8, precision=half, resume="auto").fit()
    too_much = {"compute": "fp16", "loss_scale": {"initial": 2.0**40}}
    return {
        "fused": overflows(trainer("huge scale", steps=30, precision=too_much)),
        "reference": overflows(trainer("huge scale, reference", steps=30, precision=too_much, backend=REFERENCE)),
        "one rank": one_rank_overflows(ctx.rank, trainer("one rank", precision=half)),
        "wire": wire(trainer("wire", precision={"compute": "bf16"})),
        "notes": trainer("notes", precision=half, backend=REFERENCE).plan.notes,
    }


def overflows(trainer: Trainer) -> list[tuple[float, int, bool]]:
    """(scale of the step, skipped so far, nothing changed) of each step, from a scale that is far too large."""
    found = []
    with trainer:
        trainer.setup()
        for step in range(30):
            before = everything(trainer)
            values = trainer.train_step(trainer.loader.step(step))
            trainer.step += 1
            unchanged = all(torch.equal(a, b) for a, b in zip(before, everything(trainer), strict=True))
            found.append((values["loss_scale"].item(), int(values["skipped_updates"].item()), unchanged))
    return found


def one_rank_overflows(rank: int, trainer: Trainer) -> list[tuple[float, int, bool]]:
    """The same where, in the third step, one element of one gradient on rank 1 is infinite after the reduction."""
    found = []
    with trainer:
        trainer.setup()
        clip = trainer.execution.clip_grad_norm

        def poisoned(model: nn.Module, *args: Any) -> Tensor:
            if rank == 1 and trainer.step == 2:
                gradient = next(p.grad for p in model.parameters() if p.grad is not None)
                local(gradient).view(-1)[7] = float("inf")
            return clip(model, *args)

        trainer.execution.clip_grad_norm = poisoned  # type: ignore[method-assign]
        for step in range(5):
            before = everything(trainer)
            values = trainer.train_step(trainer.loader.step(step))
            trainer.step += 1
            unchanged = all(torch.equal(a, b) for a, b in zip(before, everything(trainer), strict=True))
            found.append((values["loss_scale"].item(), int(values["skipped_updates"].item()), unchanged))
    return found


def everything(trainer: Trainer) -> list[Tensor]:
    """Copies of this rank's parameters and optimizer state."""
    states = [t for state in trainer.optimizer.state.values() for t in state.values()]
    return [local(t).detach().clone() for t in [*trainer.model.parameters(), *states]]


_SENT = {
    "all_gather_single": "gathered",
    "reduce_scatter_single": "reduced",
    "_allgather_base": "gathered",
    "_reduce_scatter_base": "reduced",
}
"""What a method of a process group sends; the second pair are the names of torch 2.9."""


def wire(trainer: Trainer) -> dict[str, Any]:
    """Dtypes of one bfloat16 step: of what is gathered and reduced, of what computes, and of what is kept."""
    kinds: dict[str, set[torch.dtype]] = {"gathered": set(), "reduced": set(), "computed": set()}
    with trainer, pytest.MonkeyPatch.context() as patch:
        trainer.setup()
        for method, kind in _SENT.items():
            patch.setattr(InterposedGroup, method, _recording(getattr(InterposedGroup, method), kinds[kind]))
        up = next(m for name, m in trainer.model.named_modules() if name.endswith("ffn.up"))
        up.register_forward_hook(lambda *seen: kinds["computed"].add(seen[2].dtype))
        trainer.train_step(trainer.loader.step(0))
        kinds["parameters"] = {p.dtype for p in trainer.model.parameters()}
        kinds["moments"] = {s["exp_avg_sq"].dtype for s in trainer.optimizer.state.values()}
        planned = {choice.op: choice.dtypes.get("wire") for choice in trainer.plan.ops}
    return {**kinds, "planned": (planned["all_gather"], planned["reduce_scatter"])}


def _recording(method: Callable[..., Any], dtypes: set[torch.dtype]) -> Callable[..., Any]:
    """``method`` of a process group, which notes the dtype of what is sent."""

    def call(group: Any, output: Tensor, input: Tensor, *args: Any) -> Any:
        dtypes.add(input.dtype)
        return method(group, output, input, *args)

    return call


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, store: Path) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("float16")
    return folder, run_ranks(world, 2, folder, store, timeout=240)


def lines(ranks: tuple[Path, list[dict[str, Any]]], name: str) -> dict[int, dict[str, Any]]:
    return cli.steps_of(ranks[0] / name)


@pytest.mark.parametrize("name", ["float16", "float16 on the reference", "fixed"])
def test_float16_follows_float32(name: str, ranks: Any) -> None:
    half, full = lines(ranks, name), lines(ranks, "float32")
    # Roundings of 2**-11 in a handful of layers; the norm shows that gradients are unscaled before it is taken.
    for step in range(1, STEPS + 1):
        assert half[step]["loss"] == pytest.approx(full[step]["loss"], rel=0.002), f"step {step}"
        assert half[step]["grad_norm"] == pytest.approx(full[step]["grad_norm"], rel=0.01), f"step {step}"
        assert half[step]["skipped_updates"] == 0
    assert half[STEPS]["loss"] < half[1]["loss"] - 0.5
    assert half[STEPS]["loss"] != full[STEPS]["loss"]
    scales = [half[step]["loss_scale"] for step in range(1, STEPS + 1)]
    growing = [1024.0 * 2 ** (step // 3) for step in range(STEPS)]
    assert scales == ([4096.0] * STEPS if name == "fixed" else growing)
    assert "loss_scale" not in full[1]


def test_a_resume_in_float16_is_bitwise(ranks: Any) -> None:
    straight, halves = lines(ranks, "float16"), lines(ranks, "halves")
    for value in ("loss", "grad_norm", "loss_scale", "skipped_updates"):
        assert [halves[s][value] for s in halves] == [straight[s][value] for s in straight], value
    assert sorted(halves) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", ["converted", "to float16"])
def test_a_resume_may_change_the_precision(name: str, ranks: Any) -> None:
    found, full = lines(ranks, name), lines(ranks, "float32")
    assert [found[step]["loss"] for step in range(1, 9)] == pytest.approx(
        [full[step]["loss"] for step in range(1, 9)], rel=0.002
    )
    assert (found[7].get("loss_scale"), found[6].get("loss_scale")) == {
        "converted": (None, 2048.0),
        "to float16": (1024.0, None),
    }[name]


@pytest.mark.parametrize("optimizer", ["fused", "reference"])
def test_overflows_are_skipped_on_all_ranks_until_the_scale_fits(optimizer: str, ranks: Any) -> None:
    mine, theirs = (rank[optimizer] for rank in ranks[1])
    assert mine == theirs
    scale, skipped = 2.0**40, 0
    for used, count, unchanged in mine:
        skipped += unchanged
        assert (used, count) == (scale, skipped)
        scale *= 0.5 if unchanged else 1.0
    assert [unchanged for _, _, unchanged in mine[:10]] == [True] * 10  # beyond float16 for any gradient
    assert skipped < 25


def test_an_overflow_on_one_rank_is_skipped_on_both(ranks: Any) -> None:
    for rank in ranks[1]:
        # After three updates in a row the scale would have grown; the one that was skipped halves it instead.
        assert rank["one rank"] == [
            (1024.0, 0, False),
            (1024.0, 0, False),
            (1024.0, 1, True),
            (512.0, 1, False),
            (512.0, 1, False),
        ]


def test_the_plan_says_where_the_host_waits(ranks: Any) -> None:
    assert any("the host waits once a step to see an overflow" in note for note in ranks[1][0]["notes"])


def test_bfloat16_computes_low_and_keeps_and_reduces_float32(ranks: Any) -> None:
    for rank in ranks[1]:
        found = rank["wire"]
        assert found["planned"] == ("bfloat16", "float32 sum")
        assert (found["gathered"], found["computed"]) == ({torch.bfloat16}, {torch.bfloat16})
        assert (found["reduced"], found["parameters"], found["moments"]) == ({torch.float32},) * 3
