"""Attention's kernel under tensor parallel: what each of two processes over gloo does, interpreted."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from accelbridge import ops
from accelbridge.backend import Mask
from accelbridge.kernels import flash, tiles
from accelbridge.portable.tensor_parallel import split_model
from tests.kernels import interpreter
from tests.kernels.flash_checks import decoder, some_tiles, step
from tests.ranks import Rank

IDS = torch.tensor([[0] * 7 + [1] * 13, [0] * 15 + [1] * 5])
CASES: dict[str, tuple[int, tuple[Placement, Placement], Placement | None]] = {
    "heads": (2, (Shard(1), Shard(1)), Shard(1)),
    "batch": (1, (Shard(0), Shard(0)), Shard(0)),
    "whole": (1, (Replicate(), Replicate()), Replicate()),
    "sequence": (2, (Shard(2), Shard(2)), None),
    "heads of one group": (1, (Shard(1), Replicate()), None),
}
"""Groups; how q, and k and v, lie; and how the result must lie (None: whatever, as something is gathered)."""


def on_dtensors(mesh: DeviceMesh, groups: int, lie: tuple[Placement, Placement], wanted: Placement | None) -> None:
    """Result and gradients are those of plain tensors."""
    shapes = ((4, lie[0]), (groups, lie[1]), (groups, lie[1]))
    plain = [torch.randn(2, heads, 20, 16, generator=torch.Generator().manual_seed(i)).requires_grad_()
             for i, (heads, _) in enumerate(shapes)]  # fmt: skip
    right = flash.attention(plain[0], plain[1], plain[2], Mask(segments_BS=IDS), return_lse=True)
    right_gradients = torch.autograd.grad((right[0].square().sum(), right[1].sum()), plain)
    ids = distribute_tensor(IDS, mesh, [Shard(0) if lie[0] == Shard(0) else Replicate()])
    leaves = [distribute_tensor(x.detach(), mesh, [how]).requires_grad_()
              for x, (_, how) in zip(plain, shapes, strict=True)]  # fmt: skip
    found = flash.attention(leaves[0], leaves[1], leaves[2], Mask(segments_BS=ids), return_lse=True)
    gradients = torch.autograd.grad((found[0].square().sum(), found[1].sum()), leaves)
    for ours, theirs in zip((*found, *gradients), (*right, *right_gradients), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-5, atol=1e-5)
    out = found[0]
    assert isinstance(out, DTensor)
    assert wanted is None or out.placements == (wanted,)


def in_a_model(mesh: DeviceMesh) -> None:
    """A decoder whose heads are split over the ranks is the decoder of one."""
    ops.bind({"attention": flash.attention})
    whole, split = decoder(), decoder()
    loss = step(whole)
    split_model(split, split.sharding_spec(), mesh, False)
    torch.testing.assert_close(step(split), loss, rtol=1e-5, atol=0)
    right = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        found, wanted = parameter.grad, right[name].grad
        assert isinstance(found, DTensor)
        assert wanted is not None
        off = (found.full_tensor() - wanted).norm() / wanted.norm()
        assert off < 2e-5, f"{name}: {off}"


def on_two(ctx: Rank) -> None:
    interpreter.install()
    tiles.bind(some_tiles(64, 64))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=ctx.store(), rank=ctx.rank, world_size=ctx.size)
    mesh = init_device_mesh("cpu", (ctx.size,))
    for name, case in CASES.items():
        try:
            on_dtensors(mesh, *case)
        except Exception as error:
            error.add_note(name)
            raise
    in_a_model(mesh)
    dist.destroy_process_group()
