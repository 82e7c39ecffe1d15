"""Guards: NaN and Inf in loss or gradients, loss spikes, and going back to a checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from accelbridge import Trainer
from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.errors import AccelbridgeError, ConfigError, LossSpikeError, NonFiniteError
from accelbridge.guards.config import SpikeConfig
from accelbridge.guards.guards import Guards
from accelbridge.guards.spikes import SpikeDetector
from accelbridge.portable.sharded_adamw import local
from accelbridge.train.config import TrainConfig
from tests import cli
from tests.ranks import Rank, run_ranks
from tests.scenes import TP

BAD_STEP = 7
STEPS = 12

# --------------------------------------------------------------------------------------------- NaN on one of two ranks


class Rows:
    """Regression data; one element of sample ``bad`` is ``value``."""

    def __init__(self, bad: int = -1, value: float = math.nan) -> None:
        self._bad, self._value = bad, value

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        y = x.sum(0, keepdim=True)
        if index == self._bad:
            x[3] = self._value
        return {"x": x, "y": y}


class Net(nn.Module):
    """Two layers; ``poison`` maps (step, rank) to a fault, and is asked in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 1)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x * self.scale)


class SquaredError:
    """``fault`` spoils the loss without its gradient ("loss"), or its gradient without the loss ("gradient")."""

    def __init__(self) -> None:
        self.fault = ""

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        if self.fault == "gradient":
            out.register_hook(lambda g: torch.full_like(g, math.inf))
        loss = ((out - batch["y"]) ** 2).sum()
        return loss + math.nan if self.fault == "loss" else loss

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["y"])))


