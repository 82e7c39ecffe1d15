"""Defects of conversions and of subnormal numbers, seeded in the kernels that the host's device runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accelbridge.conformance.mutants import Patch, benign, mutant
from accelbridge.conformance.mutants.info import restate

_NARROW = (torch.bfloat16, torch.float16)


def _broken_casts(patch: Patch, broken: Any) -> None:
    """``broken(wide, narrow)`` in the place of every conversion from float32 to a 16-bit float."""

    def to(inner: Any, self: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = inner(self, *args, **kwargs)
        narrows = self.dtype == torch.float32 and out.dtype in _NARROW
        return broken(self, out) if narrows else out

    def copy_(inner: Any, self: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        if source.dtype == torch.float32 and self.dtype in _NARROW:
            source = source.to(self.dtype)
        return inner(self, source, *args, **kwargs)

    patch(torch.Tensor, "to", to)
    patch(torch.Tensor, "copy_", copy_)


@mutant("C1", "casts truncate instead of rounding to nearest", {"CST-001": "EXACT", "CST-002": "EXACT"})
def truncating_casts(patch: Patch) -> None:
    def toward_zero(wide: Tensor, narrow: Tensor) -> Tensor:
        away = narrow.float().abs() > wide.abs()
        kind = narrow.view(torch.int16)
        return torch.where(away, kind - 1, kind).view(narrow.dtype)  # one magnitude less, whatever the sign

    _broken_casts(patch, toward_zero)


@mutant("C6", "casts swallow NaN", {"CST-003": "EXACT"})
def nan_swallowed(patch: Patch) -> None:
    _broken_casts(patch, lambda wide, narrow: torch.where(wide.isnan(), torch.zeros_like(narrow), narrow))


@mutant(
    "C4",
    "subnormal numbers are flushed, undeclared",
    {"CST-002": "EXACT", "CST-004": "EXACT", "INF-007": "PROBE"},
)
def flushed_undeclared(patch: Patch) -> None:
    _flush(patch)


@benign("B3", "subnormal numbers are flushed, and the capabilities say so", ("CST", "INF-007"))
def flushed_declared(patch: Patch) -> None:
    _flush(patch)

    flushed: Any = dict.fromkeys(("float32", "bfloat16", "float16"), "flushed")
    restate(patch, lambda stated: replace(stated, subnormals=flushed))


def _flush(patch: Patch) -> None:
    """Sums, products and conversions to 16 bits take and give 0 where a number is subnormal."""

    def flush(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.dtype in (torch.float32, *_NARROW)):
            return x
        integer = torch.int32 if x.dtype == torch.float32 else torch.int16
        exponent = torch.finfo(x.dtype).smallest_normal
        sign = torch.tensor(-0.0, dtype=x.dtype).view(integer)
        tiny = x.abs() < exponent
        return torch.where(tiny, x.view(integer) & sign, x.view(integer)).view(x.dtype)

    def arithmetic(inner: Any, self: Tensor, other: Any) -> Any:
        return flush(inner(flush(self), flush(other)))

    patch(torch.Tensor, "__add__", arithmetic)
    patch(torch.Tensor, "__mul__", arithmetic)
    _broken_casts(patch, lambda wide, narrow: flush(narrow))
