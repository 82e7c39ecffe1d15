"""Random numbers to round with: a function of a seed and an element's place, so no layout or slice changes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accelbridge.errors import ConfigError
from accelbridge.hashing import key as key_of
from accelbridge.hashing import lowbias32


def random_key(*parts: int | str, device: torch.device | str = "cpu") -> Tensor:
    """A seed for :func:`random_bits`, a 0-d int32 tensor, of whatever tells its stream apart: ("weights", seed, step).

    As data of the device it may change from step to step without a graph being compiled again.
    """
    return torch.tensor(key_of(" ".join(map(str, ("accelbridge random", *parts)))), dtype=torch.int32).to(device)


def random_bits(
    shape: Sequence[int],
    seed: int | Tensor,
    start: int | Sequence[int] = 0,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """int32 ``shape``, all 32 bits of each element uniform and a function of the seed and its coordinates alone.

    ``start``: the coordinates of the first element in the whole tensor, one a dimension, or that along the first one;
    a rank that holds a slice gets the bits that the slice has in the whole. ``seed``: a number, or a tensor of
    :func:`random_key` on the device, which compiled code needs: products of int32 overflow here, and from numbers that
    it knows a compiler of C++ concludes what isn't so (:func:`accelbridge.hashing.lowbias32`). Equal on all devices.

    With ``h`` = lowbias32, one coordinate after the other is folded in: ``k = h(seed)``, ``k = h(k ^ h(i ^ seed))``.
    Raises ConfigError for starts that don't fit.
    """
    starts = (start, *[0] * (len(shape) - 1)) if isinstance(start, int) else tuple(start)
    if len(starts) != max(1, len(shape)) or min(starts) < 0:
        raise ConfigError(f"random bits of {tuple(shape)} asked from {start} on; use a start, 0 or more, per dimension")
    key = random_key(seed) if isinstance(seed, int) else seed
    key = key if device is None else key.to(device)
    bits = lowbias32(key.clone())  # which it overwrites
    for first, length in zip(starts, shape, strict=False):
        places = torch.arange(first, first + length, dtype=torch.int32, device=key.device)
        bits = lowbias32(bits.unsqueeze(-1) ^ lowbias32(places ^ key))
    return bits
