"""The conformance suite's oracles against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from accelbridge.conformance.oracle.formats import E4M3, E5M2, TABLES, every_bfloat16, near_ties
from accelbridge.conformance.oracle.scaled import Accumulator, product_bound, spread

KNOWN = {
    "float8_e4m3fn": {0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x39: 1.125, 0x7E: 448.0,
                      0x7F: math.nan, 0x80: -0.0, 0xB8: -1.0, 0xFE: -448.0, 0xFF: math.nan},
    "float8_e4m3fnuz": {0x00: 0.0, 0x01: 2**-10, 0x08: 2**-7, 0x38: 0.5, 0x40: 1.0, 0x7F: 240.0, 0x80: math.nan,
                        0xFF: -240.0},
    "float8_e4m3": {0x01: 2**-9, 0x38: 1.0, 0x77: 240.0, 0x78: math.inf, 0x79: math.nan, 0x7F: math.nan, 0x80: -0.0,
                    0xF8: -math.inf},
    "float8_e5m2": {0x01: 2**-16, 0x03: 3 * 2**-16, 0x04: 2**-14, 0x3C: 1.0, 0x7B: 57344.0, 0x7C: math.inf,
                    0x7D: math.nan, 0x7F: math.nan, 0x80: -0.0, 0xFC: -math.inf},
    "float8_e5m2fnuz": {0x01: 2**-17, 0x3C: 0.5, 0x40: 1.0, 0x7F: 57344.0, 0x80: math.nan, 0xFF: -57344.0},
    "float8_e8m0fnu": {0x00: 2.0**-127, 0x7E: 0.5, 0x7F: 1.0, 0x80: 2.0, 0xFE: 2.0**127, 0xFF: math.nan},
    "float4_e2m1fn": {0x0: 0.0, 0x1: 0.5, 0x2: 1.0, 0x3: 1.5, 0x4: 2.0, 0x5: 3.0, 0x6: 4.0, 0x7: 6.0, 0x8: -0.0,
                      0xF: -6.0},
}  # fmt: skip
NANS = {"float8_e4m3fn": 2, "float8_e4m3fnuz": 1, "float8_e4m3": 14, "float8_e5m2": 6, "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1, "float4_e2m1fn": 0}  # fmt: skip


@pytest.mark.parametrize("name", list(TABLES))
def test_known_codes(name: str) -> None:
    values = TABLES[name].values
    for code, want in KNOWN[name].items():
        got = float(values[code])
        assert (math.isnan(got) and math.isnan(want)) or (got, math.copysign(1, got)) == (want, math.copysign(1, want))
    assert int(values.isnan().sum()) == NANS[name]
    assert float(values[values.isfinite()].max()) == TABLES[name].format.max


@pytest.mark.parametrize("name", list(TABLES))
def test_magnitudes_ascend_and_are_distinct(name: str) -> None:
    magnitudes = TABLES[name].magnitudes
    assert (magnitudes[1:] > magnitudes[:-1]).all()
    assert torch.equal(magnitudes, TABLES[name].values[: len(magnitudes)])


@pytest.mark.parametrize("name", [*E4M3, *E5M2, "float4_e2m1fn"])
def test_every_number_has_its_own_code(name: str) -> None:
    table = TABLES[name]
    codes = torch.arange(len(table.values), dtype=torch.uint8)
    for nonfinite in (False, True):
        exact = table.values.isfinite() if not nonfinite else ~table.values.isnan()
        assert torch.equal(table.encode(table.values[exact], nonfinite), codes[exact])
    assert torch.equal(table.decode(codes[exact]), table.values[exact])
    nans = table.canonical[codes[table.values.isnan()].long()]
    assert len(set(nans.tolist())) <= 1
    assert torch.equal(table.canonical[codes[~table.values.isnan()].long()], codes[~table.values.isnan()])


@pytest.mark.parametrize(
    ("name", "number", "saturated", "nonfinite"),
    [
        ("float8_e4m3fn", 1.0625, 0x38, 0x38),  # a tie goes to the even code
        ("float8_e4m3fn", 1.1875, 0x3A, 0x3A),
        ("float8_e4m3fn", 1.0625 + 2.0**-40, 0x39, 0x39),
        ("float8_e4m3fn", -(2.0**-10), 0x80, 0x80),  # half the smallest number
        ("float8_e4m3fn", 2.0**-10 * 1.001, 0x01, 0x01),
        ("float8_e4m3fn", 464.0, 0x7E, 0x7E),  # the last that is not too large
        ("float8_e4m3fn", 464.1, 0x7E, 0x7F),
        ("float8_e4m3fn", -math.inf, 0xFE, 0x7F),
        ("float8_e4m3fnuz", -(2.0**-11), 0x00, 0x00),  # no negative zero
        ("float8_e4m3fnuz", 248.0, 0x7F, 0x80),  # a tie with what is not there
        ("float8_e4m3fnuz", 247.9, 0x7F, 0x7F),
        ("float8_e4m3", 247.9, 0x77, 0x77),
        ("float8_e4m3", 248.0, 0x77, 0x78),
        ("float8_e5m2", 61439.0, 0x7B, 0x7B),
        ("float8_e5m2", 61440.0, 0x7B, 0x7C),
        ("float8_e5m2", -1e30, 0xFB, 0xFC),
        ("float8_e5m2fnuz", 61440.0, 0x7F, 0x80),
    ],
)
def test_rounding_and_overflow(name: str, number: float, saturated: int, nonfinite: int) -> None:
    table, x = TABLES[name], torch.tensor([number], dtype=torch.float64)
    assert table.encode(x).tolist() == [saturated]
    assert table.encode(x, nonfinite=True).tolist() == [nonfinite]


def test_nan_is_encoded_as_nan() -> None:
    for name in (*E4M3, *E5M2):
        code = TABLES[name].encode(torch.tensor([math.nan, 1.0], dtype=torch.float64))
        assert TABLES[name].decode(code).isnan().tolist() == [True, False]


@pytest.mark.parametrize("name", [n for n in (*E4M3, *E5M2, "float8_e8m0fnu") if hasattr(torch, n)])
def test_torch_reads_codes_alike(name: str) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    want, got = codes.view(getattr(torch, name)).double(), TABLES[name].values
    assert torch.equal(got.nan_to_num(nan=9.5), want.nan_to_num(nan=9.5))


def test_inputs_of_the_casts() -> None:
    every = every_bfloat16()
    assert len(every.view(torch.int16).unique()) == 2**16
    below, tie, above = near_ties(TABLES["float8_e4m3fn"])
    assert len(tie) == 126
    assert tie[0] == 2.0**-10
    assert (below < tie).all()
    assert (tie < above).all()


def test_a_bound_grows_with_k_and_with_fewer_bits() -> None:
    wide, narrow = Accumulator(), Accumulator(14, 128)
    assert wide.share(64) < wide.share(4096) < narrow.share(64) < narrow.share(128)
    assert narrow.share(16384) - narrow.share(128) == pytest.approx(wide.share(16384) - wide.share(128))
    a, b = torch.tensor([[1.0, -2.0]], dtype=torch.float64), torch.tensor([[3.0], [0.5]], dtype=torch.float64)
    want, bound = product_bound(a, b, torch.bfloat16, wide)
    assert want.tolist() == [[2.0]]
    assert bound.item() == pytest.approx(2.0**-8 * 2.0 + (1 + 2.0**-8) * wide.share(2) * 4.0)


def test_scales_are_spread_over_blocks() -> None:
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert spread(scale, (2, 3), (3, 4)).tolist() == [[1, 1, 1, 2], [1, 1, 1, 2], [3, 3, 3, 4]]
    assert spread(torch.tensor([[5.0], [6.0]]), (1, -1), (2, 3)).tolist() == [[5, 5, 5], [6, 6, 6]]
