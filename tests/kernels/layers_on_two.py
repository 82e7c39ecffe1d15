"""The kernels of layers and losses on DTensors and over a split vocabulary: what each of two processes
over gloo does, interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from accelbridge import ops
from accelbridge.kernels import cross_entropy as losses
from accelbridge.kernels import rms_norm, rope, swiglu, tiles
from accelbridge.ops import chunked_losses
from tests.kernels import interpreter
from tests.kernels import layer_bounds as exact
from tests.kernels import layer_checks as check
from tests.kernels.layer_bounds import data
from tests.kernels.layer_checks import IGNORED, TILES, gradient, leaf
from tests.ranks import Rank

WHOLE = Replicate()
Case = tuple[Callable[..., Tensor], list[Any], Sequence[Placement | None], Placement | None]
"""An op, its arguments, how each lies (None: as it is), and how the result must lie (None: whatever)."""


def cases() -> dict[str, Case]:
    norm = [data("normal", 2, 4, 96), data("normal", 96, seed=1), 1e-5]
    turn = [data("normal", 2, 4, 6, 8), *ops.rope_table(torch.arange(4), 8)]
    by_row = [turn[0], *ops.rope_table(torch.arange(8).view(2, 4), 8)]
    gated = [data("normal", 2, 4, 64), data("normal", 2, 4, 64, seed=1)]
    loss = [data("normal", 6, 300), check.some_targets(6, 300), IGNORED]
    return {
        "norm of a split sequence": (rms_norm.rms_norm, norm, (Shard(1), WHOLE, None), Shard(1)),
        "norm of a split batch": (rms_norm.rms_norm, norm, (Shard(0), WHOLE, None), Shard(0)),
        "norm of what is whole": (rms_norm.rms_norm, norm, (WHOLE, WHOLE, None), WHOLE),
        "norm of split rows": (rms_norm.rms_norm, norm, (Shard(2), WHOLE, None), None),
        "turn of split heads": (rope.rope, turn, (Shard(2), WHOLE, WHOLE), Shard(2)),
        "turn of a split sequence": (rope.rope, turn, (Shard(1), Shard(0), Shard(0)), Shard(1)),
        "turn of a split batch": (rope.rope, by_row, (Shard(0), Shard(0), Shard(0)), Shard(0)),
        "turn of split pairs": (rope.rope, turn, (Shard(3), WHOLE, WHOLE), None),
        "gate of split columns": (swiglu.swiglu, gated, (Shard(2), Shard(2)), Shard(2)),
        "gate of which half is whole": (swiglu.swiglu, gated, (Shard(1), WHOLE), None),
        "loss of split tokens": (losses.cross_entropy, loss, (Shard(0), Shard(0), None), None),
        "loss of split columns": (losses.cross_entropy, loss, (Shard(1), WHOLE, None), None),
    }


def on_dtensors(mesh: DeviceMesh, case: Case) -> None:
    """Result and gradients are those of plain tensors; sums over rows that are split may have another order."""
    call, args, placements, wanted = case
    width = args[0].shape[-1]
    plain = [leaf(a) if isinstance(a, Tensor) and a.shape[-1] == width else a for a in args]
    result = call(*plain)
    result.square().sum().backward()
    spread = [a if p is None else distribute_tensor(a, mesh, [p]) for a, p in zip(args, placements, strict=True)]
    leaves = [leaf(s) if isinstance(p, Tensor) and p.requires_grad else s for s, p in zip(spread, plain, strict=True)]
    found = call(*leaves)
    assert isinstance(found, DTensor)
    if wanted is not None:
        assert found.placements == (wanted,)
    (found.full_tensor() if found.dim() == 0 else found).square().sum().backward()
    torch.testing.assert_close(found.full_tensor(), result, rtol=1e-6, atol=0)
    for ours, theirs in zip(leaves, plain, strict=True):
        if isinstance(ours, Tensor) and ours.requires_grad:
            got = gradient(ours)
            assert isinstance(got, DTensor)
            torch.testing.assert_close(got.full_tensor(), gradient(theirs), rtol=1e-5, atol=1e-5)


def on_two(ctx: Rank) -> None:
    interpreter.install()
    tiles.bind(TILES)
    chunked_losses.COLUMNS = 70
    dist.init_process_group("gloo", store=ctx.store(), rank=ctx.rank, world_size=ctx.size)
    mesh = init_device_mesh("cpu", (ctx.size,))
    for name, case in cases().items():
        try:
            on_dtensors(mesh, case)
        except Exception as error:
            error.add_note(name)
            raise
    group = mesh.get_group()
    split_logits(ctx, group)
    split_projection(ctx, group)


def split_logits(ctx: Rank, group: dist.ProcessGroup) -> None:
    logits, targets = data("normal", 7, 300, dtype=torch.bfloat16), check.some_targets(7, 300)
    logits[0, :150] = -torch.inf  # all that one rank holds
    targets[0] = 299
    wanted = exact.cross_entropy(logits, targets, IGNORED)
    mine = leaf(logits.chunk(ctx.size, 1)[ctx.rank].clone())

    def step(mine: Tensor) -> Tensor:
        return losses.vocab_parallel_cross_entropy(mine, targets, group, IGNORED)

    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        mine.grad = None
        loss = run(mine)
        loss.backward()
        wanted[0].check(loss, "loss")
        columns = slice(150 * ctx.rank, 150 * ctx.rank + 150)
        exact.Near(wanted[1].exact[:, columns], wanted[1].bound[:, columns]).check(gradient(mine), "gradient")
    assert losses.vocab_parallel_cross_entropy(mine, torch.full((7,), 300), group).isnan()


def split_projection(ctx: Rank, group: dist.ProcessGroup) -> None:
    x, weight, targets = data("normal", 7, 16), data("normal", 300, 16, seed=1), check.some_targets(7, 300)
    whole = [leaf(x), leaf(weight)]
    losses.linear_cross_entropy(*whole, targets, IGNORED).backward()
    mine = [leaf(x), leaf(weight.chunk(ctx.size)[ctx.rank].clone())]
    loss = losses.vocab_parallel_linear_cross_entropy(*mine, targets, group, IGNORED)
    loss.backward()
    dist.all_reduce(gradient(mine[0]))
    torch.testing.assert_close(gradient(mine[0]), gradient(whole[0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient(mine[1]), gradient(whole[1]).chunk(ctx.size)[ctx.rank], rtol=1e-5, atol=1e-6)
