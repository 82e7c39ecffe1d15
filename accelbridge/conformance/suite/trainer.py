"""TRN: the sharded trainer, driven as a user drives it: a module, a data set and a recipe of one's own.

Most of it is training in integers, which every layout must do with the bits of float64 (oracle/training.py).
``torch.optim.SGD`` then stands in the place of the trainer's AdamW, whose roots are not exact; the rest of a step is
the trainer's own.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from accelbridge import Trainer, ops
from accelbridge.conformance.bench import Bench
from accelbridge.conformance.oracle import data, transformer
from accelbridge.conformance.oracle import training as oracle
from accelbridge.conformance.registry import case
from accelbridge.conformance.suite.trainer_support import (
    BATCH,
    RATE,
    Given,
    Inner,
    Linear,
    Rows,
    Squares,
    devices,
    equal_all,
    everyone,
    gradients,
    layouts,
    lines,
    mean_loss,
    on_host,
    rows_with_mean,
    state,
    step,
    trainer,
    weights,
    whole,
)
from accelbridge.errors import NonFiniteError

_INPUTS, _OUTPUTS, _STEPS = 6, 3, oracle.EXACT_UPDATES


def _signs(t: Bench, *shape: int, name: str) -> Tensor:
    return t.integers(*shape, low=-1, high=1, name=name)


def _exact_data(t: Bench, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, inputs and outputs in {-1, 0, 1}."""
    return (
        _signs(t, _OUTPUTS, _INPUTS, name="w"),
        _signs(t, rows, _INPUTS, name="x"),
        _signs(t, rows, _OUTPUTS, name="y"),
    )


# ------------------------------------------------------------------------------------------------ exact training


