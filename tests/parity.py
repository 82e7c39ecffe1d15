"""The parity table: what every layout does to the numbers of one training run.

    python -m tests.parity                     measure all rows that this environment can run, write docs/parity.md

Every row trains the same small decoder in float32 from the same seed, without a seed checkpoint, and is compared
with one device:

    loss       20 free-running steps, largest relative difference
    norm       global gradient norm at steps 1, 6, 11 and 16, each from the reference's weights (teacher-forced)
    gradient   every tensor's gradient at those steps, ||ours - reference|| / ||reference||, the largest
    free norm  norms of the 20 free-running steps, as a multiple of the envelope
    weights    every tensor after 20 steps, as a multiple of the envelope
    same       resumed at step 10 on the same layout: losses and all state bitwise equal to the unbroken run
    moved      resumed at step 10 from the checkpoint of the row above: losses 11 to 20 against the reference

The envelope is what the order of sums alone does to one device: the largest deviation among runs whose batch rows,
attention heads, feed-forward units and residual dimensions are permuted, which changes no sum but its order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accelbridge import Trainer
from accelbridge.checkpoint.load import load
from accelbridge.checkpoint.manifest import complete
from accelbridge.models.config import ModelConfig
from accelbridge.models.decoder import Decoder
from tests import cli
from tests.ranks import Rank, run_ranks
from tests.scenes import tensors

Sections = Mapping[str, Mapping[str, Any]]
Tensors = dict[str, Tensor]

MODEL = {"vocab_size": 260, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 4, "ffn_dim": 64}
STEPS = 20
SAVED = 10
FORCED = (0, 5, 10, 15)
"""Updates before each teacher-forced step; 0 is the initialisation."""

LOSS = 1e-5
GRADIENT = 1e-6
ENVELOPE = 4.0
FLOOR = 2.0**-22
"""Relative: an envelope of less than that is the last bit of a float32."""
PERMUTATIONS = 8


@dataclass(frozen=True)
class Row:
    """One line of the table. ``reference`` names the row of one device with the same mathematics."""

    name: str
    devices: int
    sections: Sections = field(default_factory=dict)
    reference: str = "1 device"


def _layout(**parallel: Any) -> Sections:
    return {"parallel": parallel}


TIED: Sections = {"model": {"tie_embeddings": True}}
DROPOUT: Sections = {"model": {"dropout": 0.1}}
ACCUMULATE: Sections = {"train": {"microbatch_size": 1}}
TP_SP = _layout(tp=2, sequence_parallel=True)

ROWS: tuple[Row, ...] = (
    Row("1 device", 1),
    Row("replicate 2", 2, _layout(dp_replicate=2)),
    Row("shard 2, ZeRO 1", 2, _layout(zero=1)),
    Row("shard 2, ZeRO 2", 2, _layout(zero=2)),
    Row("shard 2, ZeRO 3", 2, _layout(zero=3)),
    Row("hybrid 2x2", 4, _layout(dp_replicate=2)),
    Row("tp 2", 2, _layout(tp=2)),
    Row("tp 2, sequence parallel", 2, _layout(tp=2, sequence_parallel=True)),
    Row("shard 2 x tp 2", 4, _layout(tp=2)),
    Row("replicate 2 x tp 2, sequence parallel", 4, _layout(dp_replicate=2, tp=2, sequence_parallel=True)),
    Row("tp 4", 4, _layout(tp=4)),
    Row("accumulation 2, ZeRO 1", 2, {**_layout(zero=1), "train": {"microbatch_size": 2}}),
    Row("accumulation 4, ZeRO 3", 2, {"train": {"microbatch_size": 1}}),
    Row("accumulation 4, shard 2 x tp 2", 4, {**_layout(tp=2), "train": {"microbatch_size": 1}}),
    Row("tied, 1 device", 1, TIED, "tied, 1 device"),
    Row("tied, shard 2 x tp 2", 4, {**TIED, **_layout(tp=2)}, "tied, 1 device"),
    Row("dropout 0.1, 1 device", 1, DROPOUT, "dropout 0.1, 1 device"),
    Row("dropout 0.1, shard 2, accumulation 4", 2, {**DROPOUT, **ACCUMULATE}, "dropout 0.1, 1 device"),
    Row("dropout 0.1, shard 2 x tp 2, sequence parallel", 4, {**DROPOUT, **TP_SP}, "dropout 0.1, 1 device"),
)


# ------------------------------------------------------------------------------------------------- measuring


@dataclass
class Run:
    """What one row did, on rank 0."""

    losses: dict[int, float]
    norms: dict[int, float]
    weights: Tensors
    forced_norms: dict[int, float] = field(default_factory=dict)
    forced_gradients: dict[int, Tensors] = field(default_factory=dict)
    same: str = ""
    """How the run resumed on the same layout differs; "" if it doesn't."""
    moved_losses: dict[int, float] = field(default_factory=dict)


