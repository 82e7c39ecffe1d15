"""Attention candidates on NVIDIA GPUs, in torch's own order; then our own kernel, for what none of those does.

Source of what each takes: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of pytorch/pytorch, read 2026-11-30,
and torch/nn/attention/_fa3.py and _fa4.py (2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

from accelbridge.backend import Implementation, Request, Support, unsupported
from accelbridge.kernels import available
from accelbridge.kernels.flash_candidate import flash_attention
from accelbridge.portable.known_bad import at_least, refusal, version_in
from accelbridge.portable.sdpa import Kernel, candidate
from accelbridge_cuda.facts import ARCHITECTURES
from accelbridge_cuda.rules import RULES
from accelbridge_cuda.tiles import lacking, tiles

_HALF = ("bfloat16", "float16")

CUDNN = Kernel(
    "cudnn",
    "CUDNN_ATTENTION",
    ("aten::_scaled_dot_product_cudnn_attention",),
    _HALF,
    masks=True,
    grouped=True,
    max_head_dim=128,
    head_dim_multiple=8,
    min_keys=2,
    deterministic=False,  # check_cudnn_deterministic refuses it under torch.use_deterministic_algorithms
)
FLASH = Kernel(
    "flash",
    "FLASH_ATTENTION",
    ("aten::_scaled_dot_product_flash_attention",),
    _HALF,
    masks=False,
    grouped=True,
    max_head_dim=256,
)
EFFICIENT = Kernel(
    "efficient",
    "EFFICIENT_ATTENTION",
    ("aten::_scaled_dot_product_efficient_attention",),
    (*_HALF, "float32"),
    masks=True,
    grouped=False,  # grouped heads since torch 2.14 or later; repeated, they are right in every torch
    head_dim_multiple=8,
)
_PACKAGES = {"fa3": ("FA3", "flash_attn_interface"), "fa4": ("FA4", "flash_attn.cute")}
"""Name of the implementation in torch, and the module that it imports."""
_SINCE = {"fa3": "2.11", "fa4": "2.10"}
"""The first torch that can put it in place (torch/nn/attention/_fa3.py, _fa4.py)."""


def candidates(architecture: str, software: Mapping[str, str]) -> Sequence[Implementation]:
    """Candidates for ``attention`` on this architecture, best first. Versions that only a process with the package can
    tell ("fa3", "fa4") come after torch's: they are taken where they are asked for."""
    known = ARCHITECTURES.get(architecture)
    first = known is not None and known.cudnn_first and not version_in(software.get("cudnn"), "<=9.15.0")

    def against(name: str, *more: Callable[[Request], Support | None]) -> Callable[[Request], Support | None]:
        def refuse(request: Request) -> Support | None:
            found = (each(request) for each in more)
            own = next((each for each in found if each is not None), None)
            return own if own is not None else refusal(RULES, name, request, architecture, software)

        return refuse

    cudnn = candidate(CUDNN, against("cudnn", lambda _: _no_cudnn(software)))
    flash = candidate(FLASH, against("flash", lambda request: _flash_backward(architecture, request)))
    efficient = candidate(EFFICIENT, against("efficient"))
    by_torch = (cudnn, flash, efficient) if first else (flash, efficient, cudnn)
    packages = (_own_flash(name, architecture, software, against(name)) for name in _PACKAGES)
    ours = flash_attention(tiles(architecture), lacking(architecture), available(software), against("triton"))
    return (*by_torch, *packages, ours)


def _no_cudnn(software: Mapping[str, str]) -> Support | None:
    """torch refuses versions before 9 (can_use_cudnn_attention)."""
    if at_least(software.get("cudnn"), "9"):
        return None
    return unsupported(f"needs cuDNN 9 or later, not {software.get('cudnn', 'an unknown version')}")


def _flash_backward(architecture: str, request: Request) -> Support | None:
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""
    if architecture in ("sm86", "sm89", "sm120") and 192 < request.shape.get("head_dim", 0) <= 224:
        return unsupported(f"has no backward pass for heads above 192 and up to 224 on {architecture}")
    return None


def _own_flash(
    name: str, architecture: str, software: Mapping[str, str], against: Callable[[Request], Support | None]
) -> Implementation:
    """flash-attention's own newer versions, which torch puts in the place of its flash kernel for the whole process."""
    label, module = _PACKAGES[name]

    def refuse(request: Request) -> Support | None:
        known = ARCHITECTURES.get(architecture)
        if known is None or name not in known.flash:
            return unsupported(f"{label} is not written for {architecture}")
        if not at_least(torch := software.get("torch"), _SINCE[name]):
            return unsupported(
                f"torch {_SINCE[name]} is the first that can use {label}, not {torch or 'an unknown one'}"
            )
        if not _installed(module):
            return unsupported(f"{module} is not installed")
        return against(request)

    kernel = replace(FLASH, name=name, max_head_dim=128)  # what each takes above was not looked up
    return candidate(kernel, refuse, lambda: _activate(label))


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def _activate(label: str) -> None:
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl(label)
