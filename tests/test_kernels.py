"""The tests of the kernels, in a process that does nothing else with triton: see tests/kernels."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kernels.table import named, read

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; install accelbridge[kernels]")
@pytest.mark.parametrize("what", ["not aot", "aot"])
def test_the_kernels(what: str) -> None:
    """Interpreted ones against their references, and a sample of what is compiled ahead of time."""
    command = [sys.executable, "-m", "pytest", "-m", "not full", "-k", what, "tests/kernels"]
    command += ["-o", "faulthandler_timeout=180"]  # says where a test hangs
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = run.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        run.kill()
        said, _ = run.communicate()
    assert run.returncode == 0, said[-8000:]


def test_the_table_is_of_these_kernels_and_tiles() -> None:
    """docs/kernels.md; ``make kernels`` writes it anew."""
    assert read() == named()
