"""fp8 products on AMD GPUs: torch's scaled_mm, by hipBLASLt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from accelbridge.backend import FULL, Capabilities, Implementation, Matmul, Request, Support, unsupported
from accelbridge.portable.known_bad import at_least

OUTPUTS = {"row": ("bfloat16",), "mx": ("bfloat16", "float16")}
"""Dtypes of a result that are less than float32, bfloat16 and float16 (ScaledBlas.cpp)."""

_UNUSED = {
    "transformer_engine": "its modules quantize, multiply and keep state in one, and take no matrix that is quantized "
    "already; as a product it calls hipBLASLt, as torch_scaled_mm does",
    "torchao": "its float8 layers call torch._scaled_mm, as torch_scaled_mm does",
}
"""Packages that have fp8 layers of their own, and why the plan binds none."""


def make_matmul(name: str, capabilities: Capabilities, software: Mapping[str, str]) -> Matmul:
    """The products that ``capabilities`` calls full by torch, the others emulated."""
    from accelbridge.portable.scaled_mm import Conventions, TorchScaledMm

    # Up to ROCm 7.13 MX scales are not in tiles: ScaledBlas.cpp, _scaled_mxfp8_mxfp8.
    conventions = Conventions(swizzled=False, outputs=OUTPUTS, public=at_least(software.get("torch"), "2.10"))
    return TorchScaledMm(name, capabilities.table, conventions)


def candidates(load: Callable[[], Callable[..., Any]], capabilities: Capabilities) -> Sequence[Implementation]:
    """Candidates for ``scaled_mm``, best first; ``load`` gives that of :func:`make_matmul`, which imports torch."""

    def supports(request: Request) -> Support:
        cell = capabilities.support(request.op, request.dtype, request.variant, request.shape)
        return FULL if cell.level == "full" else unsupported(cell.reason)

    launches = ("aten::_scaled_mm", "aten::_scaled_mm_v2")
    torchs = Implementation("scaled_mm", "torch_scaled_mm", supports, load, launches=launches)
    return (torchs, *(_unused(module, why) for module, why in _UNUSED.items()))


def _unused(module: str, why: str) -> Implementation:
    def supports(request: Request) -> Support:
        return unsupported(why if find_spec(module) else "it is not installed")

    def load() -> NoReturn:
        raise AssertionError(f"{module} serves nothing")

    return Implementation("scaled_mm", module, supports, load)
