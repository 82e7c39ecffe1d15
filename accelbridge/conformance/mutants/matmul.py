"""Defects of dense products, and products that are right though others.

Each is a product of its own, put in place of the portable ``matmul`` and of the kernel under the op ``linear``.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from accelbridge.conformance.mutants import Patch, benign, mutant
from accelbridge.cpu.backend import CpuBackend
from accelbridge.portable.matmul import PortableMatmul


class Product(Protocol):
    """``(a @ b + bias)`` rounded to ``out``; bias None: none."""

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor: ...


def bind(patch: Patch, product: Product) -> None:
    """Make every product of this process ``product``."""

    def matmul(_inner: Any, _self: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return product(a, b, None, out_dtype or a.dtype)

    def linear(_inner: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x, weight.mT, bias, x.dtype)

    patch(PortableMatmul, "matmul", matmul)
    patch(F, "linear", linear)


def finish(acc: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """The end of a right product: bias, then one rounding."""
    return (acc if bias is None else acc + bias.to(acc.dtype)).to(out)


def right(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    """A right product."""
    return finish(a.float() @ b.float(), bias, out)


def blocked(
    a: Tensor, b: Tensor, block: int, add: Callable[[Tensor, Tensor], Tensor], order: Callable[[list[int]], list[int]]
) -> Tensor:
    """float32 sum of the products of blocks of K, added by ``add`` in ``order``."""
    a, b = a.float(), b.float()
    acc = torch.zeros((), dtype=torch.float32) * (a[..., :0] @ b[..., :0, :])
    for k in order(list(range(0, a.shape[-1], block))):
        acc = add(acc, a[..., k : k + block] @ b[..., k : k + block, :])
    return acc


def forward(blocks: list[int]) -> list[int]:
    return blocks


def declare(patch: Patch, **facts: str | int) -> None:
    """Let the CPU backend declare ``facts``, with a dot where a name has two underscores."""
    named = {name.replace("__", "."): value for name, value in facts.items()}

    def capabilities(inner: Any, *args: Any) -> Any:
        found = inner(*args[-2:])
        return dataclasses.replace(found, facts={**found.facts, **named})

    patch(CpuBackend, "capabilities", capabilities)


def tf32(x: Tensor) -> Tensor:
    """float32 rounded to the 11 significand bits of TF32, halves away from zero."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def misread(x: Tensor) -> Tensor:
    """``x`` as a kernel reads it that takes every tensor for contiguous."""
    if x.is_contiguous():
        return x
    held = x.untyped_storage().nbytes() // x.itemsize
    flat = torch.as_strided(x.detach(), (held,), (1,), 0)
    return flat[(torch.arange(x.numel(), device=x.device) + x.storage_offset()) % held].view(x.shape)


# ------------------------------------------------------------------------------------------------------ values


@mutant("G1", "accumulates in bfloat16", {"MM-002": "BOUND", "MM-003": "SQNR", "MM-004": "PROBE"})
def accumulates_in_bfloat16(patch: Patch) -> None:
    def add(acc: Tensor, part: Tensor) -> Tensor:
        return (acc + part).bfloat16().float()

    bind(patch, lambda a, b, bias, out: finish(blocked(a, b, 16, add, forward), bias, out))


@mutant("G2", "drops the last element of K", {"MM-001": "EXACT", "MM-002": "BOUND", "MM-016": "BOUND"})
def drops_last_k(patch: Patch) -> None:
    bind(patch, lambda a, b, bias, out: right(a[..., :-1], b[..., :-1, :], bias, out))


