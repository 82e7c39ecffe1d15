"""Training in float64 on the host, by hand.

A linear model with weights and data in {-1, 0, 1}, squared errors, batches of a power of two and gradient descent at a
rate of 2^-2: after k steps the weights are multiples of 2^-4k, so that float32 holds every number on the way to the
fourth update exactly, in any order of sums (and the losses, which are squares, of the first three). Thus every layout
must give the bits of float64, and a dropped rank, a mean of means or a halved gradient shows without a tolerance. (Our
own measurement, docs/conformance.md.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

EXACT_UPDATES, EXACT_LOSSES = 4, 3


@dataclass
class Descent:
    """A run of gradient descent."""

    losses: list[float] = field(default_factory=list)
    """Mean loss of each step, before its update."""
    weights: list[Tensor] = field(default_factory=list)
    """float64: at the start, and after each step."""


def linear_descent(
    weight: Tensor, x: Tensor, y: Tensor, rate: float, batches: Sequence[Tensor], targets: Tensor | None = None,
    skipped: Sequence[int] = (),
) -> Descent:  # fmt: skip
    """Gradient descent of ``sum of |x w^T - y|^2 / targets``.

    ``batches`` holds the rows of each step; ``targets`` how many a row counts for (default 1; 0: it is left out);
    ``skipped`` are steps (from 0) without an update.
    """
    weight, x, y = weight.double(), x.double(), y.double()
    counts = torch.ones(len(x), dtype=torch.float64) if targets is None else targets.double()
    run = Descent(weights=[weight])
    for number, rows in enumerate(batches):
        total = counts[rows].sum().clamp(min=1)
        error = (x[rows] @ weight.T - y[rows]) * counts[rows].clamp(max=1).unsqueeze(1)
        run.losses.append(float(error.square().sum() / total))
        if number not in skipped:
            weight = weight - rate * (2 / total) * error.T @ x[rows]
        run.weights.append(weight)
    return run


def in_order(samples: int, batch: int, steps: int) -> list[Tensor]:
    """The rows of each step where data are taken in their order, again from the first when they are used up."""
    return [torch.arange(step * batch, (step + 1) * batch) % samples for step in range(steps)]


def two_layer_gradients(first: Tensor, second: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the mean over rows of ``|relu(x first^T) second^T - y|^2``."""
    first, second, x, y = first.double(), second.double(), x.double(), y.double()
    before = x @ first.T
    hidden = before.clamp(min=0)
    error = (hidden @ second.T - y) * (2 / len(x))
    return ((error @ second) * (before > 0)).T @ x, error.T @ hidden


def tied_descent(table: Tensor, tokens: Tensor, y: Tensor, rate: float, batches: Sequence[Tensor]) -> Tensor:
    """Gradient descent of the mean over rows of ``|table[token] table^T - y|^2``, where one parameter is used twice.
    Exact for two updates of small integers."""
    table, y = table.double(), y.double()
    for rows in batches:
        hidden = table[tokens[rows]]
        error = (hidden @ table.T - y[rows]) * (2 / len(rows))
        as_head = error.T @ hidden
        as_table = torch.zeros_like(table).index_add_(0, tokens[rows], error @ table)
        table = table - rate * (as_head + as_table)
    return table


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2) as frameworks have it: decay by rate times
    ``decay``, bias corrected moments, epsilon outside the root."""

    rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.0

    def update(self, weight: Tensor, gradient: Tensor, moments: list[Tensor], number: int) -> None:
        """Update ``number`` (from 1) of ``weight`` and its two ``moments``, in place."""
        first, second = moments
        weight.mul_(1 - self.rate * self.decay)
        first.mul_(self.beta1).add_(gradient, alpha=1 - self.beta1)
        second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        mean = first / (1 - self.beta1**number)
        root = (second / (1 - self.beta2**number)).sqrt()
        weight.addcdiv_(mean, root + self.eps, value=-self.rate)

    def run(self, weight: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """``weight`` after one update with each of ``gradients``, in float64."""
        weight = weight.double().clone()
        moments = [torch.zeros_like(weight), torch.zeros_like(weight)]
        for number, gradient in enumerate(gradients, start=1):
            self.update(weight, gradient.double(), moments, number)
        return weight

    def rounding(self, weight: Tensor, updates: int) -> Tensor:
        """Bound on what float32 makes of :meth:`run`: an update rounds the weight three times (decay, its factor, the
        sum), and its own size, at most a little above the rate, by some 16 operations.

        ``updates * (4 u max|w| + 32 u rate)``, u = 2^-24; the largest weight is that of the start and the way made.
        """
        largest = weight.double().abs().max() + updates * 2 * self.rate
        return updates * 2.0**-24 * (4 * largest + 32 * self.rate)
