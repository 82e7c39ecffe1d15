"""Initial values that don't depend on who computes them: by seed, parameter name and element alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

_CHUNK = 1 << 15
"""Elements at a time, so that the float64 intermediates stay in cache."""

_LANES = 4
"""Words per Philox counter."""


@dataclass(frozen=True)
class Init:
    """How a parameter starts. ``scale`` is the standard deviation of "normal", the bound of "uniform" (in
    ``[-scale, scale]``), and unused by "ones" and "zeros"."""

    kind: Literal["normal", "uniform", "ones", "zeros"]
    scale: float = 1.0


ONES = Init("ones")
ZEROS = Init("zeros")


def default_init(module: nn.Module, param_name: str) -> Init | None:
    """How torch itself initialises parameter ``param_name`` of a plain torch ``module``; None if that is
    unknown.

    nn.Linear: uniform within 1/sqrt(fan_in), weight and bias; nn.Embedding: standard normal; LayerNorm,
    RMSNorm and GroupNorm: ones and zeros. Unknown: other modules, subclasses that reset their parameters in
    their own way, and embeddings with a padding row.
    """
    reset = getattr(type(module), "reset_parameters", None)
    if isinstance(module, nn.Linear) and reset is nn.Linear.reset_parameters:
        return Init("uniform", 1 / math.sqrt(module.in_features)) if module.in_features else ZEROS
    if isinstance(module, nn.Embedding) and reset is nn.Embedding.reset_parameters:
        return Init("normal", 1.0) if module.padding_idx is None else None
    norms = (nn.LayerNorm.reset_parameters, nn.RMSNorm.reset_parameters, nn.GroupNorm.reset_parameters)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)) and reset in norms:
        return {"weight": ONES, "bias": ZEROS}.get(param_name)
    return None


def initial_values(seed: int, name: str, shape: tuple[int, ...], rows: range, init: Init) -> Tensor:
    """Rows ``rows`` of the initial value of parameter ``name``: float32 ``[len(rows), *shape[1:]]`` on the
    host.

    Element i of the flattened parameter is a function of (seed, name, i), so any slicing gives the same bits,
    on one kind of processor and version of numpy (elsewhere logarithm and cosine may differ in the last bit).
    A 0-dimensional parameter has the one row ``range(1)`` and gives a 0-dimensional tensor. Raises
    ``ValueError`` for rows outside of the parameter.

    Word i comes from Philox4x64-10 (Salmon et al., SC 2011, doi:10.1145/2063384.2063405); a normal takes the
    two halves of its word through Box and Muller's transform (doi:10.1214/aoms/1177706645), in float64.
    """
    height = shape[0] if shape else 1
    if rows.step != 1 or (len(rows) and not 0 <= rows.start < rows.stop <= height):
        raise ValueError(f"{name} has rows 0..{height}; asked for {rows}")
    row_size = math.prod(shape[1:])
    values = np.empty(len(rows) * row_size, dtype=np.float32)
    fill = _FILLS[init.kind]
    key = _key(seed, name)
    first = rows.start * row_size
    for start in range(0, values.size, _CHUNK):
        part = values[start : start + _CHUNK]
        part[:] = fill(key, first + start, part.size, init.scale)
    return torch.from_numpy(values).reshape(shape if not shape and len(rows) else (len(rows), *shape[1:]))


def _key(seed: int, name: str) -> NDArray[np.uint64]:
    digest = hashlib.sha256(f"accelbridge initial values\0{seed}\0{name}".encode()).digest()
    return np.frombuffer(digest, dtype="<u8", count=2).astype(np.uint64)


def _words(key: NDArray[np.uint64], first: int, count: int) -> NDArray[np.uint64]:
    """Words ``first`` to ``first + count`` of the stream of ``key``."""
    generator = np.random.Philox(key=key, counter=first // _LANES)
    skip = first % _LANES
    return generator.random_raw(skip + count)[skip:].copy()  # copied: the same alignment for every slicing


def _normal(key: NDArray[np.uint64], first: int, count: int, scale: float) -> NDArray[np.float64]:
    words = _words(key, first, count)
    radius = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32  # in (0, 1): no logarithm of 0
    angle = (words & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2 * math.pi * 2.0**-32)
    return np.sqrt(-2.0 * np.log(radius)) * np.cos(angle) * scale


def _uniform(key: NDArray[np.uint64], first: int, count: int, scale: float) -> NDArray[np.float64]:
    unit = (_words(key, first, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (2.0 * unit - 1.0) * scale


def _constant(value: float) -> Callable[..., NDArray[np.float64]]:
    return lambda key, first, count, scale: np.full(count, value)


_FILLS: dict[str, Callable[[NDArray[np.uint64], int, int, float], NDArray[np.float64]]] = {
    "normal": _normal,
    "uniform": _uniform,
    "ones": _constant(1.0),
    "zeros": _constant(0.0),
}