Fault = Callable[[], AbstractContextManager[Any]]
"""A deliberate fault, by patches of classes; see tests/test_parity.py."""


def measure(row: Row, folder: Path, store: Path, previous: str, fault: Fault = nullcontext) -> Run:
    """Run one row on this rank; ``previous`` is the row whose checkpoint it takes over."""
    own, resumed = folder / row.name, folder / f"{row.name}, resumed"
    with fault():
        _fit(row, own, store)
        run = Run(*_trajectory(own), weights=_weights(own))
        with _trainer(row, folder / f"{row.name}, forced", store) as trainer:
            for step in FORCED:
                run.forced_norms[step], run.forced_gradients[step] = _forced(trainer, folder / row.reference, step)
        _fit(row, resumed, store, resume=_checkpoint(own, SAVED))
        run.same = _difference(resumed, own)
        if previous:
            moved = folder / f"{row.name}, moved"
            _fit(row, moved, store, resume=_checkpoint(folder / previous, SAVED))
            run.moved_losses = _trajectory(moved)[0]
    return run


def _trainer(row: Row, output: Path, store: Path, resume: str | Path = "none") -> Trainer:
    sections = {name: dict(values) for name, values in row.sections.items()}
    sections.setdefault("checkpoint", {}).update(interval=5, keep=9, asynchronous=False)
    sections["model"] = {**MODEL, **sections.get("model", {})}
    os.environ["TORCHELASTIC_RUN_ID"] = output.name
    trainer = Trainer(cli.recipe(output, store, **sections), resume=resume)
    trainer.setup()
    return trainer


def _fit(row: Row, output: Path, store: Path, resume: str | Path = "none") -> None:
    with _trainer(row, output, store, resume) as trainer:
        trainer.fit()


def _forced(trainer: Trainer, reference: Path, step: int) -> tuple[float, Tensors]:
    """Norm and gradients (as the optimizer meets them, clipped) of one step from the reference's state."""
    if step:
        state = {name: t for name, t in trainer._state().items() if not name.startswith("rng.")}
        load(_checkpoint(reference, step), state, trainer.execution.control_group)
        trainer._restore(state)
    trainer.step = step
    gradients: Tensors = {}
    with _before(trainer.optimizer, lambda: gradients.update(_gradients(trainer.model))):
        values = trainer.train_step(trainer.loader.step(step))
    return float(values["grad_norm"]), gradients


@contextmanager
def _before(optimizer: torch.optim.Optimizer, do: Callable[[], None]) -> Iterator[None]:
    handle = optimizer.register_step_pre_hook(lambda *_: do())
    try:
        yield
    finally:
        handle.remove()


def _gradients(model: nn.Module) -> Tensors:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the host."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().clone()


def _trajectory(output: Path) -> tuple[dict[int, float], dict[int, float]]:
    steps = cli.steps_of(output)
    return {s: line["loss"] for s, line in steps.items()}, {s: line["grad_norm"] for s, line in steps.items()}


