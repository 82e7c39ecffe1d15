"""fp8 products on NVIDIA GPUs: torch's scaled_mm, by cuBLASLt and CUTLASS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from accelbridge.backend import FULL, Capabilities, Implementation, Matmul, Request, Support, unsupported
from accelbridge.portable.known_bad import at_least
from accelbridge_cuda.facts import ARCHITECTURES, architecture_of

_UNUSED = {
    "transformer_engine": (
        "transformer_engine",
        "its modules quantize, multiply and keep state in one, and take no matrix that is quantized already; as a "
        "product it calls cuBLASLt, as torch_scaled_mm does",
    ),
    "torchao": ("torchao", "its float8 layers call torch._scaled_mm, as torch_scaled_mm does"),
}
"""Packages that have fp8 layers of their own, and why the plan binds none: Transformer Engine 2.20 (transformer_engine/
pytorch/module), torchao 0.18 (torchao/float8/float8_ops.py)."""


def outputs(architecture: str, software: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Dtypes of a result that are less than float32, bfloat16 and float16. With row scales CUTLASS gives bfloat16 in
    every torch, cuBLASLt float32 too (pytorch/pytorch#162022)."""
    known = ARCHITECTURES.get(architecture)
    wide = known is not None and known.row_by_cublas and at_least(software.get("cuda"), "12.9")
    return {"row": ("bfloat16", "float32") if wide else ("bfloat16",), "block1x128": ("bfloat16", "float32")}


def make_matmul(name: str, capabilities: Capabilities, software: Mapping[str, str]) -> Matmul:
    """The products that ``capabilities`` calls full by torch, the others emulated."""
    from accelbridge.portable.scaled_mm import Conventions, TorchScaledMm

    given = outputs(architecture_of(capabilities.chip.name), software)
    # MX scales in tiles 32_4_4: ScaledBlas.cpp, _scaled_mxfp8_mxfp8.
    conventions = Conventions(swizzled=True, outputs=given, public=at_least(software.get("torch"), "2.10"))
    return TorchScaledMm(name, capabilities.table, conventions)


def candidates(load: Callable[[], Callable[..., Any]], capabilities: Capabilities) -> Sequence[Implementation]:
    """Candidates for ``scaled_mm``, best first; ``load`` gives that of :func:`make_matmul`, which imports torch."""

    def supports(request: Request) -> Support:
        cell = capabilities.support(request.op, request.dtype, request.variant, request.shape)
        return FULL if cell.level == "full" else unsupported(cell.reason)

    launches = ("aten::_scaled_mm", "aten::_scaled_mm_v2")
    torchs = Implementation("scaled_mm", "torch_scaled_mm", supports, load, launches=launches)
    return (torchs, *(_unused(name) for name in _UNUSED))


def _unused(name: str) -> Implementation:
    module, why = _UNUSED[name]

    def supports(request: Request) -> Support:
        return unsupported(why if find_spec(module) else "it is not installed")

    def load() -> NoReturn:
        raise AssertionError(f"{name} serves nothing")

    return Implementation("scaled_mm", name, supports, load)
