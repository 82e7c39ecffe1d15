"""The benchmarks compare equal things: their figures are for people, and never asserted."""

# pyright: reportMissingImports=false
# (the folder of the benchmarks is put on the path below)

import argparse
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def arms(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import arms

    return arms


def test_trainer_and_loop_by_hand_train_the_same(arms, tmp_path):
    import overhead

    options = argparse.Namespace(turns=1, pairs=1, steps=3, warmup=2, profile=None, profile_steps=0)
    result = overhead.measure("tiny", tmp_path, options)  # raises where a loss of the two differs
    assert result["steps"] == 7
    assert result["last_loss"] > 0
    assert result["trainer"]["tensor_bytes"]["peak"] > result["trainer"]["tensor_bytes"]["between_steps"] > 0


def test_three_ways_to_save(arms, tmp_path):
    import checkpoint

    found = checkpoint.measure(argparse.Namespace(megabytes=16, turns=1), tmp_path)
    assert found["bytes"] >= 16 * 2**20
    assert [arm["name"] for arm in found["arms"]] == ["accelbridge", "dcp.async_save", "torch.save"]
    for arm in found["arms"]:
        assert len(arm["stall"]) == len(arm["total"]) == 2
        assert all(0 < stall <= total for stall, total in zip(arm["stall"], arm["total"], strict=True))
    text, verdicts = checkpoint.table(found)
    assert len(text.splitlines()) == 2 + len(found["arms"]) + 1
    assert set(verdicts) == {arm["name"] for arm in found["arms"]}


def test_quantizing_loses_what_rounding_must(arms):
    import quantize

    lines = quantize.numerics([0], 64, 128)
    # 6.02 p + 7.4 dB for p significand bits, and two operands' noise together; 1.5 dB less is asked.
    floors = {"tensor": 30.0, "output": 27.0, "input gradient": 23.0, "weight gradient": 23.0}
    for line in lines:
        assert len(line["ours"]) == 1
        assert line["ours"][0] >= floors[line["result"]], line
    assert len(quantize.numerics_table(lines).splitlines()) == 2 + len(lines)
    recipes = {(line["recipe"], line["margin"]): line for line in quantize.delayed(8, 64)}
    assert min(recipes["current", 0]["sqnr"]) > 30.0
    assert max(recipes["current", 0]["saturated"]) == 0.0
    jump = recipes["most_recent", 0]["sqnr"][4]  # threefold from one step to the next
    assert jump < 20.0 < recipes["max", 1]["sqnr"][4]
    assert len(quantize.delayed_table(list(recipes.values())).splitlines()) == 2 + 4


def test_interval_is_that_of_order_statistics(arms):
    ones = [1.0] * 12
    ratio = arms.Ratio.of([float(i) for i in range(1, 13)], ones)
    # 12 pairs: P(fewer than 3 of 12 on one side) = (1 + 12 + 66) / 4096 = 0.019, twice that is below 0.05
    assert (ratio.median, ratio.low, ratio.high) == (6.5, 3.0, 10.0)
    assert [ratio.verdict(target) for target in (10.0, 9.0, 3.0, 2.9)] == ["PASS", *["within the spread"] * 2, "FAIL"]
    few = arms.Ratio.of([3.0, 1.0, 2.0], [1.0] * 3)
    assert (few.median, few.low, few.high) == (2.0, 1.0, 3.0)


def test_a_loop_that_dies_says_why(arms, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text("raise SystemExit('out of luck')")
    with (
        arms.Arm("dies", str(script), {"folder": str(tmp_path)}, sys.executable) as arm,
        pytest.raises(arms.ArmFailed, match="out of luck"),
    ):
        arm.turn(1)
