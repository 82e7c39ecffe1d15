"""fp8 products by torch's own ``scaled_mm``, for devices whose library has them; by our own kernels, where the device
has matrix instructions that its library makes no use of; the emulation for the rest.

Source of what torch takes, unless said otherwise: aten/src/ATen/native/cuda/ScaledBlas.cpp and
aten/src/ATen/native/ScaledBlasUtils.cpp of pytorch/pytorch, read 2026-11-30, and torch/_meta_registrations.py (2.13).
Its scales are what to multiply with when dequantizing, as ours are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelbridge.backend import Format, Support, unsupported
from accelbridge.errors import Unsupported
from accelbridge.kernels.fp8_cells import Fp8Kernels
from accelbridge.kernels.installed import installed_triton, interpreted
from accelbridge.kernels.tiles import bind
from accelbridge.portable.fp8 import EmulatedFp8, k_step
from accelbridge.portable.fp8_cells import MIXED
from accelbridge.precision.quantized import QuantizedTensor, dtype_of
from accelbridge.precision.scalings import WHOLE, scaling_of

KINDS: Mapping[tuple[int, int], str] = {
    (WHOLE, WHOLE): "tensor",
    (1, WHOLE): "row",
    (1, 32): "mx",
    (1, 128): "block1x128",
    (128, 128): "block128x128",
}
"""Scaling by the block that shares a scale; cells of the same scaling with scales of powers of two are called alike."""
RECIPES = {
    "tensor": "TensorWise",
    "row": "RowWise",
    "mx": "BlockWise1x32",
    "block1x128": "BlockWise1x128",
    "block128x128": "BlockWise128x128",
}
"""Members of ``torch.nn.functional.ScalingType``."""
_ONE_FORMAT = ("mx", "block1x128", "block128x128")
"""Scalings for which ``torch.nn.functional.scaled_mm`` takes nothing but float8_e4m3fn (check_mxfp8_recipe,
check_deepseek_recipe). ``torch._scaled_mm``, which asks for no more than 8-bit floats, takes mixed pairs there too."""


_NOT_STATED = unsupported("the backend states no support for it")


@dataclass(frozen=True)
class Conventions:
    """In what one device's library differs from another's."""

    swizzled: bool
    """Whether e8m0 scales lie in tiles (:func:`swizzled_32_4_4`), or as they are."""
    outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Dtypes of the result that the library gives, by scaling of the first operand; scalings that are absent give
    float32, bfloat16 and float16."""
    public: bool = True
    """Whether there is a ``torch.nn.functional.scaled_mm`` (torch 2.10 and later)."""


@dataclass(frozen=True)
class _Ours:
    """Our kernels, imported, with their tiles bound."""

    quantize: Callable[..., QuantizedTensor]
    rounds_otherwise: Callable[[Format], str]
    scaled_mm: Callable[..., Tensor]
    lacks: Callable[[QuantizedTensor, QuantizedTensor], str]
    products: Mapping[str, Support]
    on_hosts: bool

    @classmethod
    def of(cls, kernels: Fp8Kernels) -> _Ours:
        from accelbridge.kernels import quantize, scaled_mm

        bind(kernels.tiles)
        products = {kinds: kernels.product(kinds) for kinds in (*RECIPES, *MIXED)}
        return cls(
            quantize.quantize,
            quantize.rounds_otherwise,
            scaled_mm.scaled_mm,
            scaled_mm.lacks,
            products,
            interpreted(),
        )

    def may_run_on(self, x: Tensor) -> bool:
        """Whether a kernel could take ``x``: on a host only where kernels are interpreted, and not what is spread over
        several devices, which their owners take apart."""
        return (x.device.type != "cpu" or self.on_hosts) and not hasattr(x, "device_mesh")

    def multiplies(self, a: QuantizedTensor, b: QuantizedTensor) -> bool:
        found = self.products.get(kinds_of(a, b))
        fits = found is not None and bool(found.within(_sizes(a, b)))
        return fits and self.may_run_on(a.payload) and not self.lacks(a, b.t())


