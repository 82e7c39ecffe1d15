"""What torch_xla 2.9.0 does wrong in silence, or ends the process by: seen as it is, and refused where we are asked.

A trap that is mended in a later torch_xla fails here too, so that its guard can go.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelbridge_xla import hardware, traps
from accelbridge_xla.backend import XlaBackend
from backends.xla.tests import environment

HERE = Path(__file__).parent
PART = [float(n) for n in range(8)]
"""What the devices held: a sum over them would be 12, 16 on each."""


def run(folder: Path, name: str, how: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and what became of the trap."""
    command = [sys.executable, str(HERE / "traps_worker.py"), name, how]
    env = environment.environment(folder / "site")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}


@environment.needs_torch_xla
@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_collective_of_torch_xla_is_none_and_a_model_with_one_is_refused(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, name, "bare") == (0, {"values": PART})  # no error, and nothing was reduced or gathered
    code, found = run(tmp_path, name, "guarded")
    assert (code, found["error"]) == (0, "ConfigError")
    assert f"calls xla_model.{name} in " in found["text"]
    assert "traps_worker.py:" in found["text"]


@environment.needs_torch_xla
def test_a_grouped_product_ends_the_process_and_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, "grouped_mm", "bare") == (-11, {})  # SIGSEGV
    code, found = run(tmp_path, "grouped_mm", "guarded")
    assert (code, found["error"]) == (0, "Unsupported")
    assert found["text"].startswith("torch._grouped_mm asked of a tensor on XLA devices; torch_xla 2.9.0 ends the")


@environment.needs_torch_xla
def test_host_placement_fails_on_virtual_devices_and_is_refused(tmp_path: Path) -> None:
    code, found = run(tmp_path, "place_to_host", "bare")
    assert code == -11 or "RET_CHECK" in found["text"]  # without annotations, or with them
    code, found = run(tmp_path, "place_to_host", "guarded")
    assert (code, found["error"]) == (0, "Unsupported")
    assert found["text"].startswith("place_to_host asked of a tensor on XLA devices; XLA's CPU client has one memory")


@environment.needs_torch_xla
def test_a_cast_to_8_bits_does_not_saturate_and_none_is_made(tmp_path: Path) -> None:
    code, found = run(tmp_path, "cast", "bare")
    assert (code, found["values"]) == (0, [0.0] + [-1.0] * 7)  # NaN is shown as -1; 448 is the largest number
    code, found = run(tmp_path, "cast", "guarded")
    assert (code, found["error"]) == (0, "Unsupported")


@environment.needs_torch_xla
def test_the_device_has_no_generators_which_is_stated(tmp_path: Path) -> None:
    code, found = run(tmp_path, "generator", "bare")
    assert (code, found["error"]) == (0, "RuntimeError")
    assert not XlaBackend.capabilities(hardware.VIRTUAL, {}).generators


@pytest.mark.parametrize("chip", ["TPU v6e", hardware.VIRTUAL])
def test_nothing_in_8_bits_is_claimed(chip: str) -> None:
    table = XlaBackend.capabilities(chip, {}).table
    assert not any(support for (op, _, _), support in table.items() if op in ("quantize", "scaled_mm"))


def test_averages_are_sums_that_are_divided() -> None:
    """XLA reduces no averages (``xm`` has no REDUCE_AVG); that they are right is COL-003 of the conformance suite."""
    table = XlaBackend.capabilities("TPU v6e", {}).table
    assert {table[op, "float32", "avg"].level for op in ("all_reduce", "reduce_scatter")} == {"emulated"}


def test_the_backend_itself_calls_no_trap() -> None:
    """Of the torch_xla runtime: the TorchTPU runtime, in a folder of its own, has collectives that are."""
    traps_ = traps.COLLECTIVES | {"_grouped_mm", "place_to_host", "place_to_device", "enable_manual_sharding"}
    package = Path(traps.__file__).parent
    files = [path for path in package.rglob("*.py") if "eager" not in path.relative_to(package).parts]
    assert len(files) > 10
    named = {
        f"{path.name}: {name}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if (name := getattr(node, "attr", getattr(node, "id", ""))) in traps_
    }
    assert not named
