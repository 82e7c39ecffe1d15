"""Comparators. Each is "good if error <= limit", so that a NaN anywhere is never good.

They look at host tensors only and return a :class:`Verdict`; ``tests/test_conformance_checks.py`` tries them on bad
input. Formulae: docs/conformance.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """What one comparison found."""

    good: bool
    metric: str
    value: float
    """The measured number; of a bound, the largest error over its bound."""
    limit: float
    compared: int
    """Elements compared."""
    message: str = ""
    worst: tuple[int, ...] = ()
    floor: bool = False
    """Whether ``limit`` is the least that is good, and not the most."""
    vacuous: bool = False
    """Whether the reference is constant, so that a great many wrong answers would pass too."""


def _shape_fault(got: Tensor, want: Tensor, dtype: torch.dtype | None) -> str:
    if tuple(got.shape) != tuple(want.shape):
        return f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if dtype is not None and got.dtype != dtype:
        return f"dtype {got.dtype}, expected {dtype}"
    return ""


def _constant(want: Tensor) -> bool:
    flat = want.reshape(-1)
    return flat.numel() < 2 or bool((flat == flat[0]).all())


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape)) if shape else ()


def bits(x: Tensor) -> Tensor:
    """The elements of ``x`` as integers of the same size, every NaN as one and the same value."""
    if x.dtype.is_complex:
        x = torch.view_as_real(x)
    if not x.dtype.is_floating_point:
        return x
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    as_bits = x.contiguous().view(kind)
    # Bytes are bytes: which of fp8's codes are NaN depends on who reads them.
    return as_bits if kind == torch.uint8 else as_bits.masked_fill(x.isnan(), -1)


def equal(got: Tensor, want: Tensor) -> Verdict:
    """The same shape, dtype and bits (any NaN for any NaN, -0 is not +0)."""
    fault = _shape_fault(got, want, want.dtype)
    if fault:
        return Verdict(False, "different elements", math.nan, 0.0, want.numel(), fault)
    if want.numel() == 0:
        return Verdict(True, "different elements", 0.0, 0.0, 1)
    wrong = (bits(got) != bits(want)).reshape(-1)
    count = int(wrong.sum())
    if not count:
        return Verdict(True, "different elements", 0.0, 0.0, want.numel(), vacuous=_constant(want))
    first = int(wrong.to(torch.uint8).argmax())
    flat_got, flat_want = (
        x.reshape(-1) if not x.is_complex() else torch.view_as_real(x).reshape(-1) for x in (got, want)
    )
    where = _index(first, want.shape) if not want.is_complex() else (first,)
    found, expected = flat_got[first].item(), flat_want[first].item()
    text = f"{count} of {wrong.numel()} elements differ, first at {where}: {found!r}, expected {expected!r}"
    return Verdict(False, "different elements", float(count), 0.0, want.numel(), text, where)


def within(got: Tensor, want: Tensor, bound: Tensor) -> Verdict:
    """|got - want| <= bound, element by element in float64; what is not finite must agree in kind and sign."""
    fault = _shape_fault(got, want, None)
    if fault:
        return Verdict(False, "error / bound", math.nan, 1.0, want.numel(), fault)
    if want.numel() == 0:
        return Verdict(True, "error / bound", 0.0, 1.0, 1)
    got, want, bound = got.double(), want.double(), bound.double().expand_as(want)
    finite = want.isfinite()
    same = (got == want) | (got.isnan() & want.isnan())
    ratio = ((got - want).abs() / bound).where(~same, torch.zeros_like(want))
    ratio = ratio.where(finite | same, torch.full_like(want, math.inf)).nan_to_num(nan=math.inf)
    worst = int(ratio.argmax())
    value = float(ratio.reshape(-1)[worst])
    where = _index(worst, want.shape)
    text = f"at {where}: {got[where].item()!r}, expected {want[where].item()!r} within {bound[where].item():.3g}"
    good = value <= 1.0
    return Verdict(good, "error / bound", value, 1.0, want.numel(), "" if good else text, where, _constant(want))


def sqnr_db(got: Tensor, want: Tensor) -> Tensor:
    """Signal to quantisation-noise ratio in dB over the last dimension; -inf where ``got`` is not finite, +inf only
    where the error is 0."""
    got, want = got.double(), want.double()
    noise = (got - want).square().sum(-1)
    signal = want.square().sum(-1)
    ratio = 10.0 * (signal / noise).log10()
    ratio = ratio.where(noise != 0, torch.full_like(ratio, math.inf))  # also 0 / 0: nothing wrong
    return ratio.where(got.isfinite().all(-1), torch.full_like(ratio, -math.inf)).nan_to_num(
        nan=-math.inf, posinf=math.inf
    )


def sqnr(got: Tensor, want: Tensor, floor_db: float, rows: bool = True) -> Verdict:
    """SQNR >= ``floor_db`` over the whole tensor and, with ``rows``, over each row: one bad row of 1024 leaves 30 dB
    of the whole."""
    fault = _shape_fault(got, want, None)
    if fault or want.numel() == 0:
        return Verdict(not fault, "SQNR dB", math.nan if fault else math.inf, floor_db, max(1, want.numel()), fault)
    values = sqnr_db(got.reshape(1, -1), want.reshape(1, -1))
    if rows and want.dim() > 1:
        values = torch.cat([values, sqnr_db(got, want).reshape(-1)])
    worst = int(values.argmin())
    value = float(values[worst])
    where = "overall" if worst == 0 else f"in row {worst - 1}"
    good = value >= floor_db
    text = "" if good else f"{value:.1f} dB {where}, at least {floor_db:g} dB expected"
    return Verdict(good, "SQNR dB", value, floor_db, want.numel(), text, vacuous=_constant(want))


def at_most(value: float, limit: float, metric: str) -> Verdict:
    """value <= limit."""
    good = value <= limit
    return Verdict(
        good, metric, float(value), float(limit), 1, "" if good else f"{metric} {value:g}, at most {limit:g} expected"
    )


def at_least(value: float, limit: float, metric: str) -> Verdict:
    """value >= limit."""
    good = value >= limit
    text = "" if good else f"{metric} {value:g}, at least {limit:g} expected"
    return Verdict(good, metric, float(value), float(limit), 1, text, floor=True)


def same(got: object, want: object, metric: str) -> Verdict:
    """Equality of two plain values of the same type."""
    good = type(got) is type(want) and got == want
    return Verdict(good, metric, 0.0 if good else 1.0, 0.0, 1, "" if good else f"{got!r}, expected {want!r}")
