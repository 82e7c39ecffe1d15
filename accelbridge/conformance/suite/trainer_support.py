"""What the tests of the trainer and of checkpoints share: how a Trainer is started on a test's ranks, tiny models whose
arithmetic has no rounding, and what is read back.

The models multiply element by element and sum, so that a device whose matrix unit rounds its operands computes them
exactly too: here the trainer is judged, products are judged by MM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accelbridge import Trainer
from accelbridge.conformance.bench import Bench

BATCH = 8
"""Samples per step; a power of two, so that means are exact."""
RATE = 2.0**-2

_hosted: list[Any] = []
"""The store that this process hosts for its trainers, kept for its life."""


# ------------------------------------------------------------------------------------------------------ trainers


@contextmanager
def launched(t: Bench, name: str, size: int) -> Iterator[None]:
    """The environment that a launcher gives, in which the first ``size`` ranks of this test are a world."""
    values = {
        "RANK": str(t.world.rank),
        "LOCAL_RANK": str(t.world.local_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_port(t)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"{t.folder.name}/{name}",
    }
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _port(t: Bench) -> int:
    """Where rank 0 hosts the store through which the ranks of a Trainer meet."""
    if t.world.rank == 0:
        if not _hosted:
            _hosted.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        if t.store is not None:
            t.store.set("trainer/port", str(_hosted[0].port))
        return int(_hosted[0].port)
    assert t.store is not None
    return int(t.store.get("trainer/port"))


def recipe(t: Bench, name: str, sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A recipe for the backend under test: a constant rate, no clipping, no decay, data in their order."""
    defaults: dict[str, dict[str, Any]] = {
        "backend": {"name": t.backend.name, "options": t.options},
        "parallel": {"timeout": 60, "agreement_timeout": 60},
        "optimizer": {"lr": RATE, "schedule": "constant", "min_lr_ratio": 0.0, "clip_norm": None, "weight_decay": 0.0},
        "data": {"shuffle": False},
        "train": {"steps": 4, "global_batch_size": BATCH, "seed": 7},
        "checkpoint": {"asynchronous": False, "keep": 9},
        "metrics": {"interval": 1},
        "output": {"dir": str(t.folder / name)},
    }
    names = defaults.keys() | sections.keys()
    return {key: defaults.get(key, {}) | dict(sections.get(key, {})) for key in names}


@contextmanager
def trainer(
    t: Bench,
    name: str,
    model: nn.Module | None,
    data: Any,
    /,
    *,
    loss: Any = None,
    validation: Any = None,
    resume: str | Path = "none",
    size: int | None = None,
    sgd: float | None = None,
    **sections: Mapping[str, Any],
) -> Iterator[Trainer]:
    """A Trainer of the first ``size`` ranks (default: all), which alone may come here, set up and closed at the end.

    ``sgd``: plain gradient descent in the place of AdamW, whose roots are not exact; the rate is the recipe's.
    """
    with launched(t, name, size or t.world.size):
        config = recipe(t, name, sections)
        made = Trainer(config, model=model, data=data, loss=loss, validation=validation, resume=resume)
        with made:
            made.setup()
            if sgd is not None:
                made.optimizer = torch.optim.SGD(made.model.parameters(), lr=sgd)
            yield made


def step(t: Bench, trainer: Trainer) -> dict[str, Any]:
    """The next step of ``trainer``, as ``fit`` takes it; its values are scalars on the device."""
    values = t.run(trainer.train_step, trainer.loader.step(trainer.position))
    trainer.step += 1
    trainer.updating = False
    return values


def devices(t: Bench) -> int:
    """Devices that the ranks of this test drive together: under spmd execution one process drives several."""
    return t.world.size * t.backend.execution.devices_per_process(t.backend.device.count())


