"""Checks of the kernels of layers and losses, each of which takes the module that holds them: the package's own, or one
with a defect, which must fail."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from accelbridge import ops
from accelbridge.kernels.tiles import Tile
from tests.kernels import layer_bounds as exact
from tests.kernels.layer_bounds import Near, data

IGNORED = -100
WIDTHS = tuple(2**power for power in range(7, 15))
TILES = {
    "softmax_parts": Tile({"BLOCK": 128}),
    "softmax_gradient": Tile({"BLOCK": 128}),
    "swiglu_forward": Tile({"BLOCK": 64}),
    "swiglu_backward": Tile({"BLOCK": 64}),
    **{f"rope.{width}": Tile({"HEADS": 2, "BLOCK": width}) for width in (16, 32, 64, 128, 256)},
    **{f"rms_norm_forward.{width}": Tile({"ROWS": 4, "BLOCK": width}) for width in WIDTHS},
    **{f"rms_norm_backward.{width}": Tile({"ROWS": 4, "BLOCK": width, "PROGRAMS": 3}) for width in WIDTHS},
}
"""Small, so that small tensors have several tiles, and a last one that is not full."""


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def both(call: Callable[..., Tensor], name: str, *args: Any) -> list[tuple[str, Tensor]]:
    """What the kernel makes of ``args``, and what the portable reference does."""
    return [("kernel", call(*args)), ("reference", ops.reference(name)(*args))]


def rms_norm(module: ModuleType, dtype: torch.dtype, kind: str, rows: int, columns: int, eps: float = 1e-5) -> None:
    x = data(kind, rows, columns, dtype=dtype)
    weight = (data(kind, columns, seed=1) + 0.5).to(dtype)
    grad = data(kind, rows, columns, dtype=dtype, seed=2)
    wanted = exact.rms_norm(x, weight, eps, grad)
    for name, call in (("kernel", module.rms_norm), ("reference", ops.reference("rms_norm"))):
        x, weight = leaf(x), leaf(weight)
        y = call(x, weight, eps)
        y.backward(grad)
        assert y.dtype == dtype
        for near, found, what in zip(wanted, (y, gradient(x), gradient(weight)), ("y", "dx", "dweight"), strict=True):
            near.check(found, f"{what} of the {name}")


def rope(module: ModuleType, dtype: torch.dtype, shape: tuple[int, int, int, int], by_row: bool = False) -> None:
    batch, sequence, _, dim = shape
    positions = torch.arange(sequence) * 7 + (torch.arange(batch)[:, None] * 3 if by_row else 0)
    cos, sin = ops.rope_table(positions, dim)
    x, grad = leaf(data("normal", *shape, dtype=dtype)), data("normal", *shape, dtype=dtype, seed=1)
    y = module.rope(x, cos, sin)
    y.backward(grad)
    assert y.dtype == dtype
    exact.rope(x, cos, sin).check(y, "y")
    exact.rope(grad, cos, sin, inverse=True).check(gradient(x), "dx")
    exact.rope(x, cos, sin).check(ops.reference("rope")(x, cos, sin), "y of the reference")


def rope_of_quarter_turns(module: ModuleType, dtype: torch.dtype) -> None:
    """Integers, turned by quarters, stay integers: bit for bit."""
    quarter = torch.arange(5)[:, None] + torch.arange(4)[None, :]
    cos = torch.tensor([1.0, 0.0, -1.0, 0.0])[quarter % 4]
    sin = torch.tensor([0.0, 1.0, 0.0, -1.0])[quarter % 4]
    x = leaf(data("integers", 2, 5, 3, 8, dtype=dtype))
    grad = data("integers", 2, 5, 3, 8, dtype=dtype, seed=1)
    y = module.rope(x, cos, sin)
    y.backward(grad)
    Near(exact.rope(x, cos, sin).exact, exact.wide(torch.zeros_like(x))).check(y, "y")
    Near(exact.rope(grad, cos, sin, inverse=True).exact, exact.wide(torch.zeros_like(x))).check(gradient(x), "dx")


def swiglu(module: ModuleType, dtype: torch.dtype, kind: str, shape: tuple[int, ...], magnitude: float = 1.0) -> None:
    gate = leaf((data(kind, *shape) * magnitude).to(dtype))
    up, grad = leaf(data(kind, *shape, dtype=dtype, seed=1)), data(kind, *shape, dtype=dtype, seed=2)
    y = module.swiglu(gate, up)
    y.backward(grad)
    assert y.dtype == dtype
    wanted = exact.swiglu(gate, up, grad)
    for near, found, what in zip(wanted, (y, gradient(gate), gradient(up)), ("y", "dgate", "dup"), strict=True):
        near.check(found, what)


def some_targets(rows: int, columns: int) -> Tensor:
    """With one that is ignored, the first column and the last, as far as there is room."""
    targets = torch.randint(0, columns, (rows,), generator=torch.Generator().manual_seed(3))
    targets[0] = 0
    targets[-1] = columns - 1
    targets[2:3] = IGNORED
    return targets


def cross_entropy(
    module: ModuleType, dtype: torch.dtype, kind: str, rows: int, columns: int, magnitude: float = 1.0
) -> None:
    logits, targets = (data(kind, rows, columns) * magnitude).to(dtype), some_targets(rows, columns)
    wanted = exact.cross_entropy(logits, targets, IGNORED, factor=0.25)
    for name, call in (("kernel", module.cross_entropy), ("reference", ops.reference("cross_entropy"))):
        logits = leaf(logits)
        before = logits.detach().clone()
        loss = call(logits, targets, IGNORED)
        (loss * 0.25).backward()
        assert loss.dtype == torch.float32
        assert torch.equal(logits, before)  # the caller's own
        wanted[0].check(loss, f"loss of the {name}")
        wanted[1].check(gradient(logits), f"gradient of the {name}")


def cross_entropy_of_infinities(module: ModuleType) -> None:
    """Columns that are ruled out have no weight, also where they fill tiles from the first on; rows that are ignored
    have no gradient, whatever they hold."""
    logits = data("normal", 4, 300)
    logits[0, :128] = -torch.inf
    logits[1, 128:] = -torch.inf
    logits[2] = torch.nan
    targets = torch.tensor([299, 5, IGNORED, 130])
    found = leaf(logits)
    loss = module.cross_entropy(found, targets, IGNORED)
    loss.backward()
    counted = [0, 1, 3]
    wanted = exact.cross_entropy(logits[counted], targets[counted], IGNORED)
    wanted[0].check(loss, "loss")
    wanted[1].check(gradient(found)[counted], "gradient")
    assert not gradient(found)[2].any()
