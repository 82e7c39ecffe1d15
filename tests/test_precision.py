"""Narrow formats against tables written here from their definitions, and the emulated fp8 products."""

from __future__ import annotations

import math
import shutil
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from accelbridge.backend import Format
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.portable.matmul import PortableMatmul
from accelbridge.precision import formats
from accelbridge.precision.formats import FORMATS, decode, encode
from accelbridge.precision.quantized import QuantizedTensor, block_counts, shares, spread
from accelbridge.precision.scalings import SCALINGS, WHOLE
from accelbridge.precision.stochastic import random_bits
from tests.ranks import Rank, run_ranks

BYTES = [name for name in FORMATS if name.startswith("float8") and FORMATS[name].signed]
PLAIN_LOOPS: dict[str, Any] = {"cpp.simdlen": 0}  # compiled in less time
BACKEND = EmulatedFp8("cpu")


# ------------------------------------------------------------------------------------------------------ formats


def fp8_value(code: int, exponent_bits: int, bias: int, specials: dict[int, float]) -> float:
    """The number of an 8-bit code, from sign, exponent and fraction as text."""
    if code in specials:
        return specials[code]
    text = f"{code:08b}"
    exponent, fraction = int(text[1 : 1 + exponent_bits], 2), text[1 + exponent_bits :]
    significand = int(fraction, 2) / 2 ** len(fraction) + (exponent > 0)
    return (-1.0 if text[0] == "1" else 1.0) * significand * 2.0 ** (max(exponent, 1) - bias)


def specials(name: str) -> dict[int, float]:
    nan = math.nan
    if name.endswith("fnuz"):
        return {0x80: nan}
    if name == "float8_e4m3fn":
        return {0x7F: nan, 0xFF: nan}
    top = {"float8_e5m2": range(0x7C, 0x80), "float8_e4m3": range(0x78, 0x80)}[name]
    infinities = {top[0]: math.inf, top[0] + 0x80: -math.inf}
    return infinities | {code + half: nan for code in top[1:] for half in (0, 0x80)}


BIAS = {"float8_e4m3fn": 7, "float8_e4m3fnuz": 8, "float8_e4m3": 7, "float8_e5m2": 15, "float8_e5m2fnuz": 16}
NARROW = [*BYTES, "float8_e8m0fnu", "float4_e2m1fn"]


def table(name: str) -> list[float]:
    if name == "float8_e8m0fnu":
        return [2.0 ** (code - 127) for code in range(255)] + [math.nan]
    if name == "float4_e2m1fn":
        magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        return magnitudes + [-value for value in magnitudes]
    return [fp8_value(code, int(name[8]), BIAS[name], specials(name)) for code in range(256)]


def rounded(x: float, magnitudes: list[float], format: Format) -> tuple[int, bool]:
    """(code without sign, whether it is too large) of ``x`` by exact comparison with the midpoints of numbers."""
    step = magnitudes[-1] - magnitudes[-2] if format.mantissa_bits else magnitudes[-1]
    ladder = [*magnitudes, magnitudes[-1] + step]
    size = abs(x)
    upper = min(bisect_left(ladder, size), len(ladder) - 1)
    code = upper
    if upper and size < ladder[upper]:
        middle = (ladder[upper - 1] + ladder[upper]) / 2
        even = (upper - 1) % 2 == 0 and format.mantissa_bits > 0
        code = upper - 1 if size < middle or (size == middle and even) else upper
    return code, code == len(magnitudes)


def all_bfloat16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("name", BYTES)
def test_all_codes_decode_as_the_table_says(name: str) -> None:
    want = torch.tensor(table(name), dtype=torch.float32)
    got = decode(torch.arange(256, dtype=torch.int32).to(torch.uint8), FORMATS[name])
    assert torch.equal(got.nan_to_num(nan=12345.0, posinf=math.inf, neginf=-math.inf),
                       want.nan_to_num(nan=12345.0, posinf=math.inf, neginf=-math.inf))  # fmt: skip
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])
    assert got[got.isfinite()].max() == FORMATS[name].max


@pytest.mark.parametrize("name", [name for name in FORMATS if hasattr(torch, name) and name != "float4_e2m1fn_x2"])
def test_codes_decode_as_torch_decodes_them(name: str) -> None:
    dtype = getattr(torch, name)
    if dtype.itemsize == 1:
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    else:
        codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    want = codes.view(dtype).float()
    got = decode(codes, FORMATS[name])
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int32)[~want.isnan()], want.view(torch.int32)[~want.isnan()])


