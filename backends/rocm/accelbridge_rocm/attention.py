"""Attention candidates on AMD GPUs, in torch's own order: AOTriton's kernels, then those that have to be asked for;
last, for what none of those does, our own kernel.

Source of what each takes: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of pytorch/pytorch, where USE_ROCM is
defined, read 2026-11-30.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from accelbridge.backend import FULL, Implementation, Mask, Request, Support, unsupported
from accelbridge.errors import BackendError, Unsupported
from accelbridge.kernels import available
from accelbridge.kernels.flash_candidate import flash_attention
from accelbridge.portable.known_bad import at_least, refusal
from accelbridge.portable.sdpa import Kernel, candidate
from accelbridge_rocm.facts import ARCHITECTURES
from accelbridge_rocm.rules import RULES
from accelbridge_rocm.tiles import lacking, tiles

if TYPE_CHECKING:
    from torch import Tensor

_HALF = ("bfloat16", "float16")

FLASH = Kernel(
    "flash",
    "FLASH_ATTENTION",
    ("aten::_scaled_dot_product_flash_attention",),
    _HALF,
    masks=False,
    grouped=True,
    max_head_dim=512,
)
EFFICIENT = Kernel(
    "efficient",
    "EFFICIENT_ATTENTION",
    ("aten::_scaled_dot_product_efficient_attention",),
    (*_HALF, "float32"),
    masks=True,
    grouped=False,
    max_head_dim=256,
    head_dim_multiple=8,
)


def candidates(architecture: str, software: Mapping[str, str]) -> Sequence[Implementation]:
    """Candidates for ``attention`` on this architecture, best first."""
    known = ARCHITECTURES.get(architecture)
    dense = known is not None and known.dense_values

    def against(name: str) -> Callable[[Request], Support | None]:
        return lambda request: refusal(RULES, name, request, architecture, software)

    # AOTriton's backward kernels of AITER add in any order; torch can rule them out from AOTriton 0.12 on, whose option
    # for it (ROCm/aotriton#134) torch 2.13 uses, by a patch of a distribution that builds it (its source was not read);
    # of older ones it is not known.
    sure = known is not None and (not known.aiter or at_least(software.get("torch"), "2.13"))
    flash, efficient = (replace(kernel, dense_values=dense, deterministic=sure) for kernel in (FLASH, EFFICIENT))
    # Whether torch was built with CK's kernels is told by torch alone, when it is bound; whether their backward pass is
    # deterministic was not found.
    ck = replace(flash, name="ck", max_head_dim=128, deterministic=False)
    return (
        candidate(flash, against("flash")),
        candidate(efficient, against("efficient")),
        candidate(ck, against("ck"), _prefer_ck),
        Implementation("attention", "aiter", lambda request: _aiter_serves(architecture, request), lambda: aiter),
        flash_attention(tiles(architecture), lacking(architecture), available(software), against("triton")),
    )


def _prefer_ck() -> None:
    """torch takes CK's kernels in the place of AOTriton's for the whole process (preferred_rocm_fa_library)."""
    import torch

    # torch 2.9 has the preference, and does not tell whether it was built with it.
    if not getattr(torch.backends.cuda, "is_ck_sdpa_available", bool)():
        raise BackendError(
            "backend.ops.attention ck asked; this torch was built without it; choose flash, or a torch built with "
            "USE_ROCM_CK_SDPA=1"
        )
    torch.backends.cuda.preferred_rocm_fa_library("ck")


def _aiter_serves(architecture: str, request: Request) -> Support:
    known = ARCHITECTURES.get(architecture)
    if known is None or not known.aiter:
        return unsupported(f"aiter is not written for {architecture}")
    if find_spec("aiter") is None:
        return unsupported("aiter is not installed")
    if lacking := sorted(request.needs - {"causal", "window", "gqa"}):
        return unsupported(f"is not bound for {', '.join(lacking)}")
    if request.dtype not in _HALF or request.shape.get("head_dim", 0) > 128:
        return unsupported(f"is bound for {', '.join(_HALF)} and heads up to 128")
    return FULL


def aiter(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor:
    """The op ``attention`` by ``aiter.flash_attn_func`` (ROCm/aiter, aiter/ops/mha.py), which takes [B, S, H, D], reads
    grouped heads in place, and aligns causal masks bottom-right. Not run yet on a GPU."""
    from aiter import flash_attn_func  # pyright: ignore[reportMissingImports]

    from accelbridge.ops.dot_product import check_attention

    check_attention(q_BHSD, k_BGSD, v_BGSD, mask, softcap)
    if softcap is not None or return_lse or mask.segments_BS is not None:
        raise Unsupported(
            "attention with a softcap, lse or segments asked of aiter, which is not bound for it; bind another one"
        )
    window = (-1, -1, 0) if mask.window is None else (mask.window - 1, 0, 0)
    q, k, v = (x.transpose(1, 2) for x in (q_BHSD, k_BGSD, v_BGSD))
    out = flash_attn_func(q, k, v, softmax_scale=scale, causal=mask.causal, window_size=window, deterministic=True)
    return out.transpose(1, 2)
