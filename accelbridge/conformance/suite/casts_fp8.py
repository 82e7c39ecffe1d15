"""CST-005..008: what an fp8 cast makes of a number, and what a code is read as."""

from __future__ import annotations

import math

import torch

from accelbridge.conformance.bench import Bench
from accelbridge.conformance.oracle.formats import E4M3, E5M2, Table, every_bfloat16, near_ties
from accelbridge.conformance.registry import case
from accelbridge.conformance.suite._fp8 import canonical, declared, from_codes, partner_of, policies, products, quantize
from accelbridge.errors import Unsupported

_SLACK = 2.0**-21
"""A quotient in float32 may be 8 units in the last place off: by way of a reciprocal, say."""


def _casts(t: Bench, names: tuple[str, ...]) -> None:
    nonfinite = policies(t)[0]
    for table in declared(t, names, "unit"):
        for name, x in (("bfloat16", every_bfloat16()), ("near ties", near_ties(table))):
            q = quantize(t, x, table, "unit")
            t.equal(canonical(t, q, table), table.encode(x.double(), nonfinite), name=f"{table.name} {name}")
    for table in declared(t, names, "tensor"):
        largest = table.format.max
        for amax in (largest, largest * 2.0**-9, largest * 2.0**5, 149.0, 3.0e-5):
            _scaled(t, table, amax, "tensor")
        if t.supported("quantize", table.name, "tensor_pow2"):
            _scaled(t, table, 100.0, "tensor_pow2")


def _scaled(t: Bench, table: Table, amax: float, scaling: str) -> None:
    """All bfloat16 up to ``amax``, scaled by it."""
    every, largest = every_bfloat16(), torch.tensor(amax).to(torch.bfloat16)
    x = every.where(every.abs() <= largest, torch.zeros_like(every))  # NaN too becomes 0
    name = f"{table.name} {scaling} amax {amax:g}"
    q = quantize(t, x, table, scaling)
    scale = float(largest) / table.format.max
    scale = 2.0 ** math.ceil(math.log2(scale)) if scaling.endswith("_pow2") else scale
    t.within(q.scale.reshape(-1), torch.tensor([scale], dtype=torch.float64), scale * _SLACK, name=f"{name}: scale")
    quotient = x.double() / float(q.scale.reshape(-1)[0])
    # With a power of two nothing but the cast rounds. Else what lies close to a tie may go either way.
    slack = 0.0 if math.frexp(scale)[0] == 0.5 else _SLACK
    low, high = (table.decode(table.encode(quotient * factor)) for factor in (1.0 - slack, 1.0 + slack))
    got = t.put(table.values.float())[q.codes(table.name).long()]
    t.within(got, (low + high) / 2.0, (high - low).abs() / 2.0, name=name)


@case("CST-005", "fp8")
def e4m3_quantise(t: Bench) -> None:
    """Quantising to e4m3 equals the suite's table on all 65,536 bfloat16 inputs, with scale 1, powers of two and
    others.

    Scale 1 is the scaling "unit", and takes float32 next to each tie besides (rounding by way of bfloat16 shows there).
    Other scales come from the data: "tensor" divides by the largest magnitude over the format's. Each declared variant.
    """
    _casts(t, E4M3)


@case("CST-006", "fp8")
def e5m2_quantise(t: Bench) -> None:
    """Quantising to e5m2 equals the suite's table on all 65,536 bfloat16 inputs, with scale 1, powers of two and
    others; see CST-005."""
    _casts(t, E5M2)


@case("CST-007", "fp8")
def decode_all_codes(t: Bench) -> None:
    """All 256 codes of each declared format are read as the table says, NaN, infinities and -0 included: by
    ``dequantize``, and as an operand of a product (where -0 and 0 are one)."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(256, 1)
    for table in declared(t, (*E4M3, *E5M2), "unit"):
        # A scale of 1 for each row, as NaN would otherwise be all that is seen of a row of several codes.
        t.equal(t.run(from_codes(t, codes, table).dequantize), table.values.float().view(256, 1), name=table.name)
        partner = partner_of(t, table)
        left = torch.zeros(256, 16, dtype=torch.uint8)
        left[:, :1] = codes
        one = partner.encode(torch.ones(16, 16, dtype=torch.float64))
        for name, scaled_mm in products(t, table, partner, "tensor"):
            out = t.run(scaled_mm, from_codes(t, left, table), from_codes(t, one, partner).t(), torch.bfloat16)
            want = table.values.view(256, 1).expand(256, 16)
            t.within(out, want, 0.0, code="EXACT", name=f"{table.name} x {partner.name} {name}")


@case("CST-008", "fp8")
def overflow_policy(t: Bench) -> None:
    """What is too large becomes what the caller's ``Format.overflow`` says, where the backend declares that it can
    (fact "fp8.overflow"), and is refused where it cannot: around the largest number, its tie with the next one, far
    above, infinity and NaN."""
    able = policies(t)
    for table in declared(t, (*E4M3, *E5M2), "unit"):
        largest = table.format.max
        tie = largest + float(table.magnitudes[-1] - table.magnitudes[-2]) / 2.0
        above = float(torch.nextafter(torch.tensor(tie), torch.tensor(math.inf)))
        numbers = [largest, tie, above, 2.0 * largest, 1.0e30, math.inf, math.nan, largest / 2.0]
        x = torch.tensor([numbers, [-number for number in numbers]])
        for nonfinite in (False, True):
            format, name = table.overflowing(nonfinite), f"{table.name} {'nonfinite' if nonfinite else 'saturate'}"
            if nonfinite not in able:
                t.raises((Unsupported, NotImplementedError), t.backend.matmul.quantize, t.put(x), format, "unit")
                continue
            q = quantize(t, x, table, "unit", format)
            t.equal(canonical(t, q, table), table.encode(x.double(), nonfinite), name=name)