@mutant("G3", "swaps two columns of the output", {"MM-001": "EXACT", "MM-012": "EXACT"})
def swaps_columns(patch: Patch) -> None:
    def product(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        done = right(a, b, bias, out)
        order = list(range(done.shape[-1]))
        order[:2] = order[:2][::-1]
        return done[..., order]

    bind(patch, product)


@mutant("G4", "accumulates 16-bit operands in float16 and rounds float32 ones to TF32", {"MM-004": "PROBE"})
def accumulates_in_float16(patch: Patch) -> None:
    def add(acc: Tensor, part: Tensor) -> Tensor:
        return (acc + part).half().float()

    def product(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        if a.dtype == torch.float32:
            return right(tf32(a), tf32(b.contiguous()), bias, out)
        return finish(blocked(a, b, 16, add, forward), bias, out)

    bind(patch, product)


@mutant(
    "G5", "takes every operand and gradient for contiguous", {"MM-005": "EXACT", "MM-006": "EXACT", "MM-016": "BOUND"}
)
def ignores_strides(patch: Patch) -> None:
    def product(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        done = right(misread(a), b if b.mT.is_contiguous() else misread(b), bias, out)
        if done.requires_grad:
            done.register_hook(misread)
        return done

    bind(patch, product)


@mutant("G6", "one tile of 64 x 64 is 0", {"MM-001": "EXACT", "MM-003": "SQNR"})
def zero_tile(patch: Patch) -> None:
    def product(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        done = right(a, b, bias, out)
        done[..., 64:128, 64:128] = 0
        return done

    bind(patch, product)


@mutant("G7", "takes NaN and infinity for 0", {"MM-010": "EXACT", "MM-011": "EXACT"})
def swallows_non_finite(patch: Patch) -> None:
    bind(patch, lambda a, b, bias, out: right(a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0), bias, out))


@mutant("G8", "skips the bias in the last tile of columns", {"MM-009": "EXACT"})
def skips_bias_tail(patch: Patch) -> None:
    def product(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        if bias is not None:
            columns = torch.arange(bias.shape[0], device=bias.device)
            bias = torch.where(columns < (bias.shape[0] - 1) // 64 * 64, bias, 0.0)
        return right(a, b, bias, out)

    bind(patch, product)


@mutant("G10", "cuts the output off instead of rounding it", {"MM-002": "BOUND", "MM-003": "SQNR"})
def truncates_output(patch: Patch) -> None:
    def product(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        done = right(a, b, bias, torch.float32)
        return (done.view(torch.int32) & ~0xFFFF).view(torch.float32).to(out) if out == torch.bfloat16 else done.to(out)

    bind(patch, product)


@mutant("G11", "K = 0 leaves garbage", {"MM-007": "EXACT", "MEM-006": "EXACT"})
def garbage_at_k0(patch: Patch) -> None:
    def product(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        done = right(a, b, bias, out)
        return torch.full_like(done, 7.0) if a.shape[-1] == 0 else done

    bind(patch, product)


@mutant("G12", "splits K and adds the parts in the order in which they happen to be done", {"MM-015": "EXACT"})
def random_split_k(patch: Patch) -> None:
    def order(blocks: list[int]) -> list[int]:
        return random.sample(blocks, len(blocks))

    bind(patch, lambda a, b, bias, out: finish(blocked(a, b, 64, torch.add, order), bias, out))


@mutant("G13", "the stride of the batch is wrong from the third matrix on", {"MM-008": "EXACT"})
def wrong_batch_stride(patch: Patch) -> None:
    def product(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        if a.dim() > 2 and a.shape[0] > 2:
            a = a[[0, 1, *range(1, a.shape[0] - 1)]]
        return right(a, b, bias, out)

    bind(patch, product)


@mutant("G15", "one row of 1024 is 0", {"MM-001": "EXACT", "MM-003": "SQNR"})
def zero_row(patch: Patch) -> None:
    def product(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        done = right(a, b, bias, out)
        if done.shape[-2] == 1024:
            done[..., 777, :] = 0
        return done

    bind(patch, product)


@mutant("G16", "ignores where in its memory an operand starts", {"MM-005": "EXACT", "MM-006": "EXACT"})
def ignores_offset(patch: Patch) -> None:
    def start(x: Tensor) -> Tensor:
        return torch.as_strided(x, x.shape, x.stride(), 0)

    bind(patch, lambda a, b, bias, out: right(start(a), start(b), bias, out))


@mutant("G17", "rounds float32 operands to TF32, undeclared", {"MM-002": "BOUND", "MM-003": "SQNR", "MM-004": "PROBE"})
def rounds_to_tf32(patch: Patch) -> None:
    bind(patch, _in_tf32)


def _in_tf32(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
    narrow = a.dtype == b.dtype == torch.float32
    return right(tf32(a.contiguous()), tf32(b.contiguous()), bias, out) if narrow else right(a, b, bias, out)


@mutant("G18", "rounds to the dtype of the operands before out_dtype", {"MM-009": "EXACT"})
def rounds_twice(patch: Patch) -> None:
    bind(patch, lambda a, b, bias, out: right(a, b, bias, a.dtype).to(out))


@mutant("G19", "one bare RuntimeError for whatever does not fit", {"MM-013": "ERROR"})
def bare_errors(patch: Patch) -> None:
    bind(patch, right)


# ------------------------------------------------------------------------------------- right, though different


@benign("B1", "adds blocks of K from the last to the first", ("MM",))
def reversed_order(patch: Patch) -> None:
    def last_first(blocks: list[int]) -> list[int]:
        return blocks[::-1]

    bind(patch, _checked(lambda a, b, bias, out: finish(blocked(a, b, 16, torch.add, last_first), bias, out)))


@benign("B2", "splits K in two, in float32", ("MM",))
def split_k(patch: Patch) -> None:
    def product(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        return finish(blocked(a, b, max(1, (a.shape[-1] + 1) // 2), torch.add, forward), bias, out)

    bind(patch, _checked(product))


@benign("B4", "rounds sums of blocks toward zero, as declared", ("MM",))
def rounds_toward_zero(patch: Patch) -> None:
    def add(acc: Tensor, part: Tensor) -> Tensor:
        exact, near = acc.double() + part.double(), acc + part
        over = near.double().abs() > exact.abs()
        return torch.where(over & near.isfinite(), torch.nextafter(near, torch.zeros_like(near)), near)

    bind(patch, _checked(lambda a, b, bias, out: finish(blocked(a, b, 16, add, forward), bias, out)))
    declare(patch, matmul__accumulator="float32_toward_zero")


@benign("B11", "rounds float32 operands to TF32, as declared", ("MM",))
def declared_tf32(patch: Patch) -> None:
    bind(patch, _checked(_in_tf32))
    declare(patch, matmul__float32="tf32")


def _checked(product: Product) -> Product:
    """``product`` with the errors of a right one, and with gradients that are such products too."""

    class Checked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
            ctx.save_for_backward(a, b)
            ctx.biased = bias
            return product(a, b, bias, out)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            (a, b), grad = ctx.saved_tensors, grads[0]
            left, right = product(grad, b.mT, None, a.dtype), product(a.mT, grad, None, b.dtype)
            return left, right, None if ctx.biased is None else grad.float().sum(0).to(ctx.biased.dtype), None

    def checked(a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype) -> Tensor:
        batches = zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False)
        inner = a.dim() >= 1 and b.dim() >= 2 and a.shape[-1] == b.shape[-2] and a.device == b.device
        if not inner or any(m != n and 1 not in (m, n) for m, n in batches):
            raise ValueError("these operands do not fit")
        return Checked.apply(a, b, bias, out)  # pyright: ignore[reportReturnType]

    return checked
