"""Stochastic rounding: exact probabilities, and random bits that a slice has as the whole has them."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from accelbridge.errors import ConfigError
from accelbridge.precision.formats import FORMATS, decode, encode
from accelbridge.precision.stochastic import random_bits, random_key

PLAIN_LOOPS: dict[str, Any] = {"cpp.simdlen": 0}  # compiled in less time
SIGNED = [name for name in FORMATS if FORMATS[name].signed]
E4M3, E5M2 = FORMATS["float8_e4m3fn"], FORMATS["float8_e5m2"]


def leading(bits: int) -> Tensor:
    """All values of the first ``bits`` of 32, as int32."""
    return (torch.arange(1 << bits, dtype=torch.int64) << (32 - bits)).to(torch.int32)


@pytest.mark.parametrize(
    ("x", "k", "lower", "step"),
    [
        (1.0 + 2.0**-23, 20, 1.0, 2.0**-3),
        (1.0 + 2.0**-4, 20, 1.0, 2.0**-3),
        (-(1.125 - 2.0**-23), 20, 1.0, 2.0**-3),
        (240.0 + 12345 * 2.0**-16, 20, 240.0, 16.0),
        (2.0**-10 * 0.7001953125, 20, 0.0, 2.0**-9),  # subnormal
    ],
)
def test_the_probability_is_exactly_the_fraction(x: float, k: int, lower: float, step: float) -> None:
    number = torch.tensor(x).item()
    fraction = (abs(number) - lower) / step
    for start in (0, 5):  # in the later bits, which decide nothing
        random = leading(k) + start
        values = decode(encode(torch.tensor(number).expand(1 << k), E4M3, random=random), E4M3).abs()
        assert ((values == lower) | (values == lower + step)).all()
        assert (values == lower + step).sum().item() == fraction * 2**k


def test_a_fraction_finer_than_31_bits_is_rounded_down() -> None:
    random = torch.tensor([0, 1, 2, 3, -1, -(2**31), 2**31 - 1], dtype=torch.int32)
    tiny = torch.tensor(2.0**-9 * 2.0**-30).expand(7)  # up at a draw of 31 bits below 2
    assert encode(tiny, E4M3, random=random).tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert encode(tiny / 2, E4M3, random=random).tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert encode(tiny / 2 * 1.9990234375, E4M3, random=random).tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert encode(tiny * 2.0**-40, E4M3, random=random).tolist() == [0] * 7


@pytest.mark.parametrize("name", SIGNED)
def test_numbers_of_the_format_and_specials_are_as_to_nearest(name: str) -> None:
    format = FORMATS[name]
    count = 16 if name == "float4_e2m1fn" else 256 if name.startswith("float8") else 1 << 16
    codes = torch.arange(count, dtype=torch.int32).to(torch.uint8 if count <= 256 else torch.int16)
    value = decode(codes, format)
    x = torch.cat([value, torch.tensor([math.inf, -math.inf, math.nan, 3e38 * (format.exponent_bits < 8)])])
    for random in (0, 1, -1, 2**31 - 1, -(2**31), 0x2AAAAAAA):
        draws = torch.full(x.shape, random, dtype=torch.int32)
        assert torch.equal(encode(x, format, random=draws), encode(x, format))


@pytest.mark.parametrize("name", SIGNED)
def test_no_number_passes_its_neighbours(name: str) -> None:
    format = FORMATS[name]
    bits = random_bits((1 << 16,), 1)
    x = (torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * format.max / 3).clamp(
        -format.max, format.max
    )
    low = decode(encode(x, format, random=torch.full_like(bits, -1)), format)
    high = decode(encode(x, format, random=torch.zeros_like(bits)), format)
    got = decode(encode(x, format, random=bits), format)
    assert (low.abs() <= x.abs()).all()
    assert (high.abs() >= x.abs()).all()
    assert ((got == low) | (got == high)).all()


def test_the_mean_is_unbiased() -> None:
    x = torch.tensor([1.03, -0.007, 300.5, 2.0**-10 / 3])
    n = 1 << 18
    got = decode(encode(x.expand(n, 4).contiguous(), E4M3, random=random_bits((n, 4), 3)), E4M3).double()
    step = (decode(encode(x.abs(), E4M3, random=torch.zeros(4, dtype=torch.int32)), E4M3)
            - decode(encode(x.abs(), E4M3, random=torch.full((4,), -1, dtype=torch.int32)), E4M3))  # fmt: skip
    # The standard deviation of a mean is at most half a step over sqrt(n): six of them.
    assert ((got.mean(0) - x.double()).abs() <= 6 * step / 2 / n**0.5).all()
    nearest = decode(encode(x, E4M3), E4M3).double()
    assert ((nearest - x.double()).abs() > 6 * step / 2 / n**0.5).all()  # which is not, so the test can tell


def test_random_bits_are_uniform_and_differ() -> None:
    bits = random_bits((512, 512), 7)
    assert bits.dtype == torch.int32
    ones = torch.stack([bits >> shift & 1 for shift in range(32)]).double().mean((1, 2))
    assert ((ones - 0.5).abs() <= 6 * 0.5 / 512).all()
    assert bits.unique().numel() > 512 * 512 * 0.9999
    assert not (random_bits((512, 512), 8) == bits).any(1).all()
    assert random_key("a", 1).item() != random_key("a", 2).item()
    assert torch.equal(random_bits((4, 4), random_key(7)), bits[:4, :4])


def test_a_slice_has_the_bits_that_it_has_in_the_whole() -> None:
    whole = random_bits((6, 5, 7), 11)
    assert torch.equal(random_bits((6, 5, 7), 11), whole)
    assert torch.equal(random_bits((2, 5, 7), 11, 3), whole[3:5])
    assert torch.equal(random_bits((3, 2, 4), 11, (1, 2, 3)), whole[1:4, 2:4, 3:])
    assert torch.equal(random_bits((0, 5, 7), 11, 2), whole[:0])
    assert random_bits((), 11).shape == ()
    for starts in ((1, 2), (-1, 0, 0)):
        with pytest.raises(ConfigError, match=r"random bits of \(3, 2, 4\).*per dimension"):
            random_bits((3, 2, 4), 11, starts)


def test_what_cannot_be_rounded_at_random_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(3,\) asked.*random numbers \(1,\) torch.int32"):
        encode(torch.ones(3), E4M3, random=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ConfigError, match=r"torch.int64; use torch.int32"):
        encode(torch.ones(3), E4M3, random=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"float8_e8m0fnu.*holds scales"):
        encode(torch.ones(3), FORMATS["float8_e8m0fnu"], random=torch.zeros(3, dtype=torch.int32))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_generated_code_rounds_the_same() -> None:
    def run(x: Tensor, seed: Tensor) -> Tensor:
        return encode(x, E5M2, random=random_bits(x.shape, seed, (3, 0)))

    x = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-35, 35)
    assert torch.equal(
        torch.compile(run, fullgraph=True, dynamic=False, options=PLAIN_LOOPS)(x, random_key(5)), run(x, random_key(5))
    )
