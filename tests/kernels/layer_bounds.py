"""What the kernels of layers and losses must give, in float64, and how far off they may be: straight from the formulas,
with numpy. Bounds as in docs/conformance.md: a rounding to the result's dtype, and float32 sums on the way to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

U32 = 2.0**-24
U = {torch.float32: U32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24, torch.float64: 0.0}
"""Below these a device may flush to zero; float16 rounds to multiples of it."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("normal", "positive", "integers")

Array = np.ndarray


@dataclass(frozen=True)
class Near:
    """An exact result and the largest error that each of its elements may have."""

    exact: Array
    bound: Array

    def check(self, found: Tensor, what: str) -> None:
        """Raise AssertionError unless every error is within the bound, and no element is NaN."""
        assert tuple(found.shape) == self.exact.shape, what
        with np.errstate(invalid="ignore"):
            off = np.abs(wide(found) - self.exact) / (self.bound + TINY[found.dtype])
        assert np.all(off <= 1.0), f"{what}: {np.max(off)} bounds off"


def data(kind: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random numbers: normal, their magnitudes, or integers from -4 to 4."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "integers":
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator)
    return (x.abs() if kind == "positive" else x).to(dtype)


def wide(x: Tensor) -> Array:
    return x.detach().double().numpy()


def gamma(n: float) -> float:
    return n * U32 / (1 - n * U32)


def rounded(exact: Array, u: float, error: Array) -> Near:
    """``error`` before one rounding to a dtype of ``u``."""
    return Near(exact, u * np.abs(exact) + (1 + u) * error)


# ------------------------------------------------------------------------------------------------------------ layers


def rms_norm(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Near, Near, Near]:
    """y, and the gradients of x and of the weight. In a sum of D squares nothing cancels; the root halves its error."""
    X, W, G, u = wide(x), wide(weight), wide(grad), U[x.dtype]
    rows, d = X.shape
    r = 1 / np.sqrt((X**2).mean(-1, keepdims=True) + eps)
    y = X * r * W
    scale = gamma(d / 2 + 8)
    dx = r * (G * W - X * r * (G * W * X * r).mean(-1, keepdims=True))
    size = np.abs(r * G * W) + np.abs(X) * r**3 * np.abs(G * W * X).mean(-1, keepdims=True)
    dw, dw_size = (G * X * r).sum(0), np.abs(G * X * r).sum(0)
    return (
        rounded(y, u, scale * np.abs(y)),
        rounded(dx, u, gamma(2.5 * d + 16) * size),
        rounded(dw, U[weight.dtype], (scale + gamma(rows + 4)) * dw_size),
    )


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Near:
    """Pairs as complex numbers, times the turn: two products and their sum to each element."""
    X, half = wide(x), x.shape[-1] // 2
    turn = (wide(cos) + (-1j if inverse else 1j) * wide(sin))[..., None, :]
    z = (X[..., :half] + 1j * X[..., half:]) * turn
    size = np.abs(X[..., :half]) + np.abs(X[..., half:])
    size = size * np.maximum(np.abs(turn.real), np.abs(turn.imag))
    return rounded(np.concatenate((z.real, z.imag), -1), U[x.dtype], gamma(2) * np.tile(size, 2))


def swiglu(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Near, Near, Near]:
    """y, and the gradients of gate and up. The exponential is good to 8 units and as many as its argument is large;
    where it overflows the sigmoid becomes 0, which is below 2^-126."""
    A, B, G, u = wide(gate), wide(up), wide(grad), U[gate.dtype]
    s = 1 / (1 + np.exp(-A))
    error = (16 + 2 * np.abs(A)) * U32
    y, dup, size = A * s * B, G * A * s, np.abs(G * B * s) * (1 + np.abs(A))
    dgate = G * B * s * (1 + A * (1 - s))
    lost = 2.0**-126 * (1 + np.abs(A))
    return (
        rounded(y, u, error * np.abs(y) + lost * np.abs(B)),
        rounded(dgate, u, 3 * error * size + lost * np.abs(G * B)),
        rounded(dup, u, error * np.abs(dup) + lost * np.abs(G)),
    )


# ------------------------------------------------------------------------------------------------------------- losses


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, factor: float = 1.0) -> tuple[Near, Near]:
    """The sum of losses, and ``factor`` times its gradient."""
    X, t = wide(logits), targets.numpy()
    n, v = X.shape
    counted = t != ignore_index
    index = np.where(counted, t, 0)
    peak = X.max(-1)
    lse = peak + np.log(np.exp(X - peak[:, None]).sum(-1))
    losses = np.where(counted, lse - X[np.arange(n), index], 0.0)
    finite = np.where(np.isfinite(X), np.abs(X), 0.0).max(-1)
    # Shifts and exponentials, a sum of v positive terms, the logarithm and the difference of each row; a sum of n.
    each = U32 * (v + 24 + 6 * finite)
    loss = Near(np.asarray(losses.sum()), np.asarray((each * counted).sum() + gamma(n) * np.abs(losses).sum()))
    hit = np.zeros_like(X)
    hit[np.arange(n), index] = 1.0
    p = np.exp(X - lse[:, None])
    exact = factor * (p - hit) * counted[:, None]
    error = 2 * each[:, None] * (p + hit) * counted[:, None] * abs(factor)
    return loss, rounded(exact, U[logits.dtype], error)