def _checkpoint(output: Path, step: int) -> Path:
    return next(path for path in complete(output / "checkpoints") if path.name == f"step_{step}")


def _weights(output: Path) -> Tensors:
    return {name: t for name, t in tensors(_checkpoint(output, STEPS)).items() if name.startswith("model.")}


def _difference(ours: Path, theirs: Path) -> str:
    """The first thing in which two runs that should be equal bit by bit are not."""
    losses, expected = _trajectory(ours)[0], _trajectory(theirs)[0]
    if wrong := [step for step, loss in losses.items() if loss != expected[step]]:
        return f"loss of step {wrong[0]}"
    a, b = tensors(_checkpoint(ours, STEPS)), tensors(_checkpoint(theirs, STEPS))
    return next((name for name in b if name not in a or not torch.equal(a[name], b[name])), "")


def measure_all(ctx: Rank, folder: Path, store: Path, work: list[tuple[Row, str]], fault: Fault) -> dict[str, Run]:
    """One rank of several rows, one after the other in the same processes."""
    ctx.launched()
    runs = {row.name: measure(row, folder, store, previous, fault) for row, previous in work}
    return runs if ctx.rank == 0 else {}


def run_rows(rows: Sequence[Row], folder: Path, store: Path, fault: Fault = nullcontext) -> dict[str, Run]:
    """Run rows on real processes, those of one device first, since they are the references."""
    runs: dict[str, Run] = {}
    done: dict[str, str] = {}
    for devices in sorted({row.devices for row in rows}):
        work: list[tuple[Row, str]] = []
        for row in (row for row in rows if row.devices == devices):
            work.append((row, done.get(row.reference, "")))
            done[row.reference] = row.name
        runs |= run_ranks(measure_all, devices, folder, store, work, fault, timeout=600)[0]
    return runs


# ------------------------------------------------------------------------------------------------- the envelope


def permuted(state: Tensors, seed: int, *, back: bool = False) -> Tensors:
    """The same decoder with its heads, feed-forward units and residual dimensions in another order."""
    generator = torch.Generator().manual_seed(seed)
    orders = {axis: torch.randperm(size, generator=generator) for axis, size in _AXES.items()}
    heads = orders["heads"].unsqueeze(1) * _HEAD_DIM + torch.arange(_HEAD_DIM)
    orders["heads"] = heads.flatten()
    if back:
        orders = {axis: order.argsort() for axis, order in orders.items()}
    return {name: _reordered(name, tensor, orders) for name, tensor in state.items()}


_HEAD_DIM = MODEL["dim"] // MODEL["heads"]
_AXES = {"heads": MODEL["heads"], "ffn": MODEL["ffn_dim"], "dim": MODEL["dim"]}
_LIES = {
    "embed": (None, "dim"),
    "head": (None, "dim"),
    **dict.fromkeys(("q", "k", "v"), ("heads", "dim")),
    "o": ("dim", "heads"),
    **dict.fromkeys(("gate", "up"), ("ffn", "dim")),
    "down": ("dim", "ffn"),
    **dict.fromkeys(("norm", "attention_norm", "ffn_norm"), ("dim",)),
}
"""The axes of each parameter, by the module that owns it."""


def _reordered(name: str, tensor: Tensor, orders: Mapping[str, Tensor]) -> Tensor:
    for dim, axis in enumerate(_LIES[name.removesuffix(".weight").rpartition(".")[2]]):
        if axis is not None:
            tensor = tensor.index_select(dim, orders[axis])
    return tensor


@dataclass(frozen=True)
class Envelope:
    """Largest relative deviations that the order of sums alone makes: of the norm up to each step, of tensors."""

    norms: Mapping[int, float]
    weights: Mapping[str, float]


