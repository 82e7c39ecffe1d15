"""Activations, parameters and moments on the host: no bit of a run changes, and the device's memory falls."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from accelbridge import Trainer
from accelbridge.cpu.backend import CpuBackend
from accelbridge.errors import ConfigError, OutOfMemoryError
from accelbridge.memory.activations import SMALLEST, ActivationOffload
from accelbridge.memory.host_pool import HostPool
from tests import cli
from tests.parity.rows import HOST, MODEL, ROWS, Row
from tests.ranks import Rank, run_ranks

pytestmark = pytest.mark.usefixtures("unbound")

ELEMENTS = SMALLEST // 4


@pytest.fixture
def moving() -> ActivationOffload:
    offload = CpuBackend().offload
    return ActivationOffload(offload, "cpu", HostPool(offload))


class Units(nn.Module):
    """Each keeps its input, a view of it and what lies between; the views are of odd strides."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(_Unit() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


class _Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, 128) / 8)
        self.register_buffer("scale", torch.rand(ELEMENTS // 128, 128))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.weight).tanh() * cast(Tensor, self.scale)[: x.shape[0]]
        first, second = y[:, ::2], y[:, 1::2].t()
        return x + torch.cat((first * second.t(), first.exp() / 9), dim=1)


def gradients(model: Units, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_gradients_keep_their_bits_and_the_pool_its_buffers(moving: ActivationOffload) -> None:
    model, x = Units(), torch.randn(ELEMENTS // 128, 128)
    want = gradients(model, x)
    for unit in model.units:
        moving.apply(unit)
    held = 0
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, x), want))
        gc.collect()
        assert moving.pool.used == 0
        assert held in (0, moving.pool.high_water)
        held = moving.pool.high_water
    assert held >= 3 * 3 * SMALLEST  # in each unit: its input, what tanh put out, and the parts


def test_each_piece_of_memory_goes_once_and_parameters_stay(moving: ActivationOffload, monkeypatch: Any) -> None:
    model, x = Units(1), torch.randn(ELEMENTS // 128, 128)
    moving.apply(model.units[0])
    sent: list[Tensor] = []
    send = moving.send
    monkeypatch.setattr(moving, "send", lambda whole: (sent.append(whole), send(whole))[1])
    gradients(model, x)
    places = [whole.data_ptr() for whole in sent]
    assert len(set(places)) == len(places)
    assert x.data_ptr() in places
    kept = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not kept & set(places)


def test_at_most_two_units_are_on_the_device(moving: ActivationOffload, monkeypatch: Any) -> None:
    """Of many units: the one that runs, and the one before it, whose memory is on its way."""
    model, x = Units(8), torch.randn(ELEMENTS // 128, 128)
    sent: list[ref[Tensor]] = []
    send = moving.send
    monkeypatch.setattr(moving, "send", lambda whole: (sent.append(ref(whole)), send(whole))[1])
    for unit in model.units:
        moving.apply(unit)
        unit.register_forward_hook(lambda *_: alive.append(sum(whole() is not None for whole in sent)))
    alive: list[int] = []
    model(x).sum().backward()
    assert max(alive) == alive[1] == alive[-1]


def test_a_second_backward_pass_and_a_dropped_graph(moving: ActivationOffload) -> None:
    model, x = Units(), torch.randn(ELEMENTS // 128, 128)
    want = gradients(model, x)
    for unit in model.units:
        moving.apply(unit)
    model(x)  # dropped
    loss = model(x).square().mean()
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True) if p.grad is not None)
    del loss
    gc.collect()
    assert moving.pool.used == 0


def test_what_is_changed_in_place_while_it_leaves_is_refused(moving: ActivationOffload) -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = y.square()
            y.detach().add_(1)
            return z

    model = nn.Sequential(Changes(), nn.Tanh())
    for unit in model:
        moving.apply(unit)
    with pytest.raises(RuntimeError, match="changed in place while it was on its way"):
        model(torch.randn(ELEMENTS, requires_grad=True)).sum().backward()


def test_the_pool_keeps_to_its_cap() -> None:
    pool = HostPool(CpuBackend().offload, cap=3 << 20)
    first, second = pool.take(1 << 20), pool.take(2 << 20)
    with pytest.raises(OutOfMemoryError, match=r"3.0 MiB of the 3.0 MiB that memory.host_limit allows"):
        pool.take(1)
    pool.give(second)
    third = pool.take(1 << 20)  # of another size: what is free makes way
    pool.give(first)
    assert pool.take((1 << 20) - 5).data_ptr() == first.data_ptr()
    assert pool.high_water == 3 << 20
    del third


# --------------------------------------------------------------------------------------------------- the trainer

ON_HOST: dict[str, dict[str, Any]] = {
    "activations": {"activations": "host"},
    "activations, selective": {"activations": "host", "recompute": "selective"},
    "activations, full": {"activations": "host", "recompute": "full"},
    "parameters": {"parameters": "host", "optimizer": "host"},
    "everything": {"activations": "host", "parameters": "host", "optimizer": "host"},
}
SAMPLE = ("1 device", "shard 2, ZeRO 3", "tp 2, sequence parallel")
"""Of every run of all tests; the others are in a full one."""
HERE = [row for row in ROWS if row.evidence == HOST and not row.torch_dropout]


def recipe_of(row: Row, folder: Path, store: Path, memory: dict[str, Any], steps: int) -> dict[str, Any]:
    """The recipe of a parity row, of a width at which activations are large enough to move."""
    sections = {name: dict(values) for name, values in row.sections.items()}
    sections["backend"] = {"name": "cpu", **sections.get("backend", {})}
    sections["memory"] = {**sections.get("memory", {}), **memory}
    sections["train"] = {**sections.get("train", {}), "steps": steps}
    recipe = cli.recipe(folder, store, **sections, metrics={"interval": 1})
    recipe["model"] = {**MODEL, "dim": 64, "layers": 3, **sections.get("model", {})}
    return recipe


def fit_all(ctx: Rank, row: Row, folder: Path, store: Path, steps: int) -> dict[str, int]:
    """Every form on this rank; the bytes of host memory that waiting activations took in each."""
    ctx.launched()
    waited: dict[str, int] = {}
    for name, memory in {"device": {}, **ON_HOST}.items():
        os.environ["TORCHELASTIC_RUN_ID"] = name
        trainer = Trainer(recipe_of(row, folder / name, store, memory, steps))
        trainer.fit()
        waited[name] = trainer.host_pool.high_water if trainer.host_pool is not None else 0
    return waited


def same_bits(row: Row, folder: Path, store: Path, steps: int) -> None:
    for waited in run_ranks(fit_all, row.devices, row, folder, store, steps, timeout=600):
        assert {name for name, size in waited.items() if size} == {name for name in ON_HOST if name != "parameters"}
        assert waited["activations, full"] < waited["activations, selective"] < waited["activations"]
    want = cli.steps_of(folder / "device")
    assert len(want) == steps
    for name in ON_HOST:
        for step, line in cli.steps_of(folder / name).items():
            assert (line["loss"], line["grad_norm"]) == (want[step]["loss"], want[step]["grad_norm"]), (name, step)


@pytest.mark.parametrize("row", [row for row in HERE if row.name in SAMPLE], ids=lambda row: row.name)
def test_losses_keep_their_bits(tmp_path: Path, store: Path, row: Row) -> None:
    same_bits(row, tmp_path, store, 3)


@pytest.mark.full
@pytest.mark.parametrize("row", HERE, ids=lambda row: row.name)
def test_losses_keep_their_bits_in_every_layout(tmp_path: Path, store: Path, row: Row) -> None:
    same_bits(row, tmp_path, store, 20)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ({"activations": "nvme"}, "memory.activations nvme asked; it is not supported yet; set memory.activations: h"),
        (
            {"optimizer": "host"},
            "memory.optimizer host asked with memory.parameters device; .* memory.parameters: host",
        ),
        ({"host_limit": "1GiB"}, "memory.host_limit asked; .* set memory.activations: host"),
        ({"activations": "host", "host_limit": "much"}, 'host_limit asked as "much"'),
        ({"activations": "disk"}, "memory.activations"),
    ],
)
def test_bad_input(tmp_path: Path, store: Path, memory: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(recipe_of(HERE[0], tmp_path / "run", store, memory, 3))
    assert not (tmp_path / "run").exists()


def test_too_little_host_memory_ends_the_run_with_advice(tmp_path: Path, store: Path) -> None:
    memory = {"activations": "host", "host_limit": "100KB"}
    with pytest.raises(OutOfMemoryError, match=r"memory.host_limit allows are in use; raise memory.host_limit"):
        Trainer(recipe_of(HERE[0], tmp_path / "run", store, memory, 3)).fit()


def test_a_model_without_units_and_a_graph_are_refused(tmp_path: Path, store: Path) -> None:
    recipe = recipe_of(HERE[0], tmp_path / "run", store, {"activations": "host"}, 3)
    with pytest.raises(ConfigError, match=r"memory.activations host asked, which works on shard units"):
        Trainer({name: section for name, section in recipe.items() if name != "model"}, model=nn.Linear(2, 2))


def test_the_plan_says_where_things_lie(tmp_path: Path, store: Path) -> None:
    notes = Trainer(recipe_of(HERE[0], tmp_path / "run", store, ON_HOST["everything"], 3)).plan.notes
    assert any(note.startswith("activations: what a shard unit saves waits in") for note in notes)
    assert any(note.startswith("parameters, gradients and moments lie on the host") for note in notes)