class Faulty(Trainer):
    """Spoils the loss of update ``at`` on ``rank``, also when the step is run again; or leaves its update out."""

    fault, at, rank, leave_out = "", BAD_STEP, 1, False

    def accumulate(self, microbatches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        here = self.step + 1 == self.at and self.prepared.world.rank == self.rank
        self.loss.fault = self.fault if here else ""  # type: ignore[attr-defined]
        return super().accumulate(microbatches)

    def _update(self, rate: float, loss: Tensor) -> dict[str, Any]:
        if self.leave_out and self.step + 1 == self.at:
            with patch.object(self.optimizer, "step"):
                return super()._update(rate, loss)
        return super()._update(rate, loss)


def regression(output: Path, *, data: Rows | None = None, kind: type[Trainer] = Faulty, **sections: Any) -> Trainer:
    recipe: dict[str, dict[str, Any]] = {
        "train": {"steps": STEPS, "global_batch_size": 8, "microbatch_size": 2},
        "data": {"shuffle": False},
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "metrics": {"interval": 5},
        "output": {"dir": str(output)},
    }
    for section, values in sections.items():
        recipe.setdefault(section, {}).update(values)
    torch.manual_seed(3)
    return kind(recipe, model=Net(), data=data or Rows(), loss=SquaredError())


def parameters(trainer: Trainer) -> list[Tensor]:
    states = [t for state in trainer.optimizer.state.values() for t in state.values()]
    return [local(t).detach().clone() for t in [*trainer.model.parameters(), *states]]


def stopped(trainer: Trainer) -> dict[str, Any]:
    """How a run that a guard ends did end."""
    with pytest.raises(AccelbridgeError) as caught:
        trainer.fit()
    return {
        "error": type(caught.value).__name__,
        "code": caught.value.exit_code,
        "text": str(caught.value),
        "step": trainer.step,
        "parameters": parameters(trainer),
    }


def finished(trainer: Trainer) -> list[Tensor]:
    trainer.fit()
    return parameters(trainer)


def world(ctx: Rank, folder: Path) -> dict[str, Any]:
    """One of two ranks through all runs."""
    ctx.launched()
    runs = iter(range(1000))

    def run(name: str, **sections: Any) -> Faulty:
        os.environ["TORCHELASTIC_RUN_ID"] = f"{name}-{next(runs)}"
        trainer = regression(folder / name, **sections)
        assert isinstance(trainer, Faulty)
        return trainer

    def faulty(name: str, fault: str, **sections: Any) -> Faulty:
        trainer = run(name, **sections)
        trainer.fault = fault
        return trainer

    found: dict[str, Any] = {}
    # Sample 8 * 6 + 3 * 2 + 0 is in update 7: microbatch 1 of rank 1 (samples are dealt out in their order).
    found["data"] = stopped(run("data", data=Rows(bad=54)))
    for fault in ("loss", "gradient"):
        found[fault] = stopped(faulty(fault, fault))
    found["before"] = finished(run("before", train={"steps": BAD_STEP - 1}))
    found["replicated"] = stopped(faulty("replicated", "gradient", parallel={"dp_replicate": 2}))
    skip = {"guards": {"nonfinite": "skip", "max_skips": 2}}
    found["skipped"] = finished(faulty("skipped", "gradient", **skip))
    found["on the reference"] = finished(faulty("reference", "loss", backend={"ops": {"adamw": "reference"}}, **skip))
    left_out = run("left out")
    left_out.leave_out = True
    found["left out"] = finished(left_out)
    found["too many"] = stopped(run("too many", data=Rows(bad=9, value=math.inf), kind=Diverging, **skip))
    half = {"precision": {"compute": "fp16", "loss_scale": 16.0}}
    found["float16 loss"] = stopped(faulty("float16 loss", "loss", **half))
    found["float16 overflow"] = finished(faulty("float16 overflow", "gradient", **half))
    return found


class Diverging(Faulty):
    """Every loss from update 7 on is not finite."""

    fault = "loss"

    def accumulate(self, microbatches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        self.at = max(BAD_STEP, self.step + 1)
        return super().accumulate(microbatches)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("guards")
    return folder, run_ranks(world, 2, folder, timeout=200)


def both(ranks: Any, name: str) -> dict[str, Any]:
    """How ``name`` ended: with the same words on both ranks."""
    mine, theirs = (rank[name] for rank in ranks[1])
    for what in ("error", "code", "text", "step"):
        assert mine[what] == theirs[what]
    return mine


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("data", ["the loss is nan", "x of sample 54 holds a value that is not finite", "mend that data"]),
        ("loss", ["the loss is nan", "arising on rank 1", "run again, rank 1: the loss itself is not finite"]),
        ("gradient", ["the loss is finite", "the gradient of the output of layers.1 in microbatch 1 is not finite"]),
        ("replicated", ["the loss is finite", "the gradient of the output of layers.1 in microbatch 1 is not finite"]),
        ("float16 loss", ["the loss is nan", "run again, rank 1: the loss itself is not finite"]),
    ],
)
def test_all_ranks_stop_at_the_same_step_and_name_what_and_where(name: str, parts: list[str], ranks: Any) -> None:
    found = both(ranks, name)
    assert (found["error"], found["code"], found["step"]) == ("NonFiniteError", 3, BAD_STEP - 1)
    whole = [f"step {BAD_STEP}: ", "rank 1", f"the parameters are those after step {BAD_STEP - 1}", *parts]
    if name != "loss" and name != "float16 loss":
        whole += ["the gradient of layers.0.weight is not finite (the first of 6"]
    else:
        assert "gradient of" not in found["text"].partition(";")[0], found["text"]
    for part in whole:
        assert part in found["text"], found["text"]
    assert "rank 0" not in found["text"]
    (event,) = [line for line in cli.lines_of(ranks[0] / name) if line.get("event") == "halted"]
    assert (event["step"], event["message"]) == (BAD_STEP, found["text"])


@pytest.mark.parametrize("name", ["data", "loss", "gradient"])
def test_a_stop_leaves_the_last_good_state(name: str, ranks: Any) -> None:
    """Although three more steps were made before the metrics were read."""
    for rank in ranks[1]:
        assert all(torch.equal(a, b) for a, b in zip(rank[name]["parameters"], rank["before"], strict=True))


@pytest.mark.parametrize("name", ["skipped", "on the reference"])
def test_a_skip_is_a_run_without_that_update(name: str, ranks: Any) -> None:
    for rank in ranks[1]:
        same = [torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(rank[name], rank["left out"], strict=True)]
        assert all(same)
        if name == "skipped":  # the same implementation, so the same bits
            assert all(torch.equal(a, b) for a, b in zip(rank[name], rank["left out"], strict=True))


