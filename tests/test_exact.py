"""Training in integers: sums have no rounding, so every layout must give the bits of float64 on one device.

A linear model with weights and data in {-1, 0, 1}, mean squared error over a batch of 8 and SGD at a rate of 2**-2:
after k steps the weights are multiples of 2**-4k, so float32 holds every number on the way to the fourth update
exactly, whatever the order of sums (and the losses, which are squares, of the first three). A dropped rank, a mean of
means, or a gradient that is halved shows without any tolerance.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accelbridge import load_backend
from accelbridge.backend import Precision
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import ShardingSpec
from accelbridge.train.world import connect, world_from_environment
from tests.ranks import Rank, run_ranks

BATCH, INPUTS, OUTPUTS, STEPS = 8, 6, 3, 4
RATE = 2.0**-2
EXACT_LOSSES = 3
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"1 device": Layout()},
    2: {
        "replicate 2": Layout(dp_replicate=2),
        "ZeRO 1": Layout(dp_shard=2, zero=1),
        "ZeRO 2": Layout(dp_shard=2, zero=2),
        "ZeRO 3": Layout(dp_shard=2),
    },
    4: {
        "replicate 4": Layout(dp_replicate=4),
        "shard 4, ZeRO 1": Layout(dp_shard=4, zero=1),
        "shard 4, ZeRO 3": Layout(dp_shard=4),  # 3 rows on 4 devices: one shard is empty
        "hybrid 2x2": Layout(dp_replicate=2, dp_shard=2),
    },
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]
Result = tuple[list[float], Tensor]
"""Losses of the steps, and the weights at the end."""


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def samples(step: int, rows: range) -> tuple[Tensor, Tensor]:
    x, y = integers(100 + step, BATCH, INPUTS), integers(200 + step, BATCH, OUTPUTS)
    return x[rows.start : rows.stop], y[rows.start : rows.stop]


def expected() -> Result:
    """One device in float64, by hand."""
    weight = integers(0, OUTPUTS, INPUTS).double()
    losses = []
    for step in range(STEPS):
        x, y = (t.double() for t in samples(step, range(BATCH)))
        error = x @ weight.T - y
        losses.append(float(error.square().sum() / BATCH))
        weight -= RATE * (2 / BATCH) * error.T @ x
    return losses, weight


def train(layout: Layout, microbatches: int) -> Result:
    """The pieces of a trainer in a loop of our own, since its optimizer takes roots."""
    world = world_from_environment()
    execution = load_backend("cpu").execution
    execution.start(connect(world, 60), world, layout, timeout_s=60, check=False)
    model = nn.Linear(INPUTS, OUTPUTS, bias=False)
    with torch.no_grad():
        model.weight.copy_(integers(0, OUTPUTS, INPUTS))
    model = execution.realise(model, ShardingSpec(), Precision(), lambda *_: torch.empty(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    share = BATCH // layout.data_parallel // microbatches
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for index in range(microbatches):
            first = (index * layout.data_parallel + execution.data_coordinates.start) * share
            x, y = samples(step, range(first, first + share))
            with execution.microbatch(model, index, microbatches):
                loss = (model(x) - y).square().sum() / BATCH
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(execution.sum(total)))
    state = execution.state(model, optimizer)["model.weight"]
    weight = (state.full_tensor() if isinstance(state, DTensor) else state).clone()
    execution.close()
    return losses, weight


def train_all(ctx: Rank, layouts: dict[str, Layout]) -> dict[tuple[str, int], Result]:
    ctx.launched()
    return {(name, count): train(layout, count) for name, layout in layouts.items() for count in (1, 2)}


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, int], Result]:
    return {
        key: result
        for size, layouts in LAYOUTS.items()
        for key, result in run_ranks(train_all, size, layouts)[0].items()
    }


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_bits_of_float64(name: str, microbatches: int, results: dict[tuple[str, int], Result]) -> None:
    losses, weight = results[name, microbatches]
    exact_losses, exact_weight = expected()
    assert losses[:EXACT_LOSSES] == exact_losses[:EXACT_LOSSES]
    assert torch.equal(weight.double(), exact_weight)


def test_float32_holds_it_exactly() -> None:
    """The premise: every loss and weight of float64 is a float32."""
    losses, weight = expected()
    assert torch.equal(weight.float().double(), weight)
    assert all(float(torch.tensor(loss, dtype=torch.float32)) == loss for loss in losses[:EXACT_LOSSES])
    assert len(set(losses)) == STEPS, "the weights move"
