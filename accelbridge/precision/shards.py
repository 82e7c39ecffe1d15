"""Quantized tensors that are split over ranks, as DTensors: which part of the scales belongs to a part of the codes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from accelbridge.errors import ConfigError
from accelbridge.precision.scalings import WHOLE


def elementwise(call: Callable[..., Tensor], *operands: Tensor) -> DTensor:
    """``call`` on each rank's own parts of ``operands``, all placed as the first one is. Not left to DTensor: its
    operators ``<<`` and ``>>`` shift nothing (torch 2.13)."""
    first = operands[0]
    assert isinstance(first, DTensor)
    mesh, placements = first.device_mesh, first.placements
    _no_partial(first)
    given = [x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, run_check=False) for x in operands]
    local = call(*(x.redistribute(placements=placements).to_local() for x in given))
    return _whole(local, first)


def with_local_scales(
    call: Callable[[Tensor, Tensor], Tensor], payload: Tensor, scale: Tensor, block: tuple[int, int]
) -> DTensor:
    """``call(payload, scale)``, which returns a tensor of the payload's shape, of each rank's own parts.

    ``scale`` may be a DTensor, placed in any way (it is redistributed), or a tensor that all ranks have whole. Raises
    ConfigError where a rank's part would begin within a block; the same on all ranks, and before any communication.
    """
    assert isinstance(payload, DTensor)
    _no_partial(payload)
    mesh, placements = payload.device_mesh, [Replicate() for _ in payload.placements]
    size, blocks = list(payload.shape), list(scale.shape)
    for dim, placement in enumerate(payload.placements):
        if not isinstance(placement, Shard) or blocks[along := placement.dim] == 1:
            continue  # one scale for all of this dimension, or a dimension that is not split here
        placements[dim] = placement
        size[along], blocks[along] = -(-size[along] // mesh.size(dim)), -(-blocks[along] // mesh.size(dim))
        if block[along] != WHOLE and size[along] != blocks[along] * block[along]:
            raise ConfigError(
                f"{tuple(payload.shape)} in blocks of {block} asked in {mesh.size(dim)} parts along dimension {along}; "
                f"a part has {size[along]}, no multiple of {block[along]}; replicate it, or choose other blocks"
            )
    if not isinstance(scale, DTensor):
        scale = DTensor.from_local(scale, mesh, [Replicate()] * mesh.ndim, run_check=False)
    local = call(payload.to_local(), scale.redistribute(placements=placements).to_local())
    return _whole(local, payload)


def _no_partial(x: DTensor) -> None:
    if any(isinstance(placement, Partial) for placement in x.placements):
        raise ConfigError(f"{tuple(x.shape)} asked, of which ranks hold partial sums; codes don't add up; reduce first")


def _whole(local: Tensor, like: DTensor) -> DTensor:
    """A rank's part of what has the shape and the placements of ``like``, whose shards may be uneven."""
    whole = torch.empty(like.shape, device="meta")
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