@case("TRN-001", "train")
def exact_linear(t: Bench) -> None:
    """Four steps of gradient descent on a linear model in integers, two microbatches each, equal float64 bit for bit.

    By ``fit``, with every part of the trainer's loop.
    """
    weight, x, y = _exact_data(t, BATCH * _STEPS)
    want = oracle.linear_descent(weight, x, y, RATE, oracle.in_order(len(x), BATCH, _STEPS))
    sections: dict[str, Any] = {"train": {"steps": _STEPS, "microbatch_size": max(1, BATCH // 2 // devices(t))}}
    with trainer(t, "fit", Linear(weight), Rows(x=x, y=y), loss=Squares(), sgd=RATE, **sections) as run:
        ended = t.run(run.fit)
        t.equal(weights(t, run)["weight"], want.weights[-1].float())
    t.same(ended.step, _STEPS, "steps", code="STEPS")
    losses = tuple(line["loss"] for line in lines(t, "fit"))[: oracle.EXACT_LOSSES]
    t.same(losses, tuple(want.losses[: oracle.EXACT_LOSSES]), "losses", code="LOSS")


def _exact_in(t: Bench, kinds: Mapping[str, Mapping[str, Any]]) -> None:
    """Weights after each of four steps, and the losses as all ranks are told them, in several layouts."""
    weight, x, y = _exact_data(t, BATCH * _STEPS)
    want = oracle.linear_descent(weight, x, y, RATE, oracle.in_order(len(x), BATCH, _STEPS))
    for name, parallel in kinds.items():
        with trainer(t, name, Linear(weight), Rows(x=x, y=y), loss=Squares(), sgd=RATE, parallel=parallel) as run:
            for number in range(_STEPS):
                values = step(t, run)
                t.equal(weights(t, run)["weight"], want.weights[number + 1].float(), name=f"step {number + 1}, {name}")
                if number < oracle.EXACT_LOSSES:
                    loss = mean_loss(t, run, values)
                    t.same(loss, want.losses[number], f"loss of step {number + 1}, {name}", code="LOSS")


@case("TRN-002", "train", worlds=(2, 4), group=False)
def exact_linear_sharded(t: Bench) -> None:
    """The same on several ranks, in every layout of data parallel and every ZeRO stage: all ranks have the bits of
    float64, and so those of one rank.

    With 3 rows of weights: shards of unequal size, and on 4 ranks an empty one.
    """
    _exact_in(t, layouts(t))


@case("TRN-020", "scale", worlds=(8,), group=False, timeout_s=300)
def exact_linear_grid(t: Bench) -> None:
    """Eight devices as 2 replicas of 4 shards and as 4 of 2: the same bits."""
    _exact_in(t, {f"{n} x {8 // n}": {"dp_replicate": n, "dp_shard": devices(t) // n} for n in (2, 4)})


class _TwoLayers(nn.Module):
    """Each layer is a shard unit of its own."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Linear(first), Linear(second)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).relu())


@case("TRN-003", "train", worlds=(2, 4), group=False)
def exact_gradients(t: Bench) -> None:
    """The gradients of a two-layer ReLU network in integers are exact, parameter by parameter, as the optimizer meets
    them."""
    first, second = _signs(t, 10, _INPUTS, name="first"), _signs(t, _OUTPUTS, 10, name="second")
    x, y = _signs(t, BATCH, _INPUTS, name="x"), _signs(t, BATCH, _OUTPUTS, name="y")
    of_first, of_second = oracle.two_layer_gradients(first, second, x, y)
    want = {"layers.0.weight": of_first.float(), "layers.1.weight": of_second.float()}
    for name, parallel in layouts(t).items():
        data_ = Rows(x=x, y=y)
        with trainer(t, name, _TwoLayers(first, second), data_, loss=Squares(), sgd=RATE, parallel=parallel) as run:
            equal_all(t, gradients(t, run), want, name)


@case("TRN-004", "train", worlds=(2, 4), group=False)
def accumulation(t: Bench) -> None:
    """A step of several microbatches has the bits of one batch, in every layout and ZeRO stage.

    16 rows a step, so that each of 4 ranks has 4; two steps.
    """
    batch, steps = 16, 2
    weight, x, y = _exact_data(t, batch * steps)
    want = oracle.linear_descent(weight, x, y, RATE, oracle.in_order(len(x), batch, steps))
    for name, parallel in layouts(t).items():
        for size in (1, 2):
            train = {"steps": steps, "global_batch_size": batch, "microbatch_size": size}
            label = f"{name}, microbatches of {size}"
            model, rows = Linear(weight), Rows(x=x, y=y)
            with trainer(t, label, model, rows, loss=Squares(), sgd=RATE, parallel=parallel, train=train) as run:
                for number in range(steps):
                    step(t, run)
                    t.equal(weights(t, run)["weight"], want.weights[number + 1].float(), name=f"{number + 1}, {label}")


# 12 rows: the second step takes the last four and the first four. The first step has no targets in its second half,
# that is on half of the ranks, the second none on the first of four ranks; sums are powers of two.
_TARGETS = (3, 1, 2, 2, 0, 0, 0, 0, 0, 0, 5, 3)


def _uneven(t: Bench) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight, x, y = _exact_data(t, len(_TARGETS))
    return weight, x, y, torch.tensor(_TARGETS, dtype=torch.float32)


@case("TRN-005", "train", worlds=(2, 4), group=False)
def uneven_targets(t: Bench) -> None:
    """Where ranks have other numbers of targets, and some none, and where the data end within a batch, every target of
    a step weighs the same: exact. So it is in evaluation, whose last batch is filled up."""
    weight, x, y, targets = _uneven(t)
    steps, few = 3, 5
    want = oracle.linear_descent(weight, x, y, RATE, oracle.in_order(len(x), BATCH, steps), targets)
    counts = torch.tensor([2, 0, 3, 1, 2], dtype=torch.float32)
    of_few = oracle.linear_descent(weight, x[:few], y[:few], RATE, [torch.arange(few)], counts).losses[0]
    for name, parallel in layouts(t, stages=(3,)).items():
        rows, held_out = Rows(x=x, y=y, targets=targets), Rows(x=x[:few], y=y[:few], targets=counts)
        sections: dict[str, Any] = {"parallel": parallel, "train": {"steps": steps}}
        with trainer(t, name, Linear(weight), rows, loss=Squares(), validation=held_out, sgd=RATE, **sections) as run:
            evaluated = t.run(run.evaluate)
            for number in range(steps):
                step(t, run)
                t.equal(weights(t, run)["weight"], want.weights[number + 1].float(), name=f"step {number + 1}, {name}")
        t.same(evaluated, of_few, f"evaluation, {name}", code="LOSS")


@case("TRN-007", "train", worlds=(2, 4), group=False)
def reported_loss(t: Bench) -> None:
    """The loss that ``fit`` reports, of training and of evaluation, is the mean over all ranks, on every rank."""
    weight, x, y, targets = _uneven(t)
    steps, few = 2, 5
    want = oracle.linear_descent(weight, x, y, RATE, oracle.in_order(len(x), BATCH, steps), targets)
    counts = torch.tensor([2, 0, 3, 1, 2], dtype=torch.float32)
    after = oracle.linear_descent(want.weights[-1], x[:few], y[:few], RATE, [torch.arange(few)], counts)
    for name, parallel in layouts(t, stages=(3,)).items():
        rows, held_out = Rows(x=x, y=y, targets=targets), Rows(x=x[:few], y=y[:few], targets=counts)
        sections: dict[str, Any] = {"parallel": parallel, "train": {"steps": steps}}
        with trainer(t, name, Linear(weight), rows, loss=Squares(), validation=held_out, sgd=RATE, **sections) as run:
            t.equal(weights(t, run)["weight"], weight, name=name)
            ended = t.run(run.fit)
        t.same(ended.loss, want.losses[-1], f"loss, {name}", code="LOSS")
        t.same(ended.validation_loss, after.losses[0], f"validation loss, {name}", code="LOSS")
        if t.world.rank == 0:
            t.same(tuple(line["loss"] for line in lines(t, name)), tuple(want.losses), f"lines, {name}", code="LOSS")


# ----------------------------------------------------------------------------------------- norms, shards, groups


def _clipped(t: Bench, shapes: Mapping[str, tuple[int, ...]], gradient: Tensor, norm: float) -> None:
    """One step whose gradient has the integer ``norm``: the norm is exact on every rank, clipping to half of it halves
    every element, and clipping above it changes none.

    Bound: the norm has 1e-6 added before it divides, as torch's clip_grad_norm_ does; 2^-20 of an update allows that.
    """
    start = {name: t.integers(*shape, name=name) for name, shape in shapes.items()}
    parts = dict(zip(shapes, gradient.split([math.prod(shape) for shape in shapes.values()]), strict=True))
    for name, parallel in layouts(t).items():
        for factor, limit in ((0.5, norm / 2), (1.0, norm * 2)):
            rows, sections = Rows(x=rows_with_mean(gradient)), {"parallel": parallel, "optimizer": {"clip_norm": limit}}
            label = f"{name}, clipped to {limit:g}"
            with trainer(t, label, Given(**start), rows, loss=Inner(), sgd=RATE, **sections) as run:
                t.equal(step(t, run)["grad_norm"], torch.tensor(norm), code="NORM", name=label)
                for key, found in weights(t, run).items():
                    update = RATE * factor * parts[key].reshape(shapes[key]).double()
                    # Exact without clipping; with it, the sum of numbers below 8 rounds too.
                    bound = (factor < 1) * (update.abs() * 2.0**-20 + 2.0**-22)
                    t.within(found, start[key].double() - update, bound, name=f"{label}, {key}")


@case("TRN-006", "train", worlds=(2, 4), group=False)
def global_norm(t: Bench) -> None:
    """Gradients are clipped by the norm over all shards of all parameters: 1, 2, 2, 4 and 0, 12, 0 make 13."""
    gradient = torch.tensor([1, 2, 2, 4, 0, 12, 0], dtype=torch.float32)
    _clipped(t, {"even": (4, 1), "uneven": (3, 1)}, gradient, 13.0)


@case("TRN-014", "train", worlds=(2, 4), group=False)
def uneven_shards(t: Bench) -> None:
    """Parameters that no number of ranks divides, smaller than it, or with empty shards, count each element once: norm
    and update are those of the whole.

    An odd vocabulary, one row, a vector of 3; 36 gradients of +-1 and 2 of 0 have the norm 6.
    """
    shapes = {"table": (5, 3), "row": (1, 4), "vector": (3,), "matrix": (7, 2), "pair": (2, 1)}
    gradient = t.integers(38, low=0, high=1, name="g") * 2 - 1
    gradient[torch.tensor([4, 20])] = 0
    _clipped(t, shapes, gradient, 6.0)


@case("TRN-010", "train", worlds=(2,), group=False)
def optimizer_groups(t: Bench) -> None:
    """After sharding, matrices are decayed and vectors are not, and a group's own rate and decay hold: four updates of
    AdamW equal float64 within the rounding of float32.

    Bound: AdamW.rounding in oracle/training.py. A decay that is wrong by 0.1 moves a weight of 1 by 0.1 of the rate.
    """
    shapes = {"matrix": (3, 2), "vector": (3,), "slow": (5, 2), "undecayed": (2, 2), "decayed": (5,)}
    start = {name: t.normal(*shape, name=name) for name, shape in shapes.items()}
    # Not small: a rounding of a gradient near 0 is a large part of it, which AdamW would make a large part of a step.
    steps = [t.uniform(sum(map(math.prod, shapes.values())), name=f"g{n}") + 0.5 for n in range(4)]
    steps = [(gradient * 16).round() / 16 for gradient in steps]
    optimizer = {
        "lr": 2.0**-4,
        "weight_decay": 0.1,
        "groups": [
            {"pattern": "slow", "lr_scale": 0.25},
            {"pattern": "undecayed", "weight_decay": 0.0},
            {"pattern": "decayed", "weight_decay": 0.5},
        ],
    }
    rules = {
        "matrix": oracle.AdamW(2.0**-4, decay=0.1),
        "vector": oracle.AdamW(2.0**-4),
        "slow": oracle.AdamW(2.0**-6, decay=0.1),
        "undecayed": oracle.AdamW(2.0**-4),
        "decayed": oracle.AdamW(2.0**-4, decay=0.5),
    }
    parts = [gradient.split([math.prod(shape) for shape in shapes.values()]) for gradient in steps]
    for name, parallel in layouts(t).items():
        rows = Rows(x=rows_with_mean(*steps))
        with trainer(t, name, Given(**start), rows, loss=Inner(), parallel=parallel, optimizer=optimizer) as run:
            for _ in steps:
                step(t, run)
            found = weights(t, run)
        for index, (key, rule) in enumerate(rules.items()):
            gradient = [part[index].reshape(shapes[key]) for part in parts]
            t.within(found[key], rule.run(start[key], gradient), rule.rounding(start[key], 4), name=f"{name}, {key}")


class _PartlyUsed(nn.Module):
    """A linear layer between one that is not to be trained and one that is not called."""

    def __init__(self, fixed: Tensor, weight: Tensor, unused: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Linear(fixed), Linear(weight), Linear(unused)])
        self.spare = nn.Parameter(unused.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


@case("TRN-012", "train", worlds=(2, 4), group=False)
def frozen_and_unused(t: Bench) -> None:
    """Frozen parameters keep their bits, under decay too; parameters that no rank uses get no gradient, keep their
    bits, and keep no rank waiting; what is trained moves.

    Two updates of the trainer's own AdamW; the frozen layer lies before the one that is trained, the unused ones beside
    it, in a unit of their own and in the root.
    """
    fixed, weight = _signs(t, 5, _INPUTS, name="fixed"), _signs(t, _OUTPUTS, 5, name="w")
    unused, x, y = t.normal(3, 3, name="unused"), _signs(t, 16, _INPUTS, name="x"), _signs(t, 16, _OUTPUTS, name="y")
    optimizer = {"lr": 0.125, "weight_decay": 0.5, "groups": [{"pattern": "layers.0.*", "frozen": True}]}
    kept = {"layers.0.weight": fixed, "layers.2.weight": unused, "spare": unused}
    for name, parallel in layouts(t).items():
        model, rows = _PartlyUsed(fixed, weight, unused), Rows(x=x, y=y)
        with trainer(t, name, model, rows, loss=Squares(), parallel=parallel, optimizer=optimizer) as run:
            met = [tuple(gradients(t, run)), tuple(gradients(t, run))]
            found = weights(t, run)
        for key, want in kept.items():
            t.equal(found[key], want, name=f"{name}, {key}")
        moved = (found["layers.1.weight"].to("cpu") - weight).abs().max()
        t.at_least(float(moved), 0.125, f"way of the trained layer, {name}", code="MOVED")
        t.same(met, [("layers.1.weight",)] * 2, f"gradients, {name}", code="GRADIENT")


class _Tied(nn.Module):
    """A table that is also the output layer."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.embed = nn.Embedding(table.shape[0], table.shape[1])
        self.head = Linear(table)
        self.embed.register_parameter("weight", self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


@case("TRN-013", "train", worlds=(2, 4), group=False)
def tied_embeddings(t: Bench) -> None:
    """A parameter that is used twice stays one when it is sharded: two exact updates by the sum of both gradients, seen
    by both uses."""
    steps = 2
    table, tokens = _signs(t, 5, 4, name="table"), t.integers(BATCH * steps, low=0, high=4, name="t", dtype=torch.int64)
    y = _signs(t, len(tokens), 5, name="y")
    want = oracle.tied_descent(table, tokens, y, RATE, oracle.in_order(len(tokens), BATCH, steps)).float()
    for name, parallel in layouts(t, stages=(1, 3)).items():
        with trainer(t, name, _Tied(table), Rows(x=tokens, y=y), loss=Squares(), sgd=RATE, parallel=parallel) as run:
            for _ in range(steps):
                step(t, run)
            found = dict(run.model.named_parameters(remove_duplicate=False))
            for use in ("embed.weight", "head.weight"):
                t.equal(whole(t, found[use].detach()), want, name=f"{name}, {use}")


# --------------------------------------------------------------------------------------------- precision, overflow


class _OfOps(nn.Module):
    """``ops.linear``: some devices round parameters to bfloat16 in the ops alone."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x.to(torch.bfloat16), self.weight)


class _Weighed:
    """Sum of the outputs, each times its weight in ``y``: the gradient is the mean of the products of y and x."""

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return (model(batch["x"]).float() * batch["y"]).sum()

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.ones_like(batch["y"][..., 0]).sum()


_SHARES = (3, -1, 2, 4)
"""Sum to 8, which is the number of rows of a step."""


def _updates_add_up(
    t: Bench, sizes: Tensor, signs: Tensor, model: Callable[[], nn.Module], rows: Rows, loss: Any
) -> None:
    """In every layout, after 64 updates of 2^-9 of each weight."""
    want = sizes - signs * sizes * 64 * 2.0**-9
    for name, parallel in layouts(t, stages=(3,)).items():
        sections: dict[str, Any] = {
            "parallel": parallel,
            "precision": {"compute": "bfloat16", "params": "float32"},
            "optimizer": {"lr": 2.0**-9},
            "train": {"steps": 64},
        }
        with trainer(t, name, model(), rows, loss=loss, sgd=1.0, **sections) as run:
            for _ in range(64):
                step(t, run)
            t.equal(weights(t, run)["weight"], want, name=name)


def _master_weights_of_ops(t: Bench) -> None:
    """With bfloat16 compute the parameters stay float32: 64 updates of 2^-9 of a weight, each less than half of a
    bfloat16 step, add up exactly. The model calls ``ops.linear``; each row of the data reaches one column."""
    t.require("linear", "bfloat16")
    sizes = torch.exp2(t.integers(7, 2, low=-2, high=2, name="e"))
    signs = t.integers(7, 2, low=0, high=1, name="s") * 2 - 1
    shares = torch.tensor(_SHARES, dtype=torch.float32).unsqueeze(1)
    x = torch.eye(2).repeat_interleave(len(_SHARES), 0)
    y = torch.cat([shares * column for column in (signs * sizes).t()])
    _updates_add_up(t, sizes, signs, lambda: _OfOps(sizes), Rows(x=x, y=y), _Weighed())


@case("TRN-008", "train", worlds=(2,), group=False, spmd=_master_weights_of_ops)
def master_weights(t: Bench) -> None:
    """With bfloat16 compute the parameters stay float32: 64 updates of 2^-9 of a weight, each less than half of a
    bfloat16 step, add up exactly."""
    t.require("linear", "bfloat16")
    sizes = torch.exp2(t.integers(7, 2, low=-2, high=2, name="e"))
    signs = t.integers(7, 2, low=0, high=1, name="s") * 2 - 1
    rows = Rows(x=rows_with_mean((signs * sizes).flatten()))
    _updates_add_up(t, sizes, signs, lambda: Given(weight=sizes), rows, Inner())


_HALF = (("linear", "float16", ""),)


@case("TRN-011", "train", worlds=(2, 4), group=False, optional=_HALF)
def overflow_on_one_rank(t: Bench) -> None:
    """Where the scaled gradients of float16 overflow on one rank, in one row of a parameter and so on one shard of it,
    every rank skips that update, the scale halves once, the parameters keep their bits, and training goes on exactly.
    """
    t.require("linear", "float16")
    scale, inputs, steps = 1024.0, 4, 3
    weight, x = _signs(t, _OUTPUTS, inputs, name="w"), _signs(t, BATCH * steps, inputs, name="x")
    y = _signs(t, len(x), _OUTPUTS, name="y")
    x[2 * BATCH - 1] = 1.0
    y[2 * BATCH - 1, 0] = 2.0**15  # the last row of the second step, on the last rank: 2 * 2^15 * 1024 / 8 = 2^23
    want = oracle.linear_descent(weight, x, y, RATE, oracle.in_order(len(x), BATCH, steps), skipped=(1,))
    precision = {"compute": "float16", "loss_scale": {"initial": scale, "growth_interval": 1000}}
    for name, parallel in layouts(t).items():
        sections: dict[str, Any] = {"parallel": parallel, "precision": precision, "train": {"steps": steps}}
        with trainer(t, name, Linear(weight), Rows(x=x, y=y), loss=Squares(), sgd=RATE, **sections) as run:
            for number, (scaled, skips) in enumerate(((scale, 0), (scale, 1), (scale / 2, 1))):
                values = step(t, run)
                label = f"step {number + 1}, {name}"
                t.equal(weights(t, run)["weight"], want.weights[number + 1].float(), name=label)
                t.equal(values["loss_scale"], torch.tensor(scaled), code="SCALE", name=label)
                t.same(int(values["skipped_updates"]), skips, f"skipped, {label}", code="SKIPPED")


@case("TRN-017", "train", worlds=(2, 4), group=False)
def nonfinite_loss(t: Bench) -> None:
    """A loss that is not a number on one rank: with ``skip`` every rank leaves that update out and goes on exactly,
    with ``stop`` every rank raises NonFiniteError.

    The NaN reaches the gradients of one row of weights only, and so one shard of them.
    """
    steps = 3
    weight, x, y = _exact_data(t, BATCH * steps)
    good = oracle.linear_descent(weight, x, y, RATE, oracle.in_order(len(x), BATCH, steps), skipped=(1,))
    y = y.clone()
    y[2 * BATCH - 1, 0] = math.nan
    for name, parallel in layouts(t, stages=(1, 3)).items():
        rows, sections = Rows(x=x, y=y), {"parallel": parallel, "train": {"steps": steps}}
        skip: dict[str, Any] = sections | {"guards": {"nonfinite": "skip"}}
        with trainer(t, f"skip, {name}", Linear(weight), rows, loss=Squares(), sgd=RATE, **skip) as run:
            for number in range(steps):
                step(t, run)
                t.equal(weights(t, run)["weight"], good.weights[number + 1].float(), name=f"step {number + 1}, {name}")
    # Once: how it stops does not depend on the layout.
    stop: dict[str, Any] = {"train": {"steps": steps}, "guards": {"nonfinite": "stop"}}
    with trainer(t, "stop", Linear(weight), Rows(x=x, y=y), loss=Squares(), sgd=RATE, **stop) as run:
        error = t.raises(NonFiniteError, run.fit, says="step 2")
    told = everyone(t, "stopped", type(error).__name__)
    t.same(told, ["NonFiniteError"] * t.world.size, "errors of all ranks", code="RANKS")


# ------------------------------------------------------------------------------------------------------ whole runs


_LONG = 50
_OPTIMIZER = oracle.AdamW(1e-2, decay=0.1)


@lru_cache(maxsize=1)
def _task(seed: int) -> tuple[transformer.Parameters, Tensor, Tensor]:
    """First values, and tokens and targets [steps, B, S]."""
    shape = (_LONG, BATCH, transformer.LENGTH)
    values = transformer.initial(lambda *size, name: data.normal(seed, f"TRN-009/{name}", size))
    first = data.integers(seed, "TRN-009/tokens", (_LONG, BATCH, 1), 0, transformer.VOCABULARY - 1)
    chain = [first]
    for position in range(transformer.LENGTH):  # each follows from the one before, but for a fifth of them
        noise = data.integers(seed, f"TRN-009/{position}", first.shape, 0, transformer.VOCABULARY - 1)
        chosen = data.uniform(seed, f"TRN-009/{position}", first.shape) < 0.2
        chain.append(torch.where(chosen, noise, (3 * chain[-1] + 1) % transformer.VOCABULARY))
    tokens, targets = torch.cat(chain[:-1], -1), torch.cat(chain[1:], -1)
    # Ranks have other numbers of targets: rows end at different places.
    ends = data.integers(seed, "TRN-009/ends", (_LONG, BATCH, 1), 1, transformer.LENGTH)
    targets = targets.masked_fill(torch.arange(transformer.LENGTH).expand(shape) >= ends, transformer.IGNORED)
    return values, tokens, targets


def learnable(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A small transformer, and tokens and targets [50 steps, batch, length] that it can learn."""
    values, tokens, targets = _task(seed)
    model = transformer.Transformer()
    model.load_state_dict(values)
    return model, tokens, targets


@lru_cache(maxsize=1)
def _envelope(seed: int) -> transformer.Envelope:
    """What float32 may make of it. Kept, since the test runs again when it is falsified."""
    return transformer.envelope(*_task(seed), _LONG, _OPTIMIZER, clip=1.0)


def _envelope_of_rank_0(t: Bench) -> transformer.Envelope:
    """The envelope, which one rank computes for all: ranks may share few processors."""
    file = t.folder / "envelope"
    if t.world.rank == 0:
        file.write_bytes(pickle.dumps(_envelope(t.seed)))
    everyone(t, "envelope", t.world.rank)
    return pickle.loads(file.read_bytes())


@case("TRN-009", "train", worlds=(4,), group=False, timeout_s=300)
def transformer_in_envelope(t: Bench) -> None:
    """Fifty steps of AdamW on a transformer stay as near to float64 as float32 does on one device: every loss within 4
    times, and every parameter at the end within 12 dB, of the worst of 8 other orders of sums.

    Weight decay, clipping, ranks with other numbers of targets, two shard units. Factor 4: the largest of 8 draws of a
    deviation is no bound for the next one. (A longer run would only widen the envelope.)
    """
    values, tokens, targets = _task(t.seed)
    wanted = _envelope_of_rank_0(t)
    optimizer = {"lr": _OPTIMIZER.rate, "weight_decay": _OPTIMIZER.decay, "beta2": _OPTIMIZER.beta2, "clip_norm": 1.0}
    sections: dict[str, Any] = {"optimizer": optimizer, "train": {"steps": _LONG, "seq_len": transformer.LENGTH}}
    name, parallel = list(layouts(t, stages=(3,)).items())[-1]
    model = transformer.Transformer()
    model.load_state_dict(values)
    rows = Rows(tokens=tokens.flatten(0, 1), targets=targets.flatten(0, 1))
    with trainer(t, "run", model, rows, parallel=parallel, **sections) as run:
        shares = [step(t, run)["loss"] for _ in range(_LONG)]
        losses = torch.tensor(t.run(run.execution.read_sums, shares), dtype=torch.float64)
        found = weights(t, run)
    # Read as the metrics read them; a check wants them on the device.
    t.within(t.put(losses.float()), wanted.exact.losses, 4 * wanted.losses, name=f"losses, {name}")
    for key, want in wanted.exact.parameters.items():
        floor = wanted.floors_db[key] - 20 * math.log10(4)
        t.sqnr(found[key], want, floor, name=f"{key}, {name}", rows=False)


@case("TRN-015", "train", worlds=(2,), group=False)
def recomputation(t: Bench) -> None:
    """Recomputing activations, all or the cheap ones, changes no bit of three steps of a decoder with dropout."""
    t.needs(t.capabilities.recompute, "recomputation")
    tokens = t.integers(BATCH * 3, 9, low=0, high=10, name="tokens", dtype=torch.int64)
    rows = Rows(tokens=tokens[:, :-1], targets=tokens[:, 1:])
    model = {"vocab_size": 11, "dim": 16, "layers": 2, "heads": 2, "ffn_dim": 24, "dropout": 0.2}
    common: dict[str, Any] = {"model": model, "optimizer": {"lr": 1e-2}, "train": {"steps": 3, "seq_len": 8}}
    kept: dict[str, Tensor] = {}
    for kind in ("none", "full", "selective"):
        with trainer(t, kind, None, rows, memory={"recompute": kind}, **common) as run:
            for _ in range(3):
                step(t, run)
            found = weights(t, run)
        if kind == "none":
            kept = on_host(found)
        else:
            equal_all(t, found, kept, kind)


class _Remembering(Squares):
    """Notes the samples that it is given."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            self.seen += batch["sample_ids"].tolist()
        return super().__call__(model, batch)


def _some_steps(t: Bench, run: Trainer, count: int) -> list[float]:
    return [mean_loss(t, run, step(t, run)) for _ in range(count)]


@case("TRN-016", "train", worlds=(2, 4), group=False)
def resumed_run(t: Bench) -> None:
    """A run that is resumed after step 3 of 6 goes on with the bits of one that never stopped: losses, parameters,
    moments; and all ranks together see every sample of the remaining steps once, and no other.

    AdamW with decay, in an order that is shuffled.
    """
    steps, half = 6, 3
    weight, x, y = _exact_data(t, BATCH * steps)
    for name, parallel in layouts(t, stages=(3,)).items():
        sections: dict[str, Any] = {"parallel": parallel, "data": {"shuffle": True}, "train": {"steps": steps},
                    "optimizer": {"weight_decay": 0.1}}  # fmt: skip
        straight, resumed = _Remembering(), _Remembering()
        with trainer(t, name, Linear(weight), Rows(x=x, y=y), loss=straight, **sections) as run:
            _some_steps(t, run, half)
            t.run(run.save)
            losses = _some_steps(t, run, steps - half)
            want = on_host(state(t, run))
        path, again = t.folder / name / "checkpoints" / f"step_{half}", f"{name}, again"
        other = Linear(torch.zeros_like(weight))
        with trainer(t, again, other, Rows(x=x, y=y), loss=resumed, resume=path, **sections) as run:
            t.same(run.step, half, f"step, {name}", code="STEPS")
            t.same(_some_steps(t, run, steps - half), losses, f"losses, {name}", code="LOSS")
            equal_all(t, state(t, run), want, name)
        seen = sorted(sample for part in everyone(t, name, resumed.seen) for sample in part)
        t.same(seen, list(range(half * BATCH, steps * BATCH)), f"samples, {name}", code="ORDER")


@case("TRN-019", "train", worlds=(2,), group=False)
def one_batch(t: Bench) -> None:
    """A network that sees one batch 200 times learns it: the loss falls below a hundredth. A check of sanity only."""
    model = nn.Sequential(Linear(t.normal(32, 8, name="1") / 3), nn.ReLU(), Linear(t.normal(4, 32, name="2") / 6))
    rows = Rows(x=t.normal(BATCH, 8, name="x"), y=t.normal(BATCH, 4, name="y"))
    with trainer(t, "run", model, rows, loss=Squares(), train={"steps": 200}, optimizer={"lr": 1e-2}) as run:
        shares = [step(t, run)["loss"] for _ in range(200)]
        losses = t.run(run.execution.read_sums, shares)
    t.at_most(losses[-1] / losses[0], 0.01, "last loss over first")