def test_a_skip_is_an_event_and_the_run_goes_on(ranks: Any) -> None:
    lines = cli.lines_of(ranks[0] / "skipped")
    (event,) = [line for line in lines if line.get("event") == "skipped_update"]
    assert (event["step"], event["parameter"]) == (BAD_STEP, "layers.0.weight")
    assert math.isfinite(event["loss"])
    assert sorted(cli.steps_of(ranks[0] / "skipped")) == list(range(1, STEPS + 1))


def test_more_skips_in_a_row_than_allowed_stop(ranks: Any) -> None:
    found = both(ranks, "too many")
    assert (found["error"], found["step"]) == ("NonFiniteError", BAD_STEP + 1)
    for part in (f"step {BAD_STEP + 2}: ", "one more in a row than guards.max_skips 2", f"after step {BAD_STEP - 1}"):
        assert part in found["text"]


def test_an_overflow_in_float16_is_the_loss_scales_business(ranks: Any) -> None:
    lines = cli.lines_of(ranks[0] / "float16 overflow")
    assert [line for line in lines if line.get("event") in ("halted", "skipped_update")] == []
    assert cli.steps_of(ranks[0] / "float16 overflow")[STEPS]["skipped_updates"] == 1


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {**TP, "memory": {"recompute": "selective"}},
    "ZeRO 2": {"parallel": {"zero": 2}, "memory": {"recompute": "full"}, "model": {"dropout": 0.1}},
}