def layouts(t: Bench, stages: Sequence[int] = (1, 2, 3)) -> dict[str, dict[str, Any]]:
    """Sections ``parallel`` of every way in which data parallel spreads a model over the devices here."""
    count, axes = devices(t), t.capabilities.layout_axes
    if count == 1:
        return {"alone": {}}
    found: dict[str, dict[str, Any]] = {}
    if "dp_replicate" in axes:
        found[f"replicate {count}"] = {"dp_replicate": count, "dp_shard": 1}
    if "dp_shard" in axes:
        found |= {f"shard {count}, ZeRO {zero}": {"dp_shard": count, "zero": zero} for zero in stages}
    if {"dp_replicate", "dp_shard"} <= set(axes) and count >= 4:
        found[f"replicate 2, shard {count // 2}"] = {"dp_replicate": 2, "dp_shard": count // 2}
    return found


def gradients(t: Bench, trainer: Trainer) -> dict[str, Tensor]:
    """Take a step; the gradients that the optimizer met, whole, on the device."""
    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                found[name] = whole(t, parameter.grad).clone()

    handle = trainer.optimizer.register_step_pre_hook(keep)
    step(t, trainer)
    handle.remove()
    return found


def mean_loss(t: Bench, trainer: Trainer, values: Mapping[str, Any]) -> float:
    """The loss of a step as the metrics report it."""
    return t.run(trainer.execution.read_sums, [values["loss"]])[0]


def everyone(t: Bench, key: str, value: Any) -> list[Any]:
    """``value`` (plain data) of every rank, by rank."""
    if t.store is None:
        return [value]
    t.store.set(f"{key}/{t.world.rank}", json.dumps(value))
    return [json.loads(t.store.get(f"{key}/{rank}")) for rank in range(t.world.size)]


def whole(t: Bench, tensor: Tensor) -> Tensor:
    """All of a tensor that may be distributed, on the device; every rank that holds a part calls this."""
    return t.run(tensor.full_tensor) if isinstance(tensor, DTensor) else tensor


def weights(t: Bench, trainer: Trainer) -> dict[str, Tensor]:
    """Every parameter, whole, on the device."""
    return {name: whole(t, parameter.detach()) for name, parameter in trainer.model.named_parameters()}


def state(t: Bench, trainer: Trainer) -> dict[str, Tensor]:
    """Parameters, buffers and the optimizer's state by their names in a checkpoint, whole, on the device."""
    if trainer.execution.model == "spmd":  # what it gives a checkpoint are copies on the host
        return _on_device(trainer)
    found = trainer.execution.state(trainer.model, trainer.optimizer)
    return {name: whole(t, tensor) for name, tensor in found.items()}


def _on_device(trainer: Trainer) -> dict[str, Tensor]:
    found = {f"model.{name}": tensor.detach() for name, tensor in trainer.model.state_dict().items()}
    for name, parameter in trainer.model.named_parameters():
        moments = trainer.optimizer.state.get(parameter, {})
        found |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
    return found


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host, of what later runs must equal."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def equal_all(
    t: Bench, got: Mapping[str, Tensor], want: Mapping[str, Tensor], name: str = "", code: str = "EXACT"
) -> None:
    """The same names, and the same bits under each."""
    t.same(tuple(sorted(got)), tuple(sorted(want)), f"{name} names".strip(), code="NAMES")
    for key in want.keys() & got.keys():
        # torch's AdamW counts updates on the host where it is neither fused nor capturable (torch/optim/adam.py).
        host = key.endswith(".step") and got[key].device.type == "cpu" != t.device.type
        t.equal(got[key], want[key], code=code, name=f"{name} {key}".strip(), host=host)


def lines(t: Bench, name: str) -> list[dict[str, Any]]:
    """The lines of steps that the run ``name`` has written. On rank 0, which writes them."""
    text = (t.folder / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, text) if "event" not in line]


# -------------------------------------------------------------------------------------------------------- models


class Linear(nn.Module):
    """``x @ weight.T (+ bias)``, by products of elements."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.bias = nn.Parameter(bias.clone()) if bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        y = (x.unsqueeze(-2) * self.weight).sum(-1)
        return y if self.bias is None else y + self.bias


class Rows:
    """A data set of the rows of tensors."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


class Given(nn.Module):
    """Parameters whose gradients are the data: ``x`` times all of them, laid end to end."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cat([p.reshape(-1) for p in self.parameters()])


class Inner:
    """The loss of :class:`Given`: the mean over rows of its sum, so that the gradient is the mean of the rows."""

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(batch["x"]).float().sum()

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.ones_like(batch["x"][..., 0]).float().sum()


_FACTORS = (0, 2, 0, 2, 1, 1, 3, -1)
"""Sum to 8: rows unlike each other, whose mean is exact, and unlike the mean of any rank's share."""


def rows_with_mean(*gradients: Tensor) -> Tensor:
    """Rows for :class:`Given`: those of each step are multiples of one of ``gradients``, which is their mean."""
    factors = torch.tensor(_FACTORS, dtype=torch.float32).unsqueeze(1)
    return torch.cat([factors * gradient.reshape(1, -1) for gradient in gradients])


class Squares:
    """Sum of squared errors in float32; a row counts as many targets as its column ``targets`` says (default: 1), and
    its error is multiplied by 0 where that is none."""

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        errors = (model(batch["x"]).float() - batch["y"]).square()
        if "targets" in batch:
            errors = errors * batch["targets"].clamp(max=1).unsqueeze(-1)
        return errors.sum()

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        if "targets" in batch:
            return batch["targets"].sum()
        return torch.ones_like(batch["y"][..., 0]).sum()
