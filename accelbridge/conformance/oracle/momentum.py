"""Training of a linear model on integers in float64, chosen so that float32 rounds nothing for a few steps."""

from __future__ import annotations

import torch
from torch import Tensor

SHAPES: dict[str, tuple[int, int]] = {"x": (8, 4), "y": (8, 2), "weight": (2, 4)}
"""Batch and targets, and the weight [out, in]."""
DIVISOR = 16.0
"""Of the squared errors: a power of two, so that dividing rounds nothing."""
RATE, MOMENTUM = 2.0**-2, 2.0**-1


def sharded_shapes(size: int) -> dict[str, tuple[int, int]]:
    """Larger by ``size``: as many rows of data and of weights to each rank as :data:`SHAPES` has."""
    return {"x": (8 * size, 4), "y": (8 * size, 2 * size), "weight": (2 * size, 4)}


def linear(x: Tensor, y: Tensor, weight: Tensor, divisor: float, steps: int) -> tuple[Tensor, Tensor]:
    """float32 losses (squared errors over ``divisor``) before each of ``steps`` steps of SGD with momentum, and the
    weights after the last, from float64.

    With all numbers in {-1, 0, 1} the first loss and gradient are multiples of 1/divisor. Each step halves the unit of
    the weights by log2(2 rate / divisor) bits: 2^-5 after one, 2^-10 and 2^-15 after two and three, and squares need
    twice as many. So float32 holds the weights of 3 steps, and the losses before the first and second.
    """
    x, y, weight = x.double(), y.double(), weight.double()
    moment, losses = torch.zeros_like(weight), []
    for _ in range(steps):
        error = x @ weight.T - y
        losses.append(error.square().sum() / divisor)
        moment = moment * MOMENTUM + error.T @ x * (2.0 / divisor)
        weight = weight - RATE * moment
    return torch.stack(losses).float(), weight.float()
