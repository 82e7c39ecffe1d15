"""What the kernels of layers and losses take. No torch, no triton: plans are made by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from accelbridge.backend import FULL, Request, Support, unsupported
from accelbridge.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
RMS_NORM_COLUMNS = 16384
"""Longest row of ``rms_norm``, which one program holds in registers."""
ROPE_PAIRS = 256
"""Most pairs of a head of ``rope``."""


def serves(request: Request) -> Support:
    """Whether the kernel of ``request.op`` takes such calls."""
    if request.dtype not in DTYPES:
        return unsupported(f"takes {', '.join(DTYPES)}, not {request.dtype}")
    own = _OWN.get(request.op)
    return FULL if own is None else own(request)


def _rms_norm(request: Request) -> Support:
    dim = request.shape.get("dim", 0)
    if dim > RMS_NORM_COLUMNS:
        return unsupported(f"holds a row in registers, and takes {RMS_NORM_COLUMNS} elements, not {dim}")
    return FULL


def _rope(request: Request) -> Support:
    head_dim = request.shape.get("head_dim", 0)
    if head_dim > 2 * ROPE_PAIRS:
        return unsupported(f"takes heads up to {2 * ROPE_PAIRS}, not {head_dim}")
    return _fused(request)


def _fused(request: Request) -> Support:
    """Where the unit is compiled, the reference is one pass forward and one backward as well, and joined to what stands
    before and after it, which a kernel of ours would cut off."""
    if "compiled" in request.needs:
        return unsupported("torch.compile makes one pass of the reference, and joins it to its neighbours")
    return FULL


_OWN: Mapping[str, Callable[[Request], Support]] = {"rms_norm": _rms_norm, "rope": _rope, "swiglu": _fused}


def check_dtype(op: str, *tensors: Tensor) -> None:
    """Raise ``Unsupported`` for a tensor that the kernels of ``op`` cannot read."""
    for x in tensors:
        if str(x.dtype).removeprefix("torch.") not in DTYPES:
            raise Unsupported(
                f"{op} over {x.dtype} asked of the Triton kernel, which takes {', '.join(DTYPES)}; bind the portable "
                "reference"
            )
