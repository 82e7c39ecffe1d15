"""Gradients that are summed in buckets, held beside the sum taken by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelbridge import load_backend
from accelbridge.parallel.layout import Layout
from accelbridge.portable import replicas
from accelbridge.portable.replicas import Replicas
from accelbridge.train.world import connect, world_from_environment
from tests.ranks import Rank, run_ranks

NAMES = ("first", "second", "here", "nowhere", "frozen", "shared")
MICROBATCHES = 3


class Branches(nn.Module):
    """Parts that are used everywhere, on rank 0 only, or nowhere; one twice; one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        for index, name in enumerate(NAMES):
            torch.manual_seed(index)
            self.register_module(name, nn.Linear(6, 6))
        self.get_submodule("frozen").requires_grad_(False)

    def forward(self, x: Tensor, here: bool) -> Tensor:
        parts: Any = self._modules
        # second comes late in the backward pass of rank 0 and early in that of rank 1.
        x = parts["second"](parts["first"](x)) if here else parts["first"](parts["second"](x))
        x = parts["shared"](parts["frozen"](parts["shared"](x)))
        return parts["here"](x) if here else x


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def batch(rank: int, index: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * rank + index))


def sums(ctx: Rank, first_bytes: int, later_bytes: int) -> dict[str, Any]:
    """Of two steps of accumulation: the gradients, and what each rank had before they were summed."""
    ctx.launched()
    replicas._FIRST_BYTES, replicas._BYTES = first_bytes, later_bytes
    world = world_from_environment()
    execution = load_backend("cpu").execution
    execution.start(connect(world, 60), world, Layout(dp_replicate=2), timeout_s=60, check=False)
    model, alone = Branches(), Branches()
    reducer = Replicas(model.parameters(), dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    found = []
    for step in range(2):
        for index in range(MICROBATCHES):
            reducer.sums = index == MICROBATCHES - 1
            for each in (model, alone):
                each(batch(ctx.rank, MICROBATCHES * step + index), ctx.rank == 0).sum().backward()
        found.append((gradients(model), gradients(alone)))
        for each in (model, alone):
            each.zero_grad()
    execution.close()
    return {"found": found, "buckets": len(reducer._buckets)}


@pytest.mark.parametrize(("sizes", "buckets"), [((2**20, 2**20), 1), ((1, 1), 10), ((200, 400), 2)])
def test_gradients_are_the_sum_of_all_processes(sizes: tuple[int, int], buckets: int) -> None:
    ranks = run_ranks(sums, 2, *sizes)
    assert [r["buckets"] for r in ranks] == [buckets] * 2
    for step in range(2):
        (summed, mine), (other_summed, others) = (r["found"][step] for r in ranks)
        for name, value in summed.items():
            parts = [g for g in (mine[name], others[name]) if g is not None]
            if not parts:
                assert value is None, f"{name} took no part anywhere, and gets no gradient"
                assert other_summed[name] is None
            else:
                torch.testing.assert_close(value, sum(parts), rtol=1e-6, atol=0)
                assert torch.equal(value, other_summed[name])
        assert mine["here.weight"] is not None
        assert others["here.weight"] is None


def fails_midway(ctx: Rank) -> list[Tensor]:
    """A backward pass that raises leaves nothing behind: the next one is right."""
    ctx.launched()
    world = world_from_environment()
    execution = load_backend("cpu").execution
    execution.start(connect(world, 60), world, Layout(dp_replicate=2), timeout_s=60, check=False)
    weight = nn.Parameter(torch.ones(3))
    bad = nn.Parameter(torch.ones(3))
    Replicas([bad, weight], dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    x = bad * 1
    x.register_hook(refuse)
    with pytest.raises(RuntimeError, match="refused"):
        (x.sum() + weight.sum()).backward()
    weight.grad = bad.grad = None
    (weight.sum() * (ctx.rank + 1) + bad.sum()).backward()
    execution.close()
    assert weight.grad is not None
    assert bad.grad is not None
    return [weight.grad.clone(), bad.grad.clone()]


def refuse(_: Tensor) -> None:
    raise RuntimeError("refused")


def test_a_failed_backward_pass_leaves_nothing_behind() -> None:
    for grads in run_ranks(fails_midway, 2):
        assert torch.equal(grads[0], torch.full((3,), 3.0))
        assert torch.equal(grads[1], torch.full((3,), 2.0))
