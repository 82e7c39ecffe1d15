"""Which elements keyed dropout keeps, in Python integers' arithmetic modulo 2^32.

The rule is written down at ``accelbridge.ops.dropout``: the key of a row meets the coordinates one after the other,
each time through lowbias32, and an element is kept if the last value, as a signed number, is at least
p * 2^32 - 2^31.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def _lowbias32(x: np.ndarray) -> np.ndarray:
    """C. Wellons, "Prospecting for Hash Functions" (2018), of uint32 held in uint64."""
    low = np.uint64(0xFFFFFFFF)
    x = x ^ (x >> np.uint64(16))
    x = (x * np.uint64(0x7FEB352D)) & low
    x = x ^ (x >> np.uint64(15))
    x = (x * np.uint64(0x846CA68B)) & low
    return x ^ (x >> np.uint64(16))


def kept(keys: Tensor, site: int, p: float, shape: tuple[int, ...], starts: tuple[int, ...] = ()) -> Tensor:
    """bool of ``shape``: [rows, ...] with int32 ``keys`` [rows]."""
    place = np.uint64(site & 0xFFFFFFFF)
    state = _lowbias32((keys.numpy().astype(np.int64) & 0xFFFFFFFF).astype(np.uint64) ^ place)
    for dim, length in enumerate(shape[1:]):
        start = starts[dim] if starts else 0
        coordinates = _lowbias32(np.arange(start, start + length, dtype=np.uint64) ^ place)
        state = _lowbias32(state[..., None] ^ coordinates)
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    return torch.from_numpy(state.astype(np.uint32).view(np.int32).astype(np.int64) >= threshold)
