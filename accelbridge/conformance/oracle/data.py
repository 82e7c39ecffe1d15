"""Test data from a counter-based generator: the same bits on every machine, whatever was drawn before.

Philox 4x64 (Salmon et al., SC'11) as numpy implements it, keyed by a hash of (seed, name). Only its raw words are used:
numpy keeps those the same for ever, its distributions it may change.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor


def words(seed: int, name: str, count: int) -> np.ndarray:
    """``count`` random uint64 for (seed, name)."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
    generator = np.random.Philox(key=int.from_bytes(key, "little"))
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


def uniform(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """float64 in [0, 1), in steps of 2^-53."""
    drawn = words(seed, name, math.prod(shape)) >> np.uint64(11)
    return torch.from_numpy(drawn.astype(np.float64) * 2.0**-53).reshape(shape)


def normal(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """float64 standard normal, by Box and Muller."""
    first, second = uniform(seed, f"{name}/r", shape), uniform(seed, f"{name}/phi", shape)
    return (-2.0 * (1.0 - first).log()).sqrt() * (2.0 * math.pi * second).cos()


def wide(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """float64 normal with exponents spread over 2^-12 .. 2^12."""
    exponents = (uniform(seed, f"{name}/e", shape) * 25.0).floor() - 12.0
    return normal(seed, name, shape) * torch.exp2(exponents)


def integers(seed: int, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
    """int64 in [low, high]."""
    drawn = words(seed, name, math.prod(shape)) % np.uint64(high - low + 1)
    return torch.from_numpy(drawn.astype(np.int64) + low).reshape(shape)


def sparse_integers(seed: int, name: str, shape: tuple[int, ...], largest: int, density: float) -> Tensor:
    """int64 in [-largest, largest] without 0, zeroed but for a share of ``density``: keeps sums of products small
    enough to be exact (oneDNN's benchdnn chooses densities so)."""
    sign = integers(seed, f"{name}/s", shape, 0, 1) * 2 - 1
    kept = uniform(seed, f"{name}/d", shape) < density
    return integers(seed, name, shape, 1, largest) * sign * kept
