"""Attention, compiled ahead of time for chips that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.aot import SAMPLED, Case, Compiler, Target, check, parameters

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("target", "case"), parameters("flash"))
def test_it_compiles_or_is_declared_not_to(compiler: Compiler, target: Target, case: Case) -> None:
    check(compiler, target, case)


@pytest.mark.full
@pytest.mark.parametrize("chip", SAMPLED)
def test_launches_compile_as_they_are_called(chip: str, pytestconfig: pytest.Config) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"TRITON_CACHE_DIR": str(pytestconfig.cache.mkdir("triton")), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-m", "tests.kernels.flash_launches", chip]
    done = subprocess.run(run, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    launched = [line.split()[0] for line in done.stdout.splitlines()]
    calls = {"flash_forward": 5, "flash_delta": 5, "flash_backward_dq": 5, "flash_backward_dkdv": 5}
    assert {name: launched.count(name) for name in calls} == calls
    assert launched.count("document_spans") == 6
