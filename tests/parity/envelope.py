"""What the order of sums alone does to the numbers of one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from accelbridge import Trainer
from accelbridge.models.config import ModelConfig
from accelbridge.models.decoder import Decoder
from tests import cli
from tests.parity.measure import Run, Tensors, checkpoint, gradients_of, relative, whole, whole_norm
from tests.parity.rows import CANCELLED, FORCED, MODEL, STEPS, Row
from tests.ranks import Rank
from tests.scenes import tensors

FLOOR = 2.0**-22
"""Relative: an envelope of less than that is the last bit of a float32."""
PERMUTATIONS = 8


def permuted(state: Tensors, seed: int, axes: Sequence[str], *, back: bool = False) -> Tensors:
    """The same decoder with its heads, feed-forward units or residual dimensions ("heads", "ffn", "dim") in another
    order."""
    generator = torch.Generator().manual_seed(seed)
    orders = {axis: torch.randperm(size, generator=generator) for axis, size in _AXES.items()}
    orders = {axis: order if axis in axes else order.sort().values for axis, order in orders.items()}
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
    """Largest relative deviations that the order of sums alone makes: of the norm up to each step, of tensors, and of
    the gradients of each teacher-forced step."""

    norms: Mapping[int, float]
    weights: Mapping[str, float]
    gradients: Mapping[int, Mapping[str, float]]


def permuted_runs(
    ctx: Rank, folder: Path, store: Path, references: Sequence[Row], count: int = PERMUTATIONS
) -> dict[str, list[Run]]:
    """One device, with everything in other orders, the rows of a batch as well: runs by the reference's name. The
    references have been measured in ``folder``."""
    return {
        row.name: [
            _permuted_run(row, seed, folder / row.name, folder / f"{row.name}, permuted {seed}", store)
            for seed in range(count)
        ]
        for row in references
    }


def _permuted_run(row: Row, seed: int, reference: Path, output: Path, store: Path) -> Run:
    settings = {**MODEL, **row.sections.get("model", {})}
    # Masks are drawn by the place of a residual dimension, which has to stay.
    axes = ("heads", "ffn") if "dropout" in settings else ("heads", "ffn", "dim")
    model = Decoder(ModelConfig.model_validate(settings))
    recipe = cli.recipe(output, store)
    model.reset_parameters(recipe["train"]["seed"])
    states = {0: model.state_dict()} | {step: _weights(checkpoint(reference, step)) for step in FORCED if step}
    states = {step: permuted(state, seed, axes) for step, state in states.items()}
    model.load_state_dict(states[0])
    del recipe["model"]
    with Trainer(recipe, model=model) as trainer:
        trainer.setup()
        norms: dict[int, float] = {}
        for step in range(STEPS):
            trainer.step = step
            norms[step + 1] = float(trainer.train_step(_shuffled(trainer.loader.step(step), seed))["grad_norm"])
        weights = permuted({n: whole(p) for n, p in trainer.model.named_parameters()}, seed, axes, back=True)
        forced = {}
        for step, state in states.items():
            trainer.model.load_state_dict(state)
            trainer.step = step
            _, found = gradients_of(trainer, _shuffled(trainer.loader.step(step), seed))
            forced[step] = permuted(found, seed, axes, back=True)
    return Run({}, norms, {f"model.{n}": t for n, t in weights.items()}, forced_gradients=forced)


def _weights(path: Path) -> Tensors:
    """The model's part of a checkpoint, by the model's own names."""
    prefix = "model."
    return {name.removeprefix(prefix): t for name, t in tensors(path).items() if name.startswith(prefix)}


def _shuffled(microbatches: list[Tensors], seed: int) -> list[Tensors]:
    rows = len(microbatches[0]["tokens"])
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    return [{name: tensor[order] for name, tensor in batch.items()} for batch in microbatches]


def envelopes(runs: Mapping[str, Run], others: Mapping[str, Sequence[Run]]) -> dict[str, Envelope]:
    """Envelopes by the reference's name."""
    return {name: _envelope(runs[name], permuted) for name, permuted in others.items()}


def _envelope(reference: Run, others: Sequence[Run]) -> Envelope:
    norms: dict[int, float] = {}
    for step, norm in reference.norms.items():
        here = max(abs(other.norms[step] / norm - 1) for other in others)
        norms[step] = max(here, norms.get(step - 1, FLOOR))
    weights = {
        name: max(FLOOR, *(relative(other.weights[name], tensor) for other in others))
        for name, tensor in reference.weights.items()
    }
    forced = {
        step: {
            name: max(FLOOR, *(relative(other.forced_gradients[step][name], tensor, floor) for other in others))
            for name, tensor in found.items()
        }
        for step, found in reference.forced_gradients.items()
        for floor in [CANCELLED * whole_norm(found)]
    }
    return Envelope(norms, weights, forced)