def permuted_runs(ctx: Rank, folder: Path, store: Path) -> list[Run]:
    """One device, with everything in other orders: steps of the plain recipe whose rows are permuted as well."""
    runs = []
    initial = {n: p.detach().clone() for n, p in _decoder().named_parameters()}
    for seed in range(PERMUTATIONS):
        model = _decoder()
        model.load_state_dict(permuted(initial, seed))
        recipe = cli.recipe(folder / f"permuted {seed}", store)
        del recipe["model"]
        with Trainer(recipe, model=model) as trainer:
            trainer.setup()
            norms: dict[int, float] = {}
            for step in range(STEPS):
                trainer.step = step
                norms[step + 1] = float(trainer.train_step(_shuffled(trainer.loader.step(step), seed))["grad_norm"])
            weights = permuted({n: whole(p) for n, p in trainer.model.named_parameters()}, seed, back=True)
        runs.append(Run({}, norms, {f"model.{n}": t for n, t in weights.items()}))
    return runs


def _decoder() -> Decoder:
    model = Decoder(ModelConfig.model_validate(MODEL))
    model.reset_parameters(cli.recipe(Path(), Path())["train"]["seed"])
    return model


def _shuffled(microbatches: list[Tensors], seed: int) -> list[Tensors]:
    rows = len(microbatches[0]["tokens"])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return [{name: tensor[order] for name, tensor in batch.items()} for batch in microbatches]


def envelope(reference: Run, others: Sequence[Run]) -> Envelope:
    norms: dict[int, float] = {}
    for step, norm in reference.norms.items():
        here = max(abs(other.norms[step] / norm - 1) for other in others)
        norms[step] = max(here, norms.get(step - 1, FLOOR))
    weights = {
        name: max(FLOOR, *(relative(other.weights[name], tensor) for other in others))
        for name, tensor in reference.weights.items()
    }
    return Envelope(norms, weights)


# ------------------------------------------------------------------------------------------------- comparing


def relative(ours: Tensor, theirs: Tensor) -> float:
    """``||ours - theirs|| / ||theirs||`` in float64."""
    a, b = ours.double(), theirs.double()
    return float((a - b).norm() / b.norm().clamp(min=torch.finfo(torch.float64).tiny))


@dataclass(frozen=True)
class Cells:
    """One row's figures; see the module's text."""

    loss: float
    norm: float
    gradient: float
    free_norm: float
    weights: float
    same: str
    moved: float | None

    def faults(self, loss: float = LOSS) -> list[str]:
        """The names of the cells outside their bounds; NaN is outside."""
        bounds = {"loss": loss, "norm": GRADIENT, "gradient": GRADIENT, "free_norm": ENVELOPE, "weights": ENVELOPE}
        found = [name for name, bound in bounds.items() if not getattr(self, name) <= bound]
        found += ["same"] if self.same else []
        return found + (["moved"] if self.moved is not None and not self.moved <= loss else [])


def compare(run: Run, reference: Run, bounds: Envelope) -> Cells:
    def losses(ours: Mapping[int, float]) -> float:
        return max(abs(loss / reference.losses[step] - 1) for step, loss in ours.items())

    forced = [(run.forced_gradients[s], reference.forced_gradients[s]) for s in FORCED]
    assert all(a.keys() == b.keys() for a, b in forced)
    assert run.weights.keys() == reference.weights.keys()
    return Cells(
        loss=losses(run.losses),
        norm=max(abs(run.forced_norms[s] / reference.forced_norms[s] - 1) for s in FORCED),
        gradient=max(relative(a[name], b[name]) for a, b in forced for name in b),
        free_norm=max(abs(run.norms[s] / n - 1) / bounds.norms[s] for s, n in reference.norms.items()),
        weights=max(relative(run.weights[n], t) / bounds.weights[n] for n, t in reference.weights.items()),
        same=run.same,
        moved=losses(run.moved_losses) if run.moved_losses else None,
    )