class Overflowing(Trainer):
    """The second layer's ``up`` of rank 1 puts out infinity in update 3, as an overflow would."""

    def accumulate(self, microbatches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        up = next(m for name, m in self.model.named_modules() if name.endswith("layers.1.ffn.up"))
        bad = self.step + 1 == 3 and self.prepared.world.rank == 1
        hook = up.register_forward_hook(lambda _, __, out: out * math.inf if bad else None)
        try:
            return super().accumulate(microbatches)
        finally:
            hook.remove()


def decoders(ctx: Rank, folder: Path, store: Path) -> dict[str, str]:
    ctx.launched()
    found = {}
    for name, sections in LAYOUTS.items():
        os.environ["TORCHELASTIC_RUN_ID"] = name
        recipe = cli.recipe(folder / name, store)
        for section, values in {"train": {"steps": 5, "microbatch_size": 2}, **sections}.items():
            recipe.setdefault(section, {}).update(values)
        found[name] = stopped(Overflowing(recipe))["text"]
    return found


def test_the_module_is_found_in_layouts_that_run_parts_twice_or_in_shares(tmp_path: Path, store: Path) -> None:
    mine, theirs = run_ranks(decoders, 2, tmp_path, store, timeout=150)
    assert mine == theirs
    for name, text in mine.items():
        assert "step 3: the loss is nan" in text
        assert "the gradient of embed.weight is not finite (the first of 21" in text, text
        assert "layers.1.ffn" in text
        assert "rank 1" in text
        # What a layer split over tp puts out is the sum of both ranks' shares.
        assert ("rank 0" in text) == (name == "tp 2"), text


def test_without_the_mask_the_parameters_would_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests see is the guard's doing."""
    with monkeypatch.context() as unguarded:
        unguarded.setattr(Guards, "mask", lambda self, gradients: torch.zeros((), dtype=torch.bool))
        unguarded.setattr(Guards, "_nonfinite", lambda *_: None)
        trainer = regression(tmp_path / "unguarded")
        assert isinstance(trainer, Faulty)
        trainer.fault, trainer.rank = "gradient", 0
        trainer.fit()
    assert not any(torch.isfinite(p).all() for p in parameters(trainer)[:6])


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Where the host reads a tensor's value."""
    reads: list[str] = []
    with pytest.MonkeyPatch.context() as watched:
        for name in ("item", "tolist", "__bool__", "__float__"):
            original = getattr(Tensor, name)

            def call(self: Tensor, *args: Any, _name: str = name, _original: Any = original) -> Any:
                reads.append(_name)
                return _original(self, *args)

            watched.setattr(Tensor, name, call)
        yield reads


def test_a_guarded_step_reads_nothing(tmp_path: Path) -> None:
    with regression(tmp_path / "run") as trainer:
        trainer.setup()
        batches = trainer.loader.step(0)
        with counted_reads() as reads:
            trainer.train_step(batches)
        assert reads == []


# ------------------------------------------------------------------------------------------------------- loss spikes

SPIKE = SpikeConfig(window=8, threshold=6.0)


def judged(losses: list[float]) -> list[int]:
    detector = SpikeDetector(SPIKE)
    return [step for step, loss in enumerate(losses, 1) if detector.see(step, loss) is not None]


def test_a_spike_is_reported_once_where_it_begins() -> None:
    calm = [3.0 + 0.01 * (-1) ** n for n in range(12)]
    assert judged(calm) == []
    assert judged([*calm, 9.0, 8.0, 9.0, *calm, 7.0]) == [13, 28]
    assert judged([*calm, 3.03]) == []  # less than six deviations
    assert judged([*calm, math.nan, 3.0, math.inf]) == []  # the other guard's
    assert judged([9.0] * 3 + [3.0] * 4 + [99.0]) == []  # the window is not full yet
    assert judged([5.0 - 0.2 * n for n in range(20)]) == []  # falling is no spike
    assert judged([3.0] * 10 + [3.002]) == []  # losses that hardly move have no spread


def test_a_new_level_is_one_spike() -> None:
    assert judged([3.0, 3.1] * 6 + [5.0, 5.1] * 12) == [13]


def test_robust_against_earlier_outliers() -> None:
    """A mean and a standard deviation would not see the second one."""
    assert judged([3.0, 3.1] * 6 + [50.0, 3.0, 3.1, 3.0, 40.0]) == [13, 17]


class Spiky(Trainer):
    """Data of the global batches ``bad`` has targets that are far off, so its loss leaps."""

    bad: tuple[int, ...] = (29,)

    def setup(self) -> None:
        super().setup()
        take = self.loader.step

        def spoiled(position: int) -> list[dict[str, Tensor]]:
            batches = take(position)
            factor = 30.0 if position in self.bad else 1.0
            return [{**batch, "y": batch["y"] * factor} for batch in batches]

        self.loader.step = spoiled  # type: ignore[method-assign]


ROLLBACK = {
    "train": {"steps": 40},
    "checkpoint": {"interval": 8, "keep": 4},
    "metrics": {"interval": 4},
}


def spiky(output: Path, action: str, **sections: Any) -> Trainer:
    spike = {"window": 12, "threshold": 12.0, "action": action, **sections.pop("spike", {})}
    merged = {name: {**values, **sections.pop(name, {})} for name, values in ROLLBACK.items()}
    return regression(output, kind=Spiky, guards={"spike": spike}, **merged, **sections)


def rolled_back(ctx: Rank, folder: Path) -> list[Tensor]:
    ctx.launched()
    os.environ["TORCHELASTIC_RUN_ID"] = "rollback"
    trainer = spiky(folder / "run", "rollback")
    trainer.fit()
    return parameters(trainer)


def test_rollback_goes_back_and_past_the_data(tmp_path: Path) -> None:
    mine, theirs = run_ranks(rolled_back, 2, tmp_path, timeout=100)
    output = tmp_path / "run"
    lines = cli.lines_of(output)
    (event,) = [line for line in lines if line.get("event") == "rollback"]
    # Update 30 has the bad batch; its window begins after step 18, and step_16 is the newest from before.
    assert (event["spike"], event["step"], event["data_position"]) == (30, 16, 30)
    assert event["loss"] > event["limit"] > event["median"]
    steps = [line["step"] for line in lines if "event" not in line]
    assert steps == list(range(1, 41))
    assert all(line["loss"] < event["limit"] for line in lines if "event" not in line and line["step"] > 16)
    newest = manifests.complete(output / "checkpoints")
    assert [path.name for path in newest] == ["step_16", "step_24", "step_32", "step_40"]
    assert [manifests.read(path).data_position for path in newest] == [16, 38, 46, 54]
    # The same as a run that never met that data: 16 steps, and then the batches from position 30 on.
    calm = Skipping.run(tmp_path / "calm")
    whole = [torch.cat([a, b]) if a.dim() else a for a, b in zip(mine, theirs, strict=True)]
    for ours, expected in zip(whole, calm, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)


class Skipping(Trainer):
    """Takes position 30 after 16 steps."""

    def setup(self) -> None:
        super().setup()
        take = self.loader.step
        self.loader.step = lambda position: take(position if position < 16 else position + 14)  # type: ignore[method-assign]

    @classmethod
    def run(cls, output: Path) -> list[Tensor]:
        trainer = regression(output, kind=cls, train={"steps": 40})
        trainer.fit()
        return parameters(trainer)


def test_a_resume_after_a_rollback_takes_the_same_data(tmp_path: Path) -> None:
    """Bit for bit the unbroken run, from a checkpoint whose position in the data is not its step."""
    straight = spiky(tmp_path / "straight", "rollback")
    straight.fit()
    first = spiky(tmp_path / "halves", "rollback", train={"steps": 32})
    first.fit()
    assert manifests.read(tmp_path / "halves" / "checkpoints" / "step_32").data_position == 46
    torch.manual_seed(3)
    second = Spiky(
        first.config.model_copy(update={"train": straight.config.train}),
        model=Net(),
        data=Rows(),
        loss=SquaredError(),
        resume="auto",
    )
    assert second.position == 46
    second.fit()
    assert all(torch.equal(a, b) for a, b in zip(parameters(second), parameters(straight), strict=True))


@pytest.mark.parametrize(
    ("bad", "settings", "why"),
    [
        ((29,), {"action": "stop"}, "guards.spike.action is stop"),
        ((29, 50), {"action": "rollback", "max_rollbacks": 1}, "this run has rolled back 1 times"),
        ((14,), {"action": "rollback"}, "no checkpoint from before guards.spike.window"),
    ],
)
def test_a_spike_that_stops(tmp_path: Path, bad: tuple[int, ...], settings: dict[str, Any], why: str) -> None:
    action = settings.pop("action")
    trainer = spiky(tmp_path / "run", action, spike=settings)
    assert isinstance(trainer, Spiky)
    trainer.bad = bad
    with pytest.raises(LossSpikeError, match=why) as caught:
        trainer.fit()
    assert caught.value.exit_code == 4
    assert [line["cause"] for line in cli.lines_of(tmp_path / "run") if line.get("event") == "halted"] == ["spike"]


def test_a_spike_that_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spiky(tmp_path / "run", "warn").fit()
    (event,) = [line for line in cli.lines_of(tmp_path / "run") if line.get("event") == "spike"]
    assert event["step"] == 30
    assert "loss spike: the loss of step 30" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- settings and manifests


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"guards": {"nonfinite": "ignore"}}, ["guards.nonfinite", "stop"]),
        ({"guards": {"max_skips": 0}}, ["guards.max_skips asked as 0"]),
        ({"guards": {"spike": {"window": 2}}}, ["guards.spike.window asked as 2"]),
        ({"guards": {"spike": {"threshold": -1.0}}}, ["guards.spike.threshold"]),
        ({"guards": {"spike": {"action": "rollback"}}}, ["checkpoint.interval 0 reach back 0 steps", "set them so"]),
        (
            {"guards": {"spike": {"action": "rollback"}}, "checkpoint": {"interval": 50, "keep": 3}},
            ["reach back 100 steps", "up to 10 later"],
        ),
    ],
)
def test_settings_that_cannot_work(sections: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.of(sections)
    for part in parts:
        assert part in str(caught.value)


def test_an_old_manifest_means_position_equals_step(tmp_path: Path) -> None:
    manifests.write(tmp_path, Manifest(step=5, world_size=1))
    text = (tmp_path / manifests.NAME).read_text()
    (tmp_path / manifests.NAME).write_text(text.replace(' "data_position": null,\n', ""))
    read = manifests.read(tmp_path)
    assert "data_position" not in (tmp_path / manifests.NAME).read_text()
    assert (read.step, manifests.skipped_data(read)) == (5, 0)
    assert asdict(read)["data_position"] is None


def test_the_error_is_the_projects_own() -> None:
    assert issubclass(NonFiniteError, AccelbridgeError)
