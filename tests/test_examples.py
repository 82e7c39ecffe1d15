"""The examples run as their own text says, alone and under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelbridge.checkpoint.manifest import complete
from tests import cli

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr=127.0.0.1",
    "--nproc-per-node=2",
]
ALONE = [sys.executable]


def run(launcher: list[str], name: str, output: Path) -> str:
    done = subprocess.run(
        [*launcher, str(EXAMPLES / name), str(output)],
        capture_output=True,
        text=True,
        env=cli.environment(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("launcher", [ALONE, TORCHRUN], ids=["alone", "torchrun"])
def test_own_module(launcher: list[str], tmp_path: Path) -> None:
    printed = run(launcher, "own_module.py", tmp_path)
    assert "outside the plan, as plain torch modules: Embedding, Linear" in printed
    steps = cli.steps_of(tmp_path)
    assert steps[1]["loss"] > 4.0
    assert steps[60]["loss"] < 0.5
    assert [p.name for p in complete(tmp_path / "checkpoints")] == ["step_60"]


@pytest.mark.parametrize("launcher", [ALONE, TORCHRUN], ids=["alone", "torchrun"])
def test_own_loop(launcher: list[str], tmp_path: Path) -> None:
    printed = run(launcher, "own_loop.py", tmp_path)
    first, last = (float(value) for value in re.findall(r"loss (\S+)", printed))
    assert last < 0.5 * first
    assert [p.name for p in complete(tmp_path)] == ["step_100"]
