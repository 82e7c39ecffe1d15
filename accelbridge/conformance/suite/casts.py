"""CST: conversions between float formats, and what becomes of subnormal numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from accelbridge.conformance.bench import Bench
from accelbridge.conformance.oracle import casts
from accelbridge.conformance.registry import case


def flushed_allowed(t: Bench, dtype: torch.dtype) -> bool:
    """Whether the backend states that arithmetic on ``dtype`` flushes subnormal numbers."""
    return t.capabilities.subnormals.get(str(dtype).removeprefix("torch."), "kept") == "flushed"


def equal_or_flushed(t: Bench, got: Tensor, want: Tensor, allowed: Tensor, name: str) -> None:
    """``got`` has the bits of ``want``, or 0 with its sign where ``allowed``."""
    host = t.fetch(got)
    if host.shape == want.shape and host.dtype == want.dtype:
        zero = casts.signed_zero(want)
        flushed = allowed & (casts.to_bits(host) == casts.to_bits(zero))
        want = torch.where(flushed, zero, want)
    t.equal(got, want, name=name)


def _cast_patterns(t: Bench, x: Tensor, to: torch.dtype) -> None:
    """``x`` converted by ``to`` and by ``copy_`` is rounded to nearest, ties to even."""
    want, on_device = casts.cast(x, to), t.put(x)
    may_flush = flushed_allowed(t, x.dtype) or flushed_allowed(t, to)
    allowed = (casts.is_subnormal(x) | casts.is_subnormal(want)) & may_flush
    equal_or_flushed(t, t.run(on_device.to, to), want, allowed, "to")
    out = torch.zeros(x.shape, dtype=to, device=t.device)
    t.run(out.copy_, on_device)
    equal_or_flushed(t, out, want, allowed, "copy_")
    some = on_device[1:-3:7]
    equal_or_flushed(t, t.run(some.to, to), want[1:-3:7], allowed[1:-3:7], "to, every 7th")


@case("CST-001", "core")
def bfloat16_to_nearest(t: Bench) -> None:
    """float32 to bfloat16 rounds to nearest, ties to even: all 65,536 upper halves with 8 lower ones, ties and their
    neighbours among them, with infinities, NaN and subnormal numbers."""
    _cast_patterns(t, casts.float32_patterns(), torch.bfloat16)


@case("CST-002", "core")
def float16_to_nearest(t: Bench) -> None:
    """float32 to float16 rounds to nearest, ties to even, overflows to infinity from 65520 on, and gives subnormal
    numbers where it must: the patterns of CST-001, and every tie of float16's with its neighbours."""
    halves = torch.arange(1 << 16)
    finite = halves[(halves >> 10) & 0x1F != 0x1F]
    ties = casts.decode(finite, torch.float16).abs()
    # Half a unit in the last place above each number: exact in float32, as are the numbers on either side.
    step = torch.exp2((((finite >> 10) & 0x1F).clamp(min=1) - 26).double())
    bits = casts.encode(ties + step, torch.float32)
    near = torch.cat([bits - 1, bits, bits + 1]) | (torch.cat([finite] * 3) >> 15 << 31)
    _cast_patterns(t, casts.from_bits(near, torch.float32), torch.float16)
    _cast_patterns(t, casts.float32_patterns(), torch.float16)


@case("CST-003", "core")
def special_values_kept(t: Bench) -> None:
    """NaN stays NaN, and infinities and zeros keep their sign, through every conversion between float32, bfloat16 and
    float16; NaN also with the payloads that truncation would turn into infinity."""
    for source, (exponent_bits, p) in casts.FORMATS.items():
        infinity = ((1 << exponent_bits) - 1) << (p - 1)
        sign = 1 << (exponent_bits + p - 1)
        one = ((1 << (exponent_bits - 1)) - 1) << (p - 1)
        # The lowest, the highest and a middle payload of NaN.
        plain = torch.tensor([infinity | 1, infinity | ((1 << (p - 1)) - 1), infinity | 1 << (p - 2), infinity, 0, one])
        x = casts.from_bits(torch.cat([plain, plain | sign]), source)
        for target in casts.FORMATS:
            if target != source:
                t.equal(t.run(t.put(x).to, target), casts.cast(x, target), name=f"{source} to {target}")


@case("CST-004", "core")
def subnormals_as_stated(t: Bench) -> None:
    """Subnormal numbers of float32, bfloat16 and float16 survive every copy; sums and products with them are exact,
    or, only where the capabilities state "flushed", 0 with the sign of the result."""
    for dtype in casts.FORMATS:
        x = casts.subnormals(dtype)
        device = t.put(x)
        t.equal(device, x, name=f"put {dtype}")
        t.equal(t.run(device.clone), x, name=f"clone {dtype}")
        t.equal(t.run(t.backend.offload.to_host, device).wait(), x, name=f"to_host {dtype}", host=True)
        for name, got, want in _arithmetic(t, x, device):
            allowed = torch.full(x.shape, flushed_allowed(t, dtype))
            equal_or_flushed(t, got, want, allowed, f"{name} {dtype}")


def _arithmetic(t: Bench, x: Tensor, device: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """(name, what the device gives, what is right) of sums and products of subnormal numbers ``x``."""
    dtype, value = x.dtype, casts.decode(casts.to_bits(x), x.dtype)
    # Up to normal numbers and down from them: 2^(p-1) is a power of two that every format holds.
    raised = casts.from_bits(casts.encode(value * 2.0 ** (casts.FORMATS[dtype][1] - 1), dtype), dtype)
    high, factor = t.put(raised), 2.0 ** (casts.FORMATS[dtype][1] - 1)
    right = {
        "x + x": (lambda: device + device, value + value),
        "x * 1": (lambda: device * torch.ones_like(device), value),
        "x * 2^(p-1)": (lambda: device * torch.full_like(device, factor), value * factor),
        "normal * 2^-(p-1)": (lambda: high * torch.full_like(high, 1.0 / factor), value),
    }
    made = {
        name: (t.run(call), casts.from_bits(casts.encode(want, dtype), dtype)) for name, (call, want) in right.items()
    }
    return [(name, got, want) for name, (got, want) in made.items()]


def probed_class(t: Bench, dtype: torch.dtype) -> str:
    """What sums and products really do with subnormal numbers: "kept", or "flushed" where one of them isn't exact."""
    x = casts.subnormals(dtype)
    results = _arithmetic(t, x, t.put(x))
    exact = all(bool((casts.to_bits(t.fetch(got)) == casts.to_bits(want)).all()) for _, got, want in results)
    return "kept" if exact else "flushed"
