"""Shuffling without a table: the i-th element of a permutation is computed when it is asked for."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS = 8
_UInt64 = NDArray[np.uint64]


class Permutation:
    """A pseudorandom permutation of ``range(n)``, keyed by ``(seed, epoch)``; O(1) memory and no state.

    So a run resumes in the middle of an epoch, on any layout, from a step number alone: there is no shuffled
    list to store or replay, and no generator whose position could be lost.

    How: write a number x < n as (left, right) = divmod(x, columns) in a grid of rows x columns >= n, and let
    eight Feistel rounds alternately add a keyed hash of one coordinate to the other, modulo its range. Each
    round can be undone, so the whole is a bijection of the grid, whatever the hash. The grid is less than one
    row larger than n; a number that lands in the excess is sent through again until it doesn't ("cycle
    walking"), which restricts the bijection to ``range(n)``. The keys are BLAKE2b of seed and epoch, so
    neighbouring ones are unrelated. This is for shuffling, not for secrecy.

    Args:
        n: size of the range, 1..2**62.
        seed: any integer.
        epoch: any integer.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a permutation of range({n}) is not possible; n must be within 1..2**62")
        self.n = n
        self._rows = np.uint64(math.isqrt(n - 1) + 1)
        self._columns = np.uint64(-(-n // int(self._rows)))
        key = hashlib.blake2b(f"accelbridge order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(key, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Where ``positions`` go: int64 of the same shape. Raises ``IndexError`` outside ``range(n)``."""
        asked: NDArray[Any] = np.asarray(positions, dtype=np.int64)
        if asked.size and (asked.min() < 0 or asked.max() >= self.n):
            raise IndexError(f"positions {asked.min()}..{asked.max()} are outside range({self.n})")
        x = self._rounds(asked.reshape(-1).astype(np.uint64))
        while (outside := x >= self.n).any():
            x[outside] = self._rounds(x[outside])
        return x.astype(np.int64).reshape(asked.shape)

    def _rounds(self, x: _UInt64) -> _UInt64:
        left, right = np.divmod(x, self._columns)
        for number, key in enumerate(self._keys):
            # The hash is reduced before it is added: a sum that wrapped at 2**64 could not be undone.
            if number % 2 == 0:
                left = (left + _mix(right ^ key) % self._rows) % self._rows
            else:
                right = (right + _mix(left ^ key) % self._columns) % self._columns
        return left * self._columns + right


def _mix(x: _UInt64) -> _UInt64:
    """Hash 64 bits to 64 bits: the output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