def both_ways(x: Tensor, format: Format, overflow: Any = None) -> Tensor:
    """Codes as they are looked up, which have to be those that are worked out."""
    assert x.numel() > formats._SMALL
    codes = encode(x, format, overflow)
    assert torch.equal(codes, formats._encode(x, format, overflow or format.overflow, None))
    return codes


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_number_is_encoded_as_its_own_code(name: str) -> None:
    bits = formats.width(FORMATS[name])
    codes = torch.arange(1 << bits, dtype=torch.int32).to(torch.uint8 if bits <= 8 else torch.int16)
    codes = codes.repeat(33) if bits <= 8 else codes
    value = decode(codes, FORMATS[name])
    assert torch.equal(value.nan_to_num(1.25), formats._decode(codes, FORMATS[name]).nan_to_num(1.25))
    exact = value.isfinite()
    assert torch.equal(both_ways(value[exact], FORMATS[name]), codes[exact])
    if value.isnan().any():
        assert decode(both_ways(value[value.isnan()].repeat(300), FORMATS[name]), FORMATS[name]).isnan().all()


@pytest.mark.parametrize("name", NARROW)
def test_all_of_bfloat16_is_rounded_as_the_table_says(name: str) -> None:
    values, x, format = table(name), all_bfloat16(), FORMATS[name]
    magnitudes = [v for v in (values[: len(values) // 2] if format.signed else values) if math.isfinite(v)]
    policies = ["saturate", *["inf"] * (format.nan == "ieee"), *["nan"] * (format.nan != "none")]
    got = {policy: both_ways(x, format, policy).tolist() for policy in policies}
    beyond = {"saturate": magnitudes[-1], "inf": math.inf, "nan": math.nan}
    for i, number in enumerate(x.float().tolist()):
        code, too_large = (0, False) if math.isnan(number) else rounded(number, magnitudes, format)
        negative = math.copysign(1.0, number) < 0
        for policy in policies:
            found = values[got[policy][i]]
            if math.isnan(number):
                assert math.isnan(found) or (format.nan == "none" and found == magnitudes[-1])
                continue
            want = beyond[policy] if too_large else magnitudes[code]
            if not format.signed and negative:
                want = math.nan if number else want
            elif negative and (want or format.nan != "negative_zero"):
                want = -want
            assert (math.isnan(want) and math.isnan(found)) or str(want) == str(found), number


@pytest.mark.parametrize("name", NARROW)
def test_a_float32_is_looked_up_as_it_is_worked_out(name: str) -> None:
    low = torch.tensor([0, 1, 0x0FFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = (all_bfloat16().float().view(torch.int32).view(-1, 1) | low).to(torch.int32).view(torch.float32)
    for overflow in ("saturate", *["nan"] * (FORMATS[name].nan != "none")):
        both_ways(x, FORMATS[name], overflow)
    assert torch.equal(encode(x.t(), FORMATS[name]), encode(x, FORMATS[name]).t())
    both_ways(torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16), FORMATS[name])


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_generated_code_encodes_the_same() -> None:
    def run(wide: Tensor, bfloat16: Tensor, float16: Tensor) -> list[Tensor]:
        fn, e5m2 = FORMATS["float8_e4m3fn"], FORMATS["float8_e5m2"]
        codes = [encode(wide, fn), encode(bfloat16, e5m2, "inf"), encode(float16, FORMATS["float8_e4m3fnuz"])]
        return [*codes, decode(codes[0], fn).nan_to_num(1.25)]

    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001])
    wide = (all_bfloat16().float().view(torch.int32).view(-1, 1) | low).to(torch.int32).view(torch.float32)
    inputs = wide, all_bfloat16(), all_bfloat16().view(torch.int16).view(torch.float16)
    compiled = torch.compile(run, fullgraph=True, dynamic=False, options=PLAIN_LOOPS)
    assert all(torch.equal(a, b) for a, b in zip(compiled(*inputs), run(*inputs), strict=True))


def test_tables_are_kept_from_fakes_and_inference() -> None:
    x = normal(20, 20)
    formats._TABLES.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        encode(x, FORMATS["float8_e4m3fn"])
    with torch.inference_mode():
        encode(x, FORMATS["float8_e4m3fn"])
    assert all(type(kept) is Tensor and not kept.is_inference() for kept in formats._TABLES.values())
    assert torch.equal(encode(x, FORMATS["float8_e4m3fn"]), both_ways(x, FORMATS["float8_e4m3fn"]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_formats_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    high = torch.arange(2**16, dtype=torch.int64).view(-1, 1) << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = (high | low).to(torch.int32).view(torch.float32).reshape(-1)
    want, got = x.to(dtype), encode(x, FORMATS[name]).view(dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


def test_scale_and_four_bit_formats() -> None:
    e8m0, e2m1 = FORMATS["float8_e8m0fnu"], FORMATS["float4_e2m1fn"]
    x = torch.tensor([1.0, 1.49, 1.5, 2.0**127, 2.0**-127, 0.0, -0.0, -1.0, math.nan, math.inf, 1.75 * 2.0**127])
    assert encode(1.25 * x[4:5], e8m0).tolist() == [0]
    assert encode(x, e8m0).tolist() == [127, 127, 128, 254, 0, 0, 0, 255, 255, 255, 255]
    assert decode(torch.tensor([0, 127, 254], dtype=torch.uint8), e8m0).tolist() == [2.0**-127, 1.0, 2.0**127]
    codes = torch.arange(8, dtype=torch.int32).to(torch.uint8)
    assert decode(codes, e2m1).tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert encode(torch.tensor([0.25, 0.75, 5.0, 7.0, -1e9, math.nan]), e2m1).tolist() == [0, 2, 6, 7, 15, 7]


def test_a_float32_is_rounded_once() -> None:
    # By way of bfloat16 the first would become a tie and go down.
    x = torch.tensor([1.0625 + 2.0**-20, 1.0625, 1.1875, 1.1875 - 2.0**-20])
    assert decode(encode(x, FORMATS["float8_e4m3fn"]), FORMATS["float8_e4m3fn"]).tolist() == [1.125, 1.0, 1.25, 1.125]


def test_what_a_format_cannot_say_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"float8_e4m3fn.*overflow to inf"):
        encode(torch.ones(1), FORMATS["float8_e4m3fn"], "inf")
    with pytest.raises(ConfigError, match=r"overflow to nan"):
        encode(torch.ones(1), FORMATS["float4_e2m1fn"], "nan")
    with pytest.raises(ConfigError, match=r"float64.*rounded twice"):
        encode(torch.ones(1, dtype=torch.float64), FORMATS["float8_e5m2"])


# ---------------------------------------------------------------------------------------------------- quantized


def codes(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).to(torch.uint8)


def test_codes_of_one_variant_are_not_read_as_another() -> None:
    q = QuantizedTensor.of_codes(codes([0x38, 0xC0]), torch.ones(1, 1), FORMATS["float8_e4m3fn"], (WHOLE, WHOLE))
    assert q.dequantize().tolist() == [[1.0, -2.0]]
    assert q.payload.dtype == torch.float8_e4m3fn
    assert q.codes("float8_e4m3fn").tolist() == [[0x38, 0xC0]]
    with pytest.raises(Unsupported, match=r"float8_e4m3fn asked as float8_e4m3fnuz.*dequantize"):
        q.codes("float8_e4m3fnuz")
    with pytest.raises(ConfigError, match=r"float8_e4m3fnuz.*payload is torch.float8_e4m3fn"):
        replace(q, format=FORMATS["float8_e4m3fnuz"])
    with pytest.raises(ConfigError, match=r"payload is torch.bfloat16"):
        replace(q, payload=torch.ones(1, 2, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"scales are \(1, 1\).*need \(1, 2\)"):
        replace(q, block=(1, 1))


def test_a_format_without_a_dtype_is_kept_in_bytes() -> None:
    q = QuantizedTensor.of_codes(codes([0x77, 0x78]), torch.ones(1, 1), FORMATS["float8_e4m3"], (WHOLE, WHOLE))
    assert q.payload.dtype == torch.uint8
    assert q.dequantize().tolist() == [[240.0, math.inf]]


def test_a_block_has_a_scale_and_transposing_keeps_it() -> None:
    shape = (130, 260)
    scale = torch.arange(1.0, 391.0).view(130, 3)
    ones = torch.full(shape, 0x38, dtype=torch.uint8)
    q = QuantizedTensor.of_codes(ones, scale, FORMATS["float8_e4m3fn"], (1, 128))
    value = q.dequantize()
    assert value[129, [0, 127, 128, 255, 256, 259]].tolist() == [388.0, 388.0, 389.0, 389.0, 390.0, 390.0]
    assert torch.equal(q.t().dequantize(), value.t())
    assert block_counts(torch.Size(shape), (128, 128)) == (2, 3)


VARIANTS = [(a, b) for a in BYTES for b in BYTES if a != b and a[:11] == b[:11]]


@pytest.mark.parametrize(("name", "other"), VARIANTS)
@pytest.mark.parametrize("every", [False, True])
def test_all_codes_are_converted_within_the_bound(name: str, other: str, every: bool) -> None:
    own, new, scale = FORMATS[name], FORMATS[other], torch.tensor([[3.0]])
    k = new.bias - own.bias
    value = torch.tensor(table(name))
    fits = value.abs() * 2.0**-k <= new.max
    keep = torch.ones(256, dtype=torch.bool) if every else fits | ~value.isfinite()
    same_bits = bool(fits[keep & value.isfinite()].all())
    if not same_bits:
        k = max(0, math.ceil(math.log2(own.max / new.max)))
    q = QuantizedTensor.of_codes(torch.arange(256).to(torch.uint8)[keep].view(1, -1), scale, own, (WHOLE, WHOLE))
    got = q.convert(new)
    assert got.format is new
    assert got.scale.item() == 3.0 * 2.0**k
    want, back = q.dequantize(), got.dequantize()
    finite = want.isfinite()
    smallest = 2.0 ** (1 - new.bias - new.mantissa_bits)
    assert ((back - want).abs()[finite] <= (0.0 if same_bits else smallest / 2 * got.scale.item())).all()
    assert back[want.isnan()].isnan().all()
    assert back[want.isinf()].isnan().all()  # no pair has infinities in both
    if same_bits:
        negative_zero = (want == 0) & want.signbit() & (new.nan == "negative_zero")
        same = finite & ~negative_zero
        assert torch.equal(got.codes(other)[same], q.codes(name)[same])
        assert (got.codes(other)[negative_zero] == 0).all()


def test_there_and_back_keeps_the_bits() -> None:
    fn, fnuz, ieee = FORMATS["float8_e4m3fn"], FORMATS["float8_e4m3fnuz"], FORMATS["float8_e4m3"]
    every = torch.arange(256).to(torch.uint8)
    nan, negative_zero = (every & 0x7F) == 0x7F, every == 0x80
    q = QuantizedTensor.of_codes(every[~nan].view(1, -1), torch.ones(1, 1), fn, (WHOLE, WHOLE))
    back = q.convert(fnuz).convert(fn)
    assert torch.equal(back.codes(fn.name), q.codes(fn.name).masked_fill(negative_zero[~nan], 0))
    assert back.scale.item() == 1.0
    # 240 of e4m3fnuz has the bits of e4m3fn's NaN: it stays 240 there, and numbers below 2^-6 are rounded instead.
    q = QuantizedTensor.of_codes(codes([0x7F, 0x80, 0x01, 0x02, 0x03, 0x7E]), torch.ones(1, 1), fnuz, (WHOLE, WHOLE))
    value = q.convert(fn).dequantize()
    assert value.nan_to_num(-1.0).tolist() == [[240.0, -1.0, 0.0, 2.0**-9, 2.0**-8, 224.0]]
    # Nothing above 240 needs no other scale.
    q = QuantizedTensor.of_codes(codes([0x77, 0x01, 0x80]), torch.ones(1, 1), ieee, (WHOLE, WHOLE))
    assert torch.equal(q.convert(fn).codes(fn.name), q.codes(ieee.name))
    assert torch.equal(q.convert(fn).convert(ieee).codes(ieee.name), q.codes(ieee.name))


def test_conversions_that_cannot_be_are_refused() -> None:
    fn, fnuz = FORMATS["float8_e4m3fn"], FORMATS["float8_e4m3fnuz"]
    q = QuantizedTensor.of_codes(codes([0x38]), torch.tensor([[3e38]]), fn, (WHOLE, WHOLE))
    with pytest.raises(ConfigError, match=r"float8_e4m3fnuz, with scales times 2;.*range of float32"):
        q.convert(fnuz)
    tiny = QuantizedTensor.of_codes(codes([0x38]), torch.tensor([[1.5e-45]]), fnuz, (WHOLE, WHOLE))
    with pytest.raises(ConfigError, match=r"with scales times 0.5;"):
        tiny.convert(fn)
    with pytest.raises(Unsupported, match=r"float8_e4m3fn asked to be converted to float8_e5m2, which is no variant"):
        q.convert(FORMATS["float8_e5m2"])


# ------------------------------------------------------------------------------------------------------- shards


def shards(ctx: Rank) -> list[str]:
    """What differs when codes and scales are DTensors."""
    dist.init_process_group("gloo", store=ctx.store(), rank=ctx.rank, world_size=ctx.size)
    mesh = init_device_mesh("cpu", (ctx.size,))
    fn, fnuz, wrong = FORMATS["float8_e4m3fn"], FORMATS["float8_e4m3fnuz"], []
    for scaling in ("tensor", "row", "block1x128", "block128x128", "mx"):
        q = BACKEND.quantize(normal(512, 259 if scaling == "row" else 256), fn, scaling)
        for dim in (0, 1):
            payload = distribute_tensor(q.codes(fn.name), mesh, [Shard(dim)])
            for where in (Replicate(), Shard(0)):
                scale = distribute_tensor(q.scale, mesh, [where])
                sharded = QuantizedTensor.of_codes(payload, scale, fn, q.block)
                for what, got, want in (
                    ("codes", sharded.codes(fn.name), q.codes(fn.name)),
                    ("dequantize", sharded.dequantize(), q.dequantize()),
                    ("t", sharded.t().dequantize(), q.t().dequantize()),
                    ("convert", sharded.convert(fnuz).dequantize(), q.convert(fnuz).dequantize()),
                ):
                    assert isinstance(got, DTensor)
                    if not got.placements[0].is_shard() or not torch.equal(got.full_tensor(), want):
                        wrong.append(f"{scaling} {dim} {where} {what}")
    x, random = normal(7, 5), random_bits((7, 5), 3)
    split = distribute_tensor(x, mesh, [Shard(0)])  # 4 rows and 3
    for draws in (random, distribute_tensor(random, mesh, [Shard(0)])):
        got = encode(split, fn, random=draws)
        if not torch.equal(got.full_tensor(), encode(x, fn, random=random)):  # pyright: ignore[reportAttributeAccessIssue]
            wrong.append("random")
    odd = BACKEND.quantize(normal(384, 128), fn, "block128x128")
    payload = distribute_tensor(odd.codes(fn.name), mesh, [Shard(0)])
    try:
        QuantizedTensor.of_codes(payload, odd.scale, fn, odd.block).dequantize()
    except ConfigError as error:
        return [*wrong, str(error)]
    return [*wrong, "no error"]


def test_codes_and_scales_may_be_sharded() -> None:
    for found in run_ranks(shards, 2):
        assert len(found) == 1, found
        assert "2 parts along dimension 0; a part has 192, no multiple of 128" in found[0]


# ----------------------------------------------------------------------------------------------------- products


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scaling", list(SCALINGS))
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_scales_are_the_largest_magnitude_over_the_formats(name: str, scaling: str) -> None:
    x, format = normal(130, 300), FORMATS[name]
    q = BACKEND.quantize(x, format, scaling)
    rows, columns = SCALINGS[scaling].block
    for i, row in enumerate(x.split(130 if rows == WHOLE else rows)):
        for j, block in enumerate(row.split(300 if columns == WHOLE else columns, dim=1)):
            want = (block.abs().max() / format.max).item()
            if scaling == "mx":
                want = 2.0 ** (math.floor(math.log2(block.abs().max().item())) - math.floor(math.log2(format.max)))
            elif scaling.endswith("_pow2"):
                want = 2.0 ** math.ceil(math.log2(want))
            assert q.scale[i, j].item() == (1.0 if scaling == "unit" else want)
    error = (q.dequantize() - x).abs()
    smallest = 2.0 ** (1 - format.bias - format.mantissa_bits)
    scaled = x.abs() / spread(q.scale, q.block, q.shape)
    if scaling == "mx":  # saturates, by less than a binade, as the shared exponent is that of the largest magnitude
        assert (scaled < 2.0 ** (math.floor(math.log2(format.max)) + 1)).all()
        error = error.masked_fill(scaled > format.max, 0.0)
    limit = torch.maximum(x.abs() * 2.0 ** -(format.mantissa_bits + 1), q.scale.max() * smallest / 2) * 1.00001
    assert (error <= limit).all()


def test_zero_small_and_broken_blocks() -> None:
    x = torch.zeros(5, 4)
    x[1], x[2, 0], x[3, 1] = 1e-45, math.inf, math.nan
    x[4] = 3.0e38
    q = BACKEND.quantize(x, FORMATS["float8_e4m3fn"], "row")
    assert q.scale[:2, 0].tolist() == [1.0, 2.0**-126]
    value = q.dequantize()
    assert (value[:2] == 0).all()
    assert value[2:4].isnan().all()
    assert torch.equal(value[4], x[4])
    unit = BACKEND.quantize(x, FORMATS["float8_e4m3fn"], "unit").dequantize()
    assert unit[2].tolist() == [448.0, 0.0, 0.0, 0.0]
    assert unit[3].isnan().tolist() == [False, True, False, False]


def test_a_scale_that_is_given_is_used() -> None:
    x, format = normal(130, 300), FORMATS["float8_e4m3fn"]
    for scaling in SCALINGS.keys() - {"unit"}:
        made = BACKEND.quantize(x, format, scaling)
        again = BACKEND.quantize(x, format, scaling, scale=made.scale)
        assert torch.equal(again.codes(format.name), made.codes(format.name))
        assert again.scale is made.scale
        half = BACKEND.quantize(x, format, scaling, made.scale / 2)
        assert torch.equal(half.scale, made.scale / 2)
        assert half.codes(format.name).bitwise_and(0x7F).max() == 0x7E  # saturated
    with pytest.raises(ConfigError, match=r'"row" of \(130, 300\).*scale \(1, 1\).*use \(130, 1\) torch.float32'):
        BACKEND.quantize(x, format, "row", torch.ones(1, 1))
    with pytest.raises(ConfigError, match=r"torch.float64; use \(1, 1\) torch.float32"):
        BACKEND.quantize(x, format, "tensor", torch.ones(1, 1, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r'"unit" asked with a scale.*use "tensor"'):
        BACKEND.quantize(x, format, "unit", torch.ones(1, 1))


def test_shared_exponents() -> None:
    x = torch.zeros(8, 33)
    x[1, :32], x[2, 31], x[3, 0], x[4, 1] = 1.0, 1.99 * 2.0**100, math.inf, math.nan
    x[5, 0], x[6, 0], x[7, 0] = 2.0**-126, 1e-45, torch.finfo(torch.float32).max
    q = BACKEND.quantize(x, FORMATS["float8_e4m3fn"], "mx")
    assert q.scale[[0, 1, 2, 5, 6, 7], 0].tolist() == [1.0, 2.0**-8, 2.0**92, 2.0**-126, 2.0**-126, 2.0**119]
    assert (q.scale[:, 1] == 1).all()
    value = q.dequantize()
    assert (value[[0, 6]] == 0).all()
    assert value[[1, 2, 5], [0, 31, 0]].tolist() == [1.0, 448 * 2.0**92, 2.0**-126]  # 509.4 saturates
    assert value[3:5, :32].isnan().all()
    finite = [0, 1, 2, 5, 6, 7]
    e8m0 = FORMATS["float8_e8m0fnu"]
    assert torch.equal(decode(encode(q.scale[finite], e8m0), e8m0), q.scale[finite])


def test_shares_of_what_was_lost() -> None:
    x = torch.tensor([[448.0, 449.0, -1e9, 1e-9, -1e-9, 0.0, math.inf, math.nan, 1.0, 2.0**-9]])
    for dtype in (torch.float32, torch.bfloat16):
        found = shares(x.to(dtype), BACKEND.quantize(x.to(dtype), FORMATS["float8_e4m3fn"], "unit"))
        saturated = 0.2 if dtype == torch.float32 else 0.1  # 449 becomes 448 in bfloat16
        assert [s.item() for s in found] == pytest.approx([saturated, 0.2, 0.2])
        assert all(s.dtype == torch.float32 and s.dim() == 0 for s in found)
    for seed in range(50):  # current scaling saturates nothing, however its scale is rounded
        y = normal(4, 100, seed=seed)
        for name in BYTES[:2]:
            assert shares(y, BACKEND.quantize(y, FORMATS[name], "row")).saturated == 0
    empty = normal(0, 4)
    assert [s.item() for s in shares(empty, BACKEND.quantize(empty, FORMATS["float8_e5m2"], "row"))] == [0, 0, 0]


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 1, 1), (5, 300, 7)])
@pytest.mark.parametrize("scaling", list(SCALINGS))
def test_a_product_is_that_of_the_dequantized(shape: tuple[int, int, int], scaling: str) -> None:
    m, k, n = shape
    a = BACKEND.quantize(normal(m, k), FORMATS["float8_e4m3fn"], scaling)
    b = BACKEND.quantize(normal(n, k, seed=1), FORMATS["float8_e5m2"], scaling).t()
    bias = normal(n, seed=2)
    want = a.dequantize().double() @ b.dequantize().double() + bias.double()
    gauge = a.dequantize().double().abs() @ b.dequantize().double().abs() + bias.double().abs()
    got = BACKEND.scaled_mm(a, b, torch.float32, bias)
    assert got.dtype == torch.float32
    assert ((got.double() - want).abs() <= (k + 8) * 2.0**-24 * gauge).all()
    assert torch.equal(BACKEND.scaled_mm(a, b, torch.bfloat16, bias), got.bfloat16())


def test_operands_may_be_scaled_differently() -> None:
    a = BACKEND.quantize(normal(5, 300), FORMATS["float8_e4m3fn"], "block1x128")
    b = BACKEND.quantize(normal(7, 300, seed=1), FORMATS["float8_e4m3fn"], "block128x128").t()
    c = BACKEND.quantize(normal(7, 300, seed=1), FORMATS["float8_e4m3fn"], "tensor").t()
    for right in (b, c):
        want = a.dequantize().double() @ right.dequantize().double()
        assert torch.allclose(BACKEND.scaled_mm(a, right, torch.float32).double(), want, rtol=1e-5, atol=1e-4)


def test_what_cannot_be_quantized_or_multiplied_is_refused() -> None:
    fn, fnuz = FORMATS["float8_e4m3fn"], FORMATS["float8_e4m3fnuz"]
    x = normal(4, 4)
    q = BACKEND.quantize(x, fn, "row")
    with pytest.raises(Unsupported, match=r'"cpu".*float4_e2m1fn; use one of float8_e4m3fn'):
        BACKEND.quantize(x, FORMATS["float4_e2m1fn"], "tensor")
    with pytest.raises(ConfigError, match=r'scaling "rows" asked.*did you mean "row"'):
        BACKEND.quantize(x, fn, "rows")
    with pytest.raises(ConfigError, match=r"another layout.*bias=8"):
        BACKEND.quantize(x, Format("float8_e4m3fn", 4, 3, 8, 240.0, "negative_zero", "saturate"), "tensor")
    with pytest.raises(ConfigError, match=r"\(4, 4\) torch.float64"):
        BACKEND.quantize(x.double(), fn, "tensor")
    with pytest.raises(Unsupported, match=r"float8_e4m3fn x float8_e4m3fnuz; formats that may meet"):
        BACKEND.scaled_mm(q, BACKEND.quantize(x, fnuz, "row").t(), torch.float32)
    with pytest.raises(Unsupported, match=r"scale for each term along K.*transpose"):
        BACKEND.scaled_mm(q, q, torch.float32)
    with pytest.raises(Unsupported, match=r"torch.float64 asked"):
        BACKEND.scaled_mm(q, q.t(), torch.float64)
    with pytest.raises(ConfigError, match=r"\(4, 4\) x \(3, 4\).*K must be equal"):
        BACKEND.scaled_mm(q, BACKEND.quantize(normal(4, 3), fn, "row").t(), torch.float32)
    with pytest.raises(ConfigError, match=r"takes quantized tensors, found Tensor"):
        BACKEND.scaled_mm(x, q, torch.float32)  # pyright: ignore[reportArgumentType]


def test_a_smaller_range_of_the_same_codes_is_honoured() -> None:
    narrow = replace(FORMATS["float8_e4m3fn"], max=240.0)  # some devices clamp there
    assert BACKEND.quantize(torch.tensor([[300.0, 239.0]]), narrow, "unit").dequantize().tolist() == [[240.0, 240.0]]


def test_a_backend_that_does_not_opt_in_refuses() -> None:
    with pytest.raises(Unsupported, match="has no quantized products"):
        PortableMatmul("acme").quantize(torch.zeros(2, 2), FORMATS["float8_e4m3fn"], "tensor")
