"""Attention kernels of TorchTPU as candidates. None of it was run on a TPU.

Source of what each takes: the texts of torch_tpu 0.2.0 (libpywrap_2_13_0_common.so, "TorchTPU only supports
FLASH_ATTENTION SDPBackend ... when these conditions are met"; _internal/ops/splash_attention.py), and of jax 0.10.2,
jax/experimental/pallas/ops/tpu/splash_attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelbridge.backend import FULL, Implementation, Request, Support, unsupported
from accelbridge.portable.sdpa import Kernel, candidate

LANES = 128
"""Width of a TPU's vector registers, of which the kernels' tiles are multiples."""
BLOCK = 512
"""splash_sdpa's default blocks of queries and of keys; shorter sequences are one block."""
FLASH = Kernel(
    "flash",
    "FLASH_ATTENTION",
    ("aten::_scaled_dot_product_flash_attention",),
    ("bfloat16", "float32"),
    masks=False,
    grouped=False,
)
_SPLASH_NEEDS = frozenset({"causal", "window", "gqa"})


def candidates(is_tpu: bool, software: Mapping[str, str]) -> Sequence[Implementation]:
    """Candidates for ``attention``, best first."""

    def on_tpu(rule: Callable[[Request], Support | None]) -> Callable[[Request], Support | None]:
        def refuse(request: Request) -> Support | None:
            # On a host: "no registered implementation for custom call to tpu_custom_call for Host".
            return rule(request) if is_tpu else unsupported("is a kernel for TPUs, which no host can run")

        return refuse

    splash = on_tpu(lambda request: _splash(request, software))

    def serves(request: Request) -> Support:
        against = splash(request)
        return FULL if against is None else against  # what is unsupported is false

    return (candidate(FLASH, on_tpu(_flash)), Implementation("attention", "splash", serves, _load_splash))


def _flash(request: Request) -> Support | None:
    head_dim = request.shape.get("head_dim", 0)
    if head_dim > LANES and head_dim % LANES:
        return unsupported(f"takes heads below {LANES}, or of a multiple of it, not {head_dim}")
    return None


def _splash(request: Request, software: Mapping[str, str]) -> Support | None:
    if "jax" not in software:
        return unsupported("needs jax, which is not installed")
    if lacking := sorted(request.needs - _SPLASH_NEEDS):
        return unsupported(f"splash_sdpa has no {' and '.join(lacking)}")
    if "causal" not in request.needs:
        return unsupported("is used for causal attention only")
    if request.dtype not in FLASH.dtypes:
        return unsupported(f"takes {', '.join(FLASH.dtypes)}, not {request.dtype}")
    head_dim, sequence = request.shape.get("head_dim", 0), request.shape.get("sequence", 0)
    if head_dim % LANES:
        return unsupported(f"takes heads of a multiple of {LANES}, not {head_dim}")
    if sequence % (BLOCK if sequence > BLOCK else LANES):
        return unsupported(f"takes sequences of a multiple of {BLOCK}, or of {LANES} up to that, not {sequence}")
    return None


def _load_splash() -> Callable[..., Any]:
    from accelbridge_xla.eager.splash import splash

    return splash
