"""Dense products in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelbridge.backend import Format, Implementation, Matmul
from accelbridge.errors import Unsupported

if TYPE_CHECKING:
    from accelbridge.precision.quantized import QuantizedTensor


class PortableMatmul(Matmul):
    """Products that any device can do. ``name`` is the backend's, for messages."""

    def __init__(self, name: str) -> None:
        self.name = name

    def implementations(self) -> Sequence[Implementation]:
        """None of its own: the reference of ``linear`` is always a candidate."""
        return ()

    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """``a @ b``, accumulated in float32 or wider, rounded once to ``out_dtype`` (default: that of ``a``).

        Operands narrower than float32 are widened first (exact): what a device's own 16-bit product does
        between partial sums is for its vendor to say. torch 2.13 on an x86 CPU rounds once too, for K up to
        16384. Raises ``ValueError`` for operands that don't fit, ``Unsupported`` for bool, which some devices would
        take for "or" of "and".
        """
        _check(a, b)
        if torch.bool in (a.dtype, b.dtype):
            raise Unsupported(
                f"a product of {a.dtype} and {b.dtype} asked; torch defines none of bool; convert to a number"
            )
        out_dtype = a.dtype if out_dtype is None else out_dtype
        wide = torch.promote_types(_widened(a.dtype), _widened(b.dtype))
        return (a.to(wide) @ b.to(wide)).to(out_dtype)

    def quantize(self, x: Tensor, format: Format, scaling: str, scale: Tensor | None = None) -> QuantizedTensor:
        """Raises ``Unsupported``."""
        raise Unsupported(
            f'backend "{self.name}" was asked to quantize to {format.name} with {scaling} scaling, but has '
            f"no quantized products; use float32, bfloat16 or float16"
        )

    def scaled_mm(self, a: Any, b: Any, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """Raises ``Unsupported``."""
        formats = " x ".join(_format_name(x) for x in (a, b))
        raise Unsupported(
            f'backend "{self.name}" was asked for a scaled product {formats}, but has no quantized products; '
            f"use float32, bfloat16 or float16"
        )


def _check(a: Tensor, b: Tensor) -> None:
    fit = min(a.dim(), b.dim()) >= 2 and a.shape[-1] == b.shape[-2] and a.device == b.device
    # Batch dimensions fit, counted from the last, where they are equal or one of them is 1.
    batches = zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False)
    if not fit or any(m != n and 1 not in (m, n) for m, n in batches):
        raise ValueError(
            f"matmul takes a [..., M, K] and b [..., K, N] of one K, on one device, whose batches broadcast; "
            f"found a {tuple(a.shape)} on {a.device} and b {tuple(b.shape)} on {b.device}"
        )


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _format_name(x: Any) -> str:
    found = getattr(x, "format", None)
    if isinstance(found, Format):
        return found.name
    return str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
