"""The comparators on bad input: each must refuse what it must, and accept exactly what is allowed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from accelbridge.conformance import checks, falsify
from accelbridge.conformance.oracle import data

NAN, INF = math.nan, math.inf
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PLAIN = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64)


def ramp(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.arange(1, 13).reshape(3, 4).to(dtype)


def with_value(at: int, value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    x = ramp(dtype)
    x.view(-1)[at] = value
    return x


# ------------------------------------------------------------------------------------------------------------ equal


@pytest.mark.parametrize("dtype", [*FLOATS, *PLAIN])
def test_equal_takes_the_same_bits_and_no_others(dtype: torch.dtype) -> None:
    x = ramp(dtype)
    assert checks.equal(x.clone(), x).good
    for at in range(x.numel()):
        wrong = x.clone()
        wrong.view(-1)[at] = 0
        assert not checks.equal(wrong, x).good


@pytest.mark.parametrize("at", [0, 5, 11])
@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_sees_a_nan_anywhere(at: int, dtype: torch.dtype) -> None:
    assert not checks.equal(with_value(at, NAN, dtype), ramp(dtype)).good
    assert not checks.equal(ramp(dtype), with_value(at, NAN, dtype)).good
    assert checks.equal(with_value(at, NAN, dtype), with_value(at, NAN, dtype)).good


def test_equal_sees_signs_shapes_and_dtypes() -> None:
    zero = torch.zeros(3)
    assert not checks.equal(-zero, zero).good
    assert not checks.equal(with_value(0, -INF), with_value(0, INF)).good
    assert not checks.equal(ramp().reshape(4, 3), ramp()).good
    assert not checks.equal(ramp(torch.float32), ramp()).good
    assert not checks.equal(torch.zeros(1), torch.zeros(0)).good
    assert checks.equal(torch.zeros(0, 4), torch.zeros(0, 4)).good


def test_equal_names_the_first_difference() -> None:
    verdict = checks.equal(with_value(6, 99.0), ramp())
    assert verdict.worst == (1, 2)
    assert "1 of 12 elements differ" in verdict.message
    assert "99.0, expected 7.0" in verdict.message


# ----------------------------------------------------------------------------------------------------------- within


def test_within_takes_an_error_of_exactly_the_bound() -> None:
    bound = torch.tensor(0.25)
    assert checks.within(ramp() + 0.25, ramp(), bound).good
    assert not checks.within(ramp() + 0.25000001, ramp(), bound).good
    assert checks.within(ramp(), ramp(), torch.tensor(0.0)).good
    assert not checks.within(with_value(3, 4.0000001), ramp(), torch.tensor(0.0)).good


@pytest.mark.parametrize("at", [0, 5, 11])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_within_lets_no_bound_excuse_what_is_not_finite(at: int, value: float) -> None:
    bound = torch.tensor(INF)
    assert not checks.within(with_value(at, value), ramp(), torch.tensor(1e300)).good
    assert not checks.within(ramp(), with_value(at, value), bound).good
    assert checks.within(with_value(at, value), with_value(at, value), bound).good
    assert not checks.within(with_value(at, -value), with_value(at, value), bound).good or math.isnan(value)


def test_within_fails_on_a_bound_that_is_nan() -> None:
    assert not checks.within(ramp() + 1e-9, ramp(), torch.tensor(NAN)).good


def test_within_reports_the_share_of_the_bound() -> None:
    verdict = checks.within(with_value(2, 3.5), ramp(), torch.tensor(2.0))
    assert verdict.value == 0.25
    assert verdict.worst == (0, 2)


# ------------------------------------------------------------------------------------------------------------- sqnr


def test_sqnr_of_a_known_error() -> None:
    x = torch.ones(1, 1000, dtype=torch.float64)
    assert checks.sqnr(x * 1.001, x, 59.9).value == pytest.approx(60.0, abs=1e-6)
    assert not checks.sqnr(x * 1.001, x, 60.1).good
    assert checks.sqnr(x, x, 400.0).good


@pytest.mark.parametrize("at", [0, 5, 11])
@pytest.mark.parametrize("value", [NAN, INF])
def test_sqnr_of_an_output_that_is_not_finite_is_no_pass(at: int, value: float) -> None:
    assert not checks.sqnr(with_value(at, value), ramp(), -1000.0).good


def test_sqnr_sees_one_bad_row_of_many() -> None:
    x = data.normal(0, "x", (1024, 64))
    wrong = x.clone()
    wrong[17] = 0
    assert checks.sqnr(wrong, x, 25.0, rows=False).good, "30 dB of the whole hide it"
    assert not checks.sqnr(wrong, x, 25.0).good


def test_sqnr_against_zeros_needs_zeros() -> None:
    zero = torch.zeros(2, 3)
    assert checks.sqnr(zero, zero, 50.0).good
    assert not checks.sqnr(zero + 1e-30, zero.double(), 50.0).good


# ---------------------------------------------------------------------------------------------------------- scalars


def test_limits_take_equality_and_no_nan() -> None:
    assert checks.at_most(1.0, 1.0, "m").good
    assert checks.at_least(1.0, 1.0, "m").good
    for value, limit in ((NAN, 1.0), (1.0, NAN)):
        assert not checks.at_most(value, limit, "m").good
        assert not checks.at_least(value, limit, "m").good
    assert not checks.at_most(1.1, 1.0, "m").good
    assert not checks.at_least(0.9, 1.0, "m").good


def test_same_wants_the_same_type() -> None:
    assert checks.same((1, "a"), (1, "a"), "m").good
    assert not checks.same(True, 1, "m").good
    assert not checks.same(1, 2, "m").good
    assert not checks.same(NAN, NAN, "m").good


# ---------------------------------------------------------------------------------------------------- falsification


@pytest.mark.parametrize("mode", falsify.MODES)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_every_corruption_changes_something_and_leaves_the_original(mode: str, dtype: torch.dtype) -> None:
    x = ramp(dtype)
    kept = x.clone()
    assert not checks.equal(falsify.corrupt(x, mode), x).good
    assert checks.equal(x, kept).good
    assert falsify.corrupt(torch.zeros(0), mode).shape == (1,)


# ------------------------------------------------------------------------------------------------------------- data


def test_data_hangs_on_seed_and_name_alone() -> None:
    first = data.normal(1, "a", (100,))
    data.normal(5, "z", (7,))
    assert torch.equal(first, data.normal(1, "a", (100,)))
    assert not torch.equal(first, data.normal(2, "a", (100,)))
    assert not torch.equal(first, data.normal(1, "b", (100,)))


def test_data_has_the_distribution_it_says() -> None:
    n = 200_000
    normal, uniform = data.normal(3, "n", (n,)), data.uniform(3, "u", (n,))
    assert abs(normal.mean()) < 5 / math.sqrt(n)
    assert abs(normal.var() - 1) < 5 * math.sqrt(2 / n)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    drawn = data.integers(3, "i", (n,), -2, 3)
    assert sorted(drawn.unique().tolist()) == [-2, -1, 0, 1, 2, 3]
    share = (data.sparse_integers(3, "s", (n,), 4, 0.1) != 0).double().mean()
    assert abs(share - 0.1) < 0.005


def test_data_is_what_it_was() -> None:
    """Philox's words are the same on every machine and in every release of numpy."""
    assert data.words(20261130, "fixed", 2).tolist() == FIXED_WORDS


FIXED_WORDS = [15903050297608587720, 4100897554662573388]