class TorchScaledMm(EmulatedFp8):
    """Products that ``table``, of the library, calls full, by torch; others by ``kernels`` as far as they serve them;
    those that are left, and that it calls emulated, by way of float32.

    A dtype of the result that the library lacks goes the same way: what may be asked is part of the interface, and the
    trainer asks for bfloat16. Quantizing is our kernels', too, or plain PyTorch on the device.
    """

    def __init__(
        self,
        name: str,
        table: Mapping[tuple[str, str, str], Support],
        conventions: Conventions,
        kernels: Fp8Kernels | None = None,
    ) -> None:
        super().__init__(name)
        self._table = table
        self._conventions = conventions
        # All of it once, and before a compiler looks on. A plan can be made where there is no triton, but nothing run.
        self._ours = None if kernels is None or not installed_triton() or not kernels.quantize() else _Ours.of(kernels)

    def quantize(self, x: Tensor, format: Format, scaling: str, scale: Tensor | None = None) -> QuantizedTensor:
        """As :class:`EmulatedFp8` does, bit for bit, in the formats that the table states: in others nothing could be
        multiplied."""
        support = self._table.get(("quantize", format.name, scaling_of(scaling).name), _NOT_STATED)
        if not support:
            raise Unsupported(
                f'backend "{self.name}" was asked to quantize to {format.name}, scaling {scaling}: {support.reason}'
            )
        ours = self._ours
        if ours is None or not ours.may_run_on(x) or ours.rounds_otherwise(format):
            return super().quantize(x, format, scaling, scale)
        return ours.quantize(x, format, scaling, scale)

    def scaled_mm(
        self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Accumulated as the library does without its fast accumulation, scaled, and rounded once to ``out_dtype``."""
        self._check(a, b, out_dtype)
        k_step(a, b)  # raises where scales would change with every term
        support = self._support(a, b)
        library = support.level == "full" and self._gives(a, out_dtype) and 0 not in (*a.shape, b.shape[1])
        if not library and self._ours is not None and self._ours.multiplies(a, b):
            return self._ours.scaled_mm(a, b, out_dtype, bias)
        if not support:
            raise Unsupported(f'backend "{self.name}" was asked for a scaled product {_named(a, b)}: {support.reason}')
        if not library:
            return super().scaled_mm(a, b, out_dtype, bias)
        if bias is None:
            return self._product(a, b, out_dtype)
        # A bias of the library is added before its one rounding, but only one of the result's own dtype.
        if bias.dtype == out_dtype and out_dtype != torch.float32:
            return self._product(a, b, out_dtype, bias)
        return (self.scaled_mm(a, b, torch.float32) + bias.to(torch.float32)).to(out_dtype)

    def _support(self, a: QuantizedTensor, b: QuantizedTensor) -> Support:
        pair = a.format.name if a.format.name == b.format.name else f"{a.format.name} x {b.format.name}"
        found = self._table.get(("scaled_mm", pair, kinds_of(a, b)), _NOT_STATED)
        return found.within(_sizes(a, b))

    def _gives(self, a: QuantizedTensor, out_dtype: torch.dtype) -> bool:
        given = self._conventions.outputs.get(KINDS[a.block], ("float32", "bfloat16", "float16"))
        return str(out_dtype).removeprefix("torch.") in given

    def _product(
        self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        kinds = KINDS[a.block], KINDS[b.t().block]
        one_format = a.format.name == b.format.name == "float8_e4m3fn"
        if self._conventions.public and (one_format or not set(kinds) & set(_ONE_FORMAT)):
            return public_product(a, b, out_dtype, bias, self._conventions.swizzled)
        return private_product(a, b, out_dtype, bias, self._conventions.swizzled)


def kinds_of(a: QuantizedTensor, b: QuantizedTensor) -> str:
    """Their scalings, as cells of the capability table name them, but for scales that are powers of two."""
    left, right = KINDS.get(a.block), KINDS.get((b.block[1], b.block[0]))
    return str(left) if left == right else f"{left} x {right}"


def _sizes(a: QuantizedTensor, b: QuantizedTensor) -> dict[str, int]:
    return {"m": a.shape[0], "k": a.shape[1], "n": b.shape[1]}


def public_product(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, swizzled: bool
) -> Tensor:
    """By ``torch.nn.functional.scaled_mm``."""
    types: Any = F
    kind_a, kind_b = KINDS[a.block], KINDS[b.t().block]
    tiles: dict[str, Any] = {}
    if kind_a == "mx":
        swizzle = types.SwizzleType.SWIZZLE_32_4_4 if swizzled else types.SwizzleType.NO_SWIZZLE
        tiles = {"swizzle_a": swizzle, "swizzle_b": swizzle}
    return types.scaled_mm(
        row_major(a),
        row_major(b.t()).t(),
        _public_scale(a, kind_a, swizzled),
        getattr(types.ScalingType, RECIPES[kind_a]),
        _public_scale(b.t(), kind_b, swizzled).t() if kind_b == "row" else _public_scale(b.t(), kind_b, swizzled),
        getattr(types.ScalingType, RECIPES[kind_b]),
        **tiles,
        bias=bias,
        output_dtype=out_dtype,
        use_fast_accum=False,
    )


def private_product(
    a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None, swizzled: bool
) -> Tensor:
    """By ``torch._scaled_mm``, which tells the scaling by the shapes and strides of the scales (get_joint_scaling)."""
    scales = [_private_scale(x, KINDS[x.block], swizzled) for x in (a, b.t())]
    if KINDS[a.block] != "mx":
        scales[1] = scales[1].t()
    left, right = row_major(a), row_major(b.t()).t()
    return torch._scaled_mm(left, right, *scales, bias=bias, out_dtype=out_dtype, use_fast_accum=False)


def row_major(x: QuantizedTensor) -> Tensor:
    """The codes in torch's dtype of the format, rows contiguous; copied where they are not, as a transposed matrix's
    are: a second operand lies along K in memory."""
    codes = x.codes(x.format.name).contiguous()
    return _dense(codes).view(dtype_of(x.format))


def _dense(x: Tensor) -> Tensor:
    """A contiguous matrix with the strides of one: those of a dimension of size 1 may be anything, and are checked."""
    return x if x.stride() == (x.shape[1], 1) else x.as_strided(x.shape, (x.shape[1], 1))


def _public_scale(x: QuantizedTensor, kind: str, swizzled: bool) -> Tensor:
    """Scales of ``x`` [rows, K] as ``torch.nn.functional.scaled_mm`` takes them for either operand."""
    if kind == "block1x128":  # [rows, K / 128], rows next to each other
        return _dense(x.scale.t().contiguous()).t()
    if kind == "block128x128":  # [K / 128, rows / 128], along K next to each other, in a multiple of 4
        columns = x.scale.shape[1]
        return _dense(F.pad(x.scale, (0, -columns % 4)).contiguous()).t()
    return _mx_scale(x, swizzled, padded=False) if kind == "mx" else _dense(x.scale.contiguous())


def _private_scale(x: QuantizedTensor, kind: str, swizzled: bool) -> Tensor:
    """Scales of ``x`` [rows, K] as ``torch._scaled_mm`` takes them for the first operand, transposed for the second.
    Those of 128x128 blocks have no padding, so that K / 128 is to be a multiple of 4."""
    if kind == "block1x128":
        return _dense(x.scale.t().contiguous()).t()
    return _mx_scale(x, swizzled, padded=True) if kind == "mx" else _dense(x.scale.contiguous())


def _mx_scale(x: QuantizedTensor, swizzled: bool, padded: bool) -> Tensor:
    """e8m0 scales [rows, K / 32], in tiles or, where ``padded``, of the size that tiles would have."""
    codes = e8m0_codes(x.scale)
    if swizzled:
        codes = swizzled_32_4_4(codes)
    elif padded:
        codes = _padded(codes)
    return codes.contiguous().view(torch.float8_e8m0fnu)


def e8m0_codes(scale: Tensor) -> Tensor:
    """uint8 codes of e8m0 (OCP MX 1.0, section 5.4.1): the exponent field of a float32, for powers of two from 2^-126
    on, which are what our scales are, and NaN."""
    return ((scale.contiguous().view(torch.int32) >> 23) & 0xFF).to(torch.uint8)


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[1] % 4, 0, -x.shape[0] % 128))


def swizzled_32_4_4(x: Tensor) -> Tensor:
    """[rows, columns] -> flat, in tiles of 128 x 4 that follow each other along a row of tiles; within a tile, an
    element lies at ``(row % 32) * 16 + (row // 32) * 4 + column``. Padded with zeros to whole tiles.

    Source: the library's documentation, "1D Block Scaling Factors Layout" in docs.nvidia.com/cuda/cublas, and
    nvidia.github.io/cudnn-frontend/mxfp8-scale-factor-128x4-layout.
    """
    whole = _padded(x)
    rows, columns = whole.shape[0] // 128, whole.shape[1] // 4
    return whole.view(rows, 4, 32, columns, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def _named(a: QuantizedTensor, b: QuantizedTensor) -> str:
    return f"{a.format.name} {a.block} {tuple(a.shape)} x {b.format.name} {b.block} {tuple(b.shape)}"
