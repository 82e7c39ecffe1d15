"""Out of memory: what the advice says is true of the run, and possible in it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelbridge import Trainer
from accelbridge.cpu.device import CpuDevice
from accelbridge.errors import ConfigError, OutOfMemoryError
from accelbridge.memory.advice import Estimates, size_text
from accelbridge.memory.use import held
from accelbridge.parallel.layout import Layout
from accelbridge.portable.device import TorchDevice
from tests import cli
from tests.ranks import Rank, outcomes


def refused_by_the_allocator() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**56, dtype=torch.uint8)
    return caught.value


def test_devices_know_their_errors() -> None:
    real = refused_by_the_allocator()
    for device in (CpuDevice(), TorchDevice("meta")):  # the host's memory can run out under any of them
        assert device.is_out_of_memory(real)
        assert device.is_out_of_memory(torch.OutOfMemoryError("out of memory"))
        assert device.is_out_of_memory(MemoryError())
        assert not device.is_out_of_memory(RuntimeError("shape mismatch"))
        assert not device.is_out_of_memory(ConfigError("not enough memory"))


class Greedy(Trainer):
    """Asks for far too much in its second step."""

    def accumulate(self, microbatches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        if self.step == 1:
            torch.empty(2**56, dtype=torch.uint8)
        return super().accumulate(microbatches)


def greedy(ctx: Rank, folder: Path, store: Path, sections: dict[str, Any]) -> None:
    ctx.launched()
    os.environ["TORCHELASTIC_RUN_ID"] = "greedy"
    Greedy(cli.recipe(folder / "run", store, **sections)).fit()


def test_advice_of_two_ranks(tmp_path: Path, store: Path) -> None:
    sections: dict[str, Any] = {"parallel": {"zero": 1}, "train": {"microbatch_size": 2}}
    for outcome in outcomes(greedy, 2, tmp_path, store, sections, timeout=100):
        assert outcome.error == "OutOfMemoryError", outcome.traceback
        first, taken, head, *options = outcome.message.splitlines()
        assert first.startswith(f"memory ran out in step 2 on rank {outcome.rank}: ")
        assert "you tried to allocate 72057594037927936 bytes" in first
        for part in ("parameters ", "gradients ", "optimizer state ", "gathered parameters ", "activations of a micro"):
            assert part in taken
        assert head == "what would save some, most first:"
        settings = [option.strip().partition(": saves about ")[0] for option in options]
        assert set(settings) == {
            "train.microbatch_size 2 -> 1",
            "memory.recompute none -> full",
            "memory.recompute none -> selective",
            "parallel.zero 1 -> 3",
            "parallel.zero 1 -> 2",
            "parallel.dp_shard 2 -> 4",
            "precision.compute float32 -> bfloat16",
            # tp 2 would need an even vocabulary, which is 257
        }
        assert [size_in(option) for option in options] == sorted(map(size_in, options), reverse=True)


def size_in(option: str) -> float:
    number, unit = option.partition("saves about ")[2].partition(";")[0].split()
    return float(number) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


def estimates(trainer: Trainer, **changes: Any) -> Estimates:
    trainer.setup()
    return Estimates(replace(trainer.prepared, **changes), held(trainer.model, trainer.optimizer))


def test_only_what_is_possible_and_not_in_force(tmp_path: Path, store: Path) -> None:
    sections: dict[str, Any] = {
        "memory": {"recompute": "full"},
        "train": {"microbatch_size": 1},
        "precision": {"compute": "bf16"},
    }
    with Trainer(cli.recipe(tmp_path / "run", store, **sections)) as trainer:
        found = {option.setting for option in estimates(trainer).options()}
    assert found == {"parallel.dp_shard 1 -> 2"}


def test_of_more_devices(tmp_path: Path, store: Path) -> None:
    """What a layout of many devices is advised, without as many processes."""
    with Trainer(cli.recipe(tmp_path / "run", store, model={"vocab_size": 260, "layers": 4})) as trainer:
        layout = Layout(dp_replicate=2, dp_shard=4, zero=2)
        options = {option.setting: option for option in estimates(trainer, layout=layout).options()}
    state = sum(held(trainer.model, trainer.optimizer).values())
    assert options["parallel.dp_shard 4 -> 8 with parallel.dp_replicate 2 -> 1"].saves == state // 2
    assert "parallel.tp 1 -> 2 with parallel.dp_shard 4 -> 2" in options
    assert "parallel.zero 2 -> 3" in options
    assert not any(setting.startswith("parallel.zero 1") for setting in options)


def test_the_estimates_are_the_runs(tmp_path: Path, store: Path) -> None:
    """Parameters, moments and activations against what torch holds."""
    with Trainer(cli.recipe(tmp_path / "run", store)) as trainer:
        found = estimates(trainer)
        numbers = sum(p.numel() for p in trainer.model.parameters())
        counts = 4 * len(list(trainer.model.parameters()))  # AdamW's count of updates
        assert found.kinds == {"parameters": 4 * numbers, "gradients": 4 * numbers, "optimizer": 8 * numbers + counts}
        saved: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
        alive = []

        def pack(tensor: Tensor) -> Tensor:
            alive.append(tensor)
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        (batch,) = trainer.loader.step(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            trainer.loss(trainer.model, batch)
    own |= {t.untyped_storage().data_ptr() for t in batch.values()}
    real = sum(size for key, size in saved.items() if key not in own)
    assert found.activations == pytest.approx(real, rel=0.03)
    halves = next(o for o in found.options() if o.setting == "train.microbatch_size 8 -> 4")
    assert halves.saves == pytest.approx(real / 2, rel=0.03)


class Huge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.empty(2**56)[0]


class Numbers:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(4) * index}


class Total:
    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).sum()

    def count(self, batch: Any) -> Tensor:
        return torch.tensor(float(len(batch["x"])))


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    recipe = {"train": {"steps": 2}, "output": {"dir": str(tmp_path / "run")}}
    with pytest.raises(OutOfMemoryError) as caught:
        Trainer(recipe, model=Huge(), data=Numbers(), loss=Total()).fit()
    text = str(caught.value)
    assert caught.value.exit_code == 5
    assert isinstance(caught.value.__cause__, RuntimeError)
    for part in ("in step 1 on rank 0", "as the model is your own", "train.microbatch_size 8 -> 4", "at most"):
        assert part in text
    assert "recompute" not in text  # it has no shard units


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    class Broken(Huge):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("shapes differ")

    recipe = {"train": {"steps": 2}, "output": {"dir": str(tmp_path / "run")}}
    with pytest.raises(RuntimeError, match="shapes differ"):
        Trainer(recipe, model=Broken(), data=Numbers(), loss=Total()).fit()


def test_sizes_as_text() -> None:
    assert [size_text(n) for n in (512, 3 << 20, 5 << 29)] == ["0.5 KiB", "3.0 MiB", "2.5 GiB"]
