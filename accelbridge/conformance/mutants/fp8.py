"""Defects of fp8 casts and of quantized products, seeded in the emulation that the CPU backend uses.

C5 (stochastic rounding) and F5 (scale of the result) have no counterpart: the interface has neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accelbridge.backend import Format
from accelbridge.conformance.mutants import Patch, benign, mutant
from accelbridge.conformance.mutants.matmul import declare
from accelbridge.errors import AccelbridgeError
from accelbridge.portable import fp8
from accelbridge.portable.execution import EagerExecution
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.precision import formats
from accelbridge.precision.linear import Fp8Layer
from accelbridge.precision.quantized import QuantizedTensor
from accelbridge.precision.state import Fp8State

_WHOLE = (-1, -1)


# -------------------------------------------------------------------------------------------------------- casts


@mutant("C1q", "quantising truncates", {"CST-005": "EXACT", "CST-006": "EXACT"})
def truncates(patch: Patch) -> None:
    def encode(inner: Any, x: Tensor, format: Format, overflow: Any = None, random: Any = None) -> Tensor:
        # Half a step towards 0 beforehand, for numbers that are normal in the format.
        bits = x.float().contiguous().view(torch.int32)
        kept = (bits & -(1 << (23 - format.mantissa_bits))).view(torch.float32)
        return inner(kept.where(x.isfinite(), x.float()), format, overflow, random)

    patch(formats, "encode", encode)


@mutant("C1r", "float32 is rounded to bfloat16 first", {"CST-005": "EXACT", "CST-006": "EXACT"})
def rounds_twice(patch: Patch) -> None:
    def encode(inner: Any, x: Tensor, format: Format, overflow: Any = None, random: Any = None) -> Tensor:
        return inner(x.bfloat16(), format, overflow, random)

    patch(formats, "encode", encode)


@mutant("C2", "saturating and not is swapped", {"CST-005": "EXACT", "CST-006": "EXACT", "CST-008": "EXACT"})
def overflow_swapped(patch: Patch) -> None:
    def encode(inner: Any, x: Tensor, format: Format, overflow: Any = None, random: Any = None) -> Tensor:
        other = "inf" if format.nan == "ieee" else "nan"
        return inner(x, format, "saturate" if (overflow or format.overflow) == other else other, random)

    patch(formats, "encode", encode)


@mutant(
    "C2d", "the declared overflow is not what it does", {"CST-005": "EXACT", "CST-006": "EXACT", "CST-008": "ERROR"}
)
def overflow_misdeclared(patch: Patch) -> None:
    def encode(inner: Any, x: Tensor, format: Format, overflow: Any = None, random: Any = None) -> Tensor:
        return inner(x, format, "saturate", random)

    declare(patch, fp8__overflow="nonfinite")
    patch(formats, "encode", encode)


@mutant("C3", "e4m3fn and e4m3fnuz are confused", {"CST-005": "EXACT", "CST-007": "EXACT", "F8-007": "EXACT"})
def variants_confused(patch: Patch) -> None:
    fn, fnuz = formats.FORMATS["float8_e4m3fn"], formats.FORMATS["float8_e4m3fnuz"]
    other = {fn.name: fnuz, fnuz.name: fn}

    def encode(inner: Any, x: Tensor, format: Format, overflow: Any = None, random: Any = None) -> Tensor:
        return inner(x, other.get(format.name, format), overflow, random)

    def decode(inner: Any, codes: Tensor, format: Format) -> Tensor:
        return inner(codes, other.get(format.name, format))

    patch(formats, "encode", encode)
    patch(formats, "decode", decode)


@mutant("C4q", "subnormal numbers are flushed", {"CST-005": "EXACT", "CST-006": "EXACT"})
def flushes_subnormals(patch: Patch) -> None:
    def encode(inner: Any, x: Tensor, format: Format, overflow: Any = None, random: Any = None) -> Tensor:
        return inner(torch.where(x.abs() < 2.0 ** (1 - format.bias), x * 0.0, x), format, overflow, random)

    patch(formats, "encode", encode)


@mutant("F6", "e5m2 is read as e4m3", {"CST-007": "EXACT", "F8-004": "SQNR", "F8-013": "SQNR"})
def e5m2_read_as_e4m3(patch: Patch) -> None:
    def decode(inner: Any, codes: Tensor, format: Format) -> Tensor:
        return inner(codes, formats.FORMATS[format.name.replace("e5m2fnuz", "e4m3fnuz").replace("e5m2", "e4m3fn")])

    patch(formats, "decode", decode)


@mutant("F6w", "e5m2 is written as e4m3", {"CST-006": "EXACT", "F8-004": "SQNR", "F8-013": "SQNR"})
def e5m2_written_as_e4m3(patch: Patch) -> None:
    def encode(inner: Any, x: Tensor, format: Format, overflow: Any = None, random: Any = None) -> Tensor:
        name = format.name.replace("e5m2fnuz", "e4m3fnuz").replace("e5m2", "e4m3fn")
        return inner(x, formats.FORMATS[name], "saturate", random)

    patch(formats, "encode", encode)


# ------------------------------------------------------------------------------------------------------- scales


def _without_scale(x: QuantizedTensor) -> QuantizedTensor:
    return replace(x, scale=torch.ones_like(x.scale))


@mutant("F1", "scale_b is ignored", {"F8-001": "EXACT", "F8-004": "SQNR", "F8-005": "EXACT", "F8-013": "SQNR"})
def scale_b_ignored(patch: Patch) -> None:
    def scaled_mm(inner: Any, self: Any, a: Any, b: Any, *args: Any) -> Tensor:
        return inner(self, a, _without_scale(b), *args)

    patch(EmulatedFp8, "scaled_mm", scaled_mm)


@mutant("F1a", "scale_a is ignored", {"F8-001": "EXACT", "F8-004": "SQNR", "F8-005": "EXACT", "F8-013": "SQNR"})
def scale_a_ignored(patch: Patch) -> None:
    def scaled_mm(inner: Any, self: Any, a: Any, b: Any, *args: Any) -> Tensor:
        return inner(self, _without_scale(a), b, *args)

    patch(EmulatedFp8, "scaled_mm", scaled_mm)


@mutant("F2", "the next block's scale is taken along K", {"F8-006": "EXACT"})
def block_scale_off_by_one(patch: Patch) -> None:
    def k_scale(inner: Any, x: QuantizedTensor, start: int) -> Tensor:
        return inner(replace(x, scale=x.scale.roll(-1, 1)), start)

    patch(fp8, "k_scale", k_scale)


@mutant("F2r", "the next row's or block's scale is taken", {"F8-006": "EXACT"})
def row_scale_off_by_one(patch: Patch) -> None:
    def k_scale(inner: Any, x: QuantizedTensor, start: int) -> Tensor:
        return inner(replace(x, scale=x.scale.roll(-1, 0)), start)

    patch(fp8, "k_scale", k_scale)


@mutant("F2q", "quantising keeps scales one block off", {"F8-006": "BOUND"})
def kept_scales_off_by_one(patch: Patch) -> None:
    def quantize(inner: Any, self: Any, *args: Any, **more: Any) -> QuantizedTensor:
        q = inner(self, *args, **more)
        return replace(q, scale=q.scale.roll(1, 0))

    patch(EmulatedFp8, "quantize", quantize)


@mutant("F3", "scales of the tensor before are used", {"CST-005": "BOUND", "CST-006": "BOUND", "F8-013": "SQNR"})
def stale_amax(patch: Patch) -> None:
    kept: dict[Any, Tensor] = {}

    def make_scale(inner: Any, x: Tensor, format: Format, scaling: Any) -> Tensor:
        key = (x.shape, format.name, scaling.name)
        fresh: Tensor = inner(x, format, scaling)
        stale = kept.get(key, fresh)
        kept[key] = fresh
        return stale

    patch(fp8, "make_scale", make_scale)


@mutant("F7", "quantised with scales rounded to powers of two, kept unrounded", {"F8-006": "EXACT"})
def kept_scale_not_rounded(patch: Patch) -> None:
    def quantize(inner: Any, self: Any, x: Tensor, format: Format, scaling: str, scale: Any = None) -> QuantizedTensor:
        q = inner(self, x, format, scaling, scale)
        return replace(q, scale=inner(self, x, format, scaling.removesuffix("_pow2"), scale).scale)

    patch(EmulatedFp8, "quantize", quantize)


@mutant("F7x", "shared exponents are rounded up", {"F8-006": "EXACT"})
def shared_exponent_rounded_up(patch: Patch) -> None:
    def shared_exponent(inner: Any, largest: Tensor, format: Format) -> Tensor:
        return inner(fp8.power_of_two_above(largest), format)

    patch(fp8, "shared_exponent", shared_exponent)


@mutant("F9", "a block of zeros has scale 0", {"F8-012": ("VALUE", "EXACT")})
def zero_scale(patch: Patch) -> None:
    def make_scale(inner: Any, x: Tensor, format: Format, scaling: Any) -> Tensor:
        scale = inner(x, format, scaling)
        return scale if scaling.unit else scale.masked_fill(scale == 1.0, 0.0)

    patch(fp8, "make_scale", make_scale)


# ----------------------------------------------------------------------------------------------------- products


def _patch_sums(patch: Patch, size: int, add: Any, multiply: Any = torch.matmul) -> None:
    """Products with one scale along K: ``size`` terms at a time by ``multiply``, their sums put together by ``add``."""

    def scaled_mm(inner: Any, self: Any, a: Any, b: Any, out_dtype: Any, bias: Any = None) -> Tensor:
        if fp8.k_step(a, b) or a.shape[1] != b.shape[0]:
            return inner(self, a, b, out_dtype, bias)
        left, right = fp8.widen(a), fp8.widen(b)
        out = torch.zeros(a.shape[0], b.shape[1])
        for start in range(0, a.shape[1], size):
            out = add(out, multiply(left[:, start : start + size], right[start : start + size]))
        out = out * fp8.k_scale(a, 0) * fp8.k_scale(b.t(), 0).t()
        return (out if bias is None else out + bias.float()).to(out_dtype)

    patch(EmulatedFp8, "scaled_mm", scaled_mm)


def _truncated(x: Tensor, bits: int) -> Tensor:
    """The leading ``bits`` bits of the significand."""
    return (x.view(torch.int32) & -(1 << (24 - bits))).view(torch.float32)


@mutant("F4", "sums are kept in 14 bits, undeclared", {"F8-002": "SQNR", "F8-003": "BOUND", "F8-008": "FACT"})
def narrow_accumulator(patch: Patch) -> None:
    _patch_sums(patch, 32, lambda total, part: _truncated(total + part, 14))


@mutant("G1s", "sums are kept in bfloat16", {"F8-002": "SQNR", "F8-003": "BOUND", "F8-008": "FACT"})
def bfloat16_accumulator(patch: Patch) -> None:
    _patch_sums(patch, 16, lambda total, part: (total + part).bfloat16().float())


def _patch_operands(patch: Patch, change: Any) -> None:
    def scaled_mm(inner: Any, self: Any, a: Any, b: Any, *args: Any) -> Tensor:
        return inner(self, change(a), b, *args)

    patch(EmulatedFp8, "scaled_mm", scaled_mm)


@mutant("G2s", "the last term of K is dropped", {"F8-001": "EXACT", "F8-003": "BOUND", "F8-011": "EXACT"})
def last_term_dropped(patch: Patch) -> None:
    def change(a: QuantizedTensor) -> QuantizedTensor:
        codes = a.codes(a.format.name).clone()
        codes[:, -1:] = 0
        return QuantizedTensor.of_codes(codes, a.scale, a.format, a.block)

    _patch_operands(patch, change)


@mutant("G2t", "what is left of K beyond the last whole 16 is dropped", {"F8-011": "EXACT"})
def tail_dropped(patch: Patch) -> None:
    def change(a: QuantizedTensor) -> QuantizedTensor:
        codes = a.codes(a.format.name).clone()
        codes[:, a.shape[1] // 16 * 16 :] = 0
        return QuantizedTensor.of_codes(codes, a.scale, a.format, a.block)

    _patch_operands(patch, change)


def _patch_result(patch: Patch, change: Any) -> None:
    def scaled_mm(inner: Any, self: Any, *args: Any) -> Tensor:
        return change(inner(self, *args))

    patch(EmulatedFp8, "scaled_mm", scaled_mm)


@mutant("G6s", "the last tile of 16 x 16 is 0", {"F8-001": "EXACT", "F8-003": "BOUND"})
def zero_tile(patch: Patch) -> None:
    def change(out: Tensor) -> Tensor:
        out[-16:, -16:] = 0.0
        return out

    _patch_result(patch, change)


@mutant("G6r", "the last row is 0 where there are more than 32", {"F8-001": "EXACT", "F8-004": "SQNR"})
def zero_row(patch: Patch) -> None:
    def change(out: Tensor) -> Tensor:
        out[32:][-1:] = 0.0
        return out

    _patch_result(patch, change)


@mutant("G7s", "NaN and infinity count as 0", {"CST-007": "EXACT", "F8-010": "EXACT"})
def nonfinite_swallowed(patch: Patch) -> None:
    def widen(inner: Any, x: QuantizedTensor) -> Tensor:
        return inner(x).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    patch(fp8, "widen", widen)


@mutant("G8s", "the bias is not added", {"F8-001": "EXACT"})
def bias_ignored(patch: Patch) -> None:
    def scaled_mm(inner: Any, self: Any, a: Any, b: Any, out_dtype: Any, bias: Any = None) -> Tensor:
        return inner(self, a, b, out_dtype)

    patch(EmulatedFp8, "scaled_mm", scaled_mm)


@mutant("I9s", "refusals are bare runtime errors", {"F8-011": "ERROR"})
def untyped_errors(patch: Patch) -> None:
    def refuse(inner: Any, self: Any, *args: Any, **more: Any) -> Any:
        try:
            return inner(self, *args, **more)
        except AccelbridgeError as error:
            raise RuntimeError(str(error)) from error

    patch(EmulatedFp8, "quantize", refuse)
    patch(EmulatedFp8, "scaled_mm", refuse)


# ------------------------------------------------------------------------------------------------ pretended fp8


class _Pretended(QuantizedTensor):
    """Keeps bfloat16 values as if they were codes."""

    def __post_init__(self) -> None:
        pass  # nothing is checked


@mutant(
    "F8", "fp8 is claimed, but values stay bfloat16",
    {"CST-005": "PAYLOAD", "CST-006": "PAYLOAD", "F8-002": "PAYLOAD", "F8-003": "PAYLOAD", "F8-004": "PAYLOAD"},
)  # fmt: skip
def pretends(patch: Patch) -> None:
    def quantize(inner: Any, self: Any, x: Tensor, format: Format, scaling: str, scale: Any = None) -> QuantizedTensor:
        return _Pretended(x.bfloat16(), torch.ones(1, 1), format, _WHOLE)

    def scaled_mm(inner: Any, self: Any, a: Any, b: Any, out_dtype: Any, bias: Any = None) -> Tensor:
        if not isinstance(a, _Pretended):
            return inner(self, a, b, out_dtype, bias)
        return (a.payload.float() @ b.payload.float()).to(out_dtype)

    patch(EmulatedFp8, "quantize", quantize)
    patch(EmulatedFp8, "scaled_mm", scaled_mm)


@mutant(
    "F8h", "codes are right, but bfloat16 values kept beside them are multiplied",
    {"F8-002": "SQNR", "F8-003": "BOUND"},
)  # fmt: skip
def pretends_behind_codes(patch: Patch) -> None:
    hidden: dict[int, tuple[Tensor, Tensor]] = {}  # codes too: what is kept, no other tensor can be mistaken for

    def quantize(inner: Any, self: Any, x: Tensor, format: Format, scaling: str, scale: Any = None) -> QuantizedTensor:
        q = inner(self, x, format, scaling, scale)
        hidden[q.payload.data_ptr()] = q.payload, x.bfloat16().float()
        return q

    def scaled_mm(inner: Any, self: Any, a: Any, b: Any, out_dtype: Any, bias: Any = None) -> Tensor:
        left, right = (hidden.get(x.payload.data_ptr()) for x in (a, b))
        if left is None or right is None or bias is not None:
            return inner(self, a, b, out_dtype, bias)
        return (left[1] @ right[1].t()).to(out_dtype)

    patch(EmulatedFp8, "quantize", quantize)
    patch(EmulatedFp8, "scaled_mm", scaled_mm)


# ------------------------------------------------------------------------------------------------------- benign


@benign("B2s", "K is split, and the parts added in float32", ("CST-007", "F8-"))
def split_k(patch: Patch) -> None:
    _patch_sums(patch, 48, lambda total, part: part + total)


@benign("B4s", "float32 sums are truncated", ("CST-007", "F8-"))
def truncating_accumulator(patch: Patch) -> None:
    def add(total: Tensor, part: Tensor) -> Tensor:
        exact = total.double() + part.double()
        rounded = exact.float()
        return torch.where(rounded.double().abs() > exact.abs(), torch.nextafter(rounded, torch.zeros(())), rounded)

    _patch_sums(patch, 16, add)


@benign("B10s", "sums are kept in 14 bits over 128 terms, declared", ("CST-007", "F8-"))
def declared_narrow_accumulator(patch: Patch) -> None:
    def stretch(left: Tensor, right: Tensor) -> Tensor:
        total = torch.zeros(left.shape[0], right.shape[1])
        for start in range(0, left.shape[1], 32):
            part = slice(start, start + 32)
            total = _truncated(total + left[:, part] @ right[part], 14)
        return total

    declare(patch, fp8__accumulator_bits=14, fp8__promotion=128)
    _patch_sums(patch, 128, lambda total, part: total + part, stretch)


@benign("B9s", "scaled by the reciprocal of the scale", ("CST-005", "CST-006", "F8-"))
def reciprocal(patch: Patch) -> None:
    def quantize(inner: Any, self: Any, x: Tensor, format: Format, scaling: str, scale: Any = None) -> QuantizedTensor:
        q = inner(self, x, format, scaling, scale)
        scaled = x.float() * fp8.spread(1.0 / q.scale, q.block, q.shape)
        return QuantizedTensor.of_codes(formats.encode(scaled, format), q.scale, format, q.block)

    patch(EmulatedFp8, "quantize", quantize)


# ---------------------------------------------------------------------------------------------- scales of earlier steps


@mutant("F3w", "the window of amax histories never ends", {"F8-009": "BOUND"})
def never_forgets(patch: Patch) -> None:
    def update(inner: Any, self: Fp8State, largest: Any = None) -> None:
        inner(self, largest)
        self.history[..., -2] = self.history.amax(-1)  # the place that is last in the next step

    patch(Fp8State, "update", update)


@mutant("F3l", "amax is noted one call late", {"F8-009": "AMAX"})
def late_amax(patch: Patch) -> None:
    def note(inner: Any, self: Fp8Layer, x: Tensor, index: int, noted: bool) -> Tensor:
        before = vars(self).setdefault("before", {})
        scale = inner(self, before.get(index, x), index, noted)
        before[index] = x.detach().clone()
        return scale

    patch(Fp8Layer, "_known_scale", note)


@mutant("F3g", "a scale that is given is ignored", {"F8-009": "EXACT"})
def ignores_given_scale(patch: Patch) -> None:
    def quantize(inner: Any, self: Any, x: Tensor, format: Format, scaling: str, scale: Any = None) -> QuantizedTensor:
        return inner(self, x, format, scaling)

    patch(EmulatedFp8, "quantize", quantize)


@mutant("F3r", "amaxes are not reduced over the ranks", {"TRN-018": "RANKS"})
def unreduced_amax(patch: Patch) -> None:
    patch(EagerExecution, "largest", lambda inner, self, x: x)


@mutant("F9g", "the gradients of fp8 layers have the wrong sign", {"TRN-018": "LIMIT"})
def gradient_sign(patch: Patch) -> None:
    def scaled_mm(inner: Any, self: Any, a: QuantizedTensor, b: QuantizedTensor, *args: Any) -> Tensor:
        product = inner(self, a, b, *args)
        return -product if a.format.name != b.format.name else product

    patch(EmulatedFp8, "scaled_mm", scaled_mm)
