"""The benchmarks compare equal things: their figures are for people, and never asserted."""

# pyright: reportMissingImports=false
# (the folder of the benchmarks is put on the path below)

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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


# ------------------------------------------------------------------------------------------------ one accelerator

SECTIONS = ("bandwidth", "gemm", "attention", "kernels", "training", "graphs", "overhead", "conformance")


@pytest.mark.parametrize(
    "sections", [("bandwidth", "kernels"), pytest.param(SECTIONS, marks=pytest.mark.full)], ids=len
)
def test_the_program_for_an_accelerator_runs_through_in_miniature(sections, tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu" / "run.py"), "--tiny", "--backend", "cpu", "--out", str(tmp_path)]
    asked = ["--sections", ",".join(sections)]
    done = subprocess.run([*command, *asked], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("gpu-*-tiny-*.json")
    result = json.loads(path.read_text())
    assert result["device"]["backend"] == "cpu"
    assert tuple(result["sections"]) == SECTIONS
    for name, section in result["sections"].items():
        assert section["errors"] == [], name
        assert section["rows"] or section["left_out"], name
        assert all(entry["what"] and entry["why"] for entry in section["left_out"]), name
        assert (section["status"] == "measured") == (bool(section["rows"]) and not section["left_out"]), name
    text = path.with_suffix(".md").read_text()
    assert text.count("\n## ") == len(SECTIONS)
    assert "nobody's speed" in text
    fp8 = [row for row in result["sections"]["gemm"]["rows"] if row["kind"].startswith("fp8")]
    assert all(row["level"] == "emulated" for row in fp8)
    assert all(row["of_peak"] == "emulated" for row in fp8 if row["what"] == "product")
    assert all(row["sqnr_db"] > 20 for row in fp8 if row["what"] == "product")  # it was products that were timed
    others = [row for row in result["sections"]["attention"]["rows"] if not row["chosen"]]
    assert all(row["candidate"] == "reference" and row["sqnr_db"] > 40 for row in others)
    kernels = result["sections"]["kernels"]["rows"]
    assert {row["what"] for row in kernels} >= {"quantize row", "rms_norm", "cross_entropy, with gradient", "attention"}
    assert {row["candidate"] for row in kernels} >= {"copy", "reference"}
    assert all(row["floor_ms"] == "unknown" for row in kernels)  # nobody states the bandwidth of this host's memory
    assert text.count("fp8 tensor |") == 0  # it is called "fp8 tensor (emulated)"


def test_full_sizes_are_refused_without_an_accelerator(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu" / "run.py"), "--backend", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "an accelerator is what this measures" in done.stderr
    assert "--tiny" in done.stderr
    assert not list(tmp_path.iterdir())


HANGS = """
import signal, time
def measure(bench):
    bench.row(what="before")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
"""
BREAKS = """
def measure(bench):
    with bench.attempt("a part"):
        raise ValueError("no such luck")
    bench.row(what="after")
    raise RuntimeError("out of luck")
"""
DIES = """
import os
def measure(bench):
    print("a last word", flush=True)
    os._exit(3)
"""


@pytest.fixture
def section(arms, tmp_path, monkeypatch):
    """Runs the text of a module as a section, for so many seconds."""
    from gpu import run

    def of(text, seconds):
        (tmp_path / "gpu").mkdir()  # more of the same namespace package
        (tmp_path / "gpu" / "made_up.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
        monkeypatch.setattr(run, "END_S", 0.5)
        return run.Section("made_up", run.TINY, "cpu", seconds, tmp_path).run()

    return of


def test_a_section_that_hangs_is_ended_and_keeps_what_it_had(section, tmp_path, monkeypatch):
    from gpu import run

    wait, times = run._ends_within, []

    def until_it_hangs(process, seconds):
        """Its time is over as soon as it has said something, however slowly it starts here."""
        times.append(seconds)
        if len(times) > 1:
            return wait(process, seconds)
        while not (tmp_path / "made_up.jsonl").read_text().endswith("\n"):
            assert process.poll() is None
            time.sleep(0.1)
        return False

    monkeypatch.setattr(run, "_ends_within", until_it_hangs)
    found = section(HANGS, 600)
    assert len(times) == 2  # it was given time to end, which it did not use
    assert found["rows"] == [{"what": "before"}]
    assert found["left_out"] == [{"what": "what was to come after this", "why": "budget"}]
    assert found["status"] == "partly measured"


def test_a_section_that_raises_is_recorded_and_the_rest_of_it_goes_on(section):
    found = section(BREAKS, 120)
    assert found["rows"] == [{"what": "after"}]
    assert [(e["what"], e["error"]) for e in found["errors"]] == [
        ("a part", "ValueError: no such luck"),
        ("the section", "RuntimeError: out of luck"),
    ]
    assert all("Traceback" in error["traceback"] for error in found["errors"])


def test_a_section_whose_process_dies_says_how(section):
    found = section(DIES, 120)
    assert found["status"] == "error"
    (error,) = found["errors"]
    assert "exit code 3" in error["error"]
    assert "a last word" in error["traceback"]


class Marks:
    """Stands in for torch.cpu.Event: time that only the calls below let go by."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Marks.now

    def elapsed_time(self, other: "Marks") -> float:
        return other.at - self.at


def test_a_clock_reads_the_device_s_events(arms, monkeypatch):
    import torch
    from gpu.timing import Clock

    def call(milliseconds):
        Marks.now += milliseconds

    waited = []
    calls = [lambda ms=ms: call(ms) for ms in (1.0, 2.0, 5.0)]
    assert Clock("cpu", lambda: waited.append(1)).kind == "clock of the host"
    monkeypatch.setattr(torch.cpu, "Event", Marks)
    clock = Clock("cpu", lambda: waited.append(1))
    assert clock.kind == "events of the device"
    seconds, host = clock.times(calls)
    assert seconds == pytest.approx([1e-3, 2e-3, 5e-3])
    assert host is not None
    assert Marks.now == 5.0 + 8.0  # one before the first mark, so that the device is at work
    assert len(waited) == 2


def test_what_is_compared_takes_turns_in_reversed_order(arms):
    from gpu.timing import Clock, take_turns

    class MadeUp(Clock):
        heard = []

        def times(self, calls):
            self.heard.append(calls[0]())
            return [{"a": 0.01, "b": 0.02}[str(call())] for call in calls], None

    clock = MadeUp("cpu", lambda: None)
    found = take_turns(clock, {"a": [lambda: "a"], "b": [lambda: "b"]}, seconds=0.24, rounds=3)
    assert clock.heard[4:] == ["a", "b", "b", "a", "a", "b"]
    assert (found["a"].calls, found["b"].calls) == (4, 2)
    assert (found["a"].rounds, found["b"].rounds) == ((0.01,) * 3, (0.02,) * 3)


def test_fp8_is_what_the_chip_s_table_says(arms):
    from gpu.gemm import Shape, ways_of

    from accelbridge.backend import FULL, Capabilities, Chip, Limit, Support

    emulated = Support("emulated", "too young")
    format = "float8_e4m3fnuz"
    table = {
        ("quantize", format, "tensor"): FULL,
        ("scaled_mm", format, "tensor"): FULL,
        ("quantize", format, "row_pow2"): FULL,
        ("scaled_mm", format, "row_pow2"): Support("full", limits=(Limit("k", multiple=16),)),
        ("quantize", format, "mx_pow2"): FULL,
        ("scaled_mm", format, "mx_pow2"): emulated,
    }
    known = Capabilities(Chip("made up"), table, facts={"fp8.variant": "fnuz"})
    found = {way.name: way for way in ways_of(known, Shape("", "", 64, 64, 64))}
    assert {name: way.product.level for name, way in found.items()} == {
        "tensor": "full",
        "row": "full",
        "block": "unsupported",
        "mx": "emulated",
    }
    assert (found["row"].format, found["row"].scalings) == (format, ("row_pow2", "row_pow2"))
    assert "block1x128" in found["block"].product.reason
    odd = {way.name: way for way in ways_of(known, Shape("", "", 64, 64, 40))}
    assert odd["row"].product.level == "unsupported"
    none = ways_of(Capabilities(Chip("made up"), {}), Shape("", "", 64, 64, 64))
    assert {way.product.reason for way in none} == {"made up has no fp8 products"}


def test_a_floor_is_what_takes_longer_of_bytes_and_operations(arms):
    from gpu.kernels import Work

    from accelbridge.backend import Capabilities, Chip

    chip = Chip("made up", {"fp8": 1e12})
    bench: Any = argparse.Namespace(target=argparse.Namespace())
    bench.target.capabilities = Capabilities(chip, {}, facts={"memory.bandwidth": 10**9})
    for bytes_, flops, dtype, seconds in ((1e9, 0.0, "", 1.0), (1e9, 3e12, "fp8", 3.0), (4e9, 3e12, "fp8", 4.0)):
        assert Work("", "", bytes_, flops, dtype, tuple).floor_s(bench) == pytest.approx(seconds)
    assert Work("", "", 1e9, 1e9, "bfloat16", tuple).floor_s(bench) is None  # its peak is not known


@pytest.mark.parametrize("name", ["causal", "window", "segments"])
def test_pairs_are_those_that_the_mask_lets_through(arms, name):
    import torch
    from gpu import attention
    from gpu.sizes import TINY

    from accelbridge.ops import visible_keys

    bench: Any = argparse.Namespace(sizes=TINY, device=torch.device("cpu"))
    (case,) = [case for case in attention.cases(bench) if case.name == name]
    visible = visible_keys(case.mask, case.sequence, case.sequence, bench.device)
    assert visible is not None
    seen = visible.expand(case.batch, 1, -1, -1).sum((1, 2, 3)) if visible.ndim == 4 else visible.sum()
    assert set(seen.reshape(-1).tolist()) == {attention.pairs(case)}
    assert case.request.needs == {name, "causal", "gqa"}
