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


def run(launcher: list[str], name: str, output: Path, *options: str) -> str:
    done = subprocess.run(
        [*launcher, str(EXAMPLES / name), str(output), *options],
        capture_output=True,
        text=True,
        env=cli.environment(),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "lines"), [("own_module.py", 40), ("hf_model.py", 40), ("own_loop.py", 60)])
def test_examples_are_short_and_name_no_vendor(name: str, lines: int) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < lines
    assert not re.search(r"cuda|nccl|hpu|hccl|neuron|xla|rocm|gloo", text, re.IGNORECASE)


@pytest.mark.parametrize(
    ("launcher", "options", "layout"),
    [(ALONE, (), "1 device"), (TORCHRUN, (), "dp_shard 2, ZeRO 3"), (TORCHRUN, ("2",), "tp 2")],
    ids=["alone", "sharded", "split"],
)
def test_own_module(launcher: list[str], options: tuple[str, ...], layout: str, tmp_path: Path) -> None:
    printed = run(launcher, "own_module.py", tmp_path, *options)
    assert f"  {layout};" in printed
    assert "outside the plan, as plain torch modules: Embedding, Linear, ReLU" in printed
    steps = cli.steps_of(tmp_path)
    assert steps[1]["loss"] > 4.0
    assert steps[60]["loss"] < 0.05
    assert [p.name for p in complete(tmp_path / "checkpoints")] == ["step_60"]


def test_hf_model(tmp_path: Path) -> None:
    """Alone and split by its ``_tp_plan``: the same numbers, on a file's bytes and on those made up."""
    text = tmp_path / "text"
    text.write_bytes(bytes(i * i % 251 for i in range(10_000)))  # as the example makes them
    run(ALONE, "hf_model.py", tmp_path / "alone", "--text", str(text))
    printed = run(TORCHRUN, "hf_model.py", tmp_path / "split", "--tp", "2")
    assert "  tp 2;" in printed
    assert "vocab_parallel_cross_entropy" in printed
    alone, split = (cli.steps_of(tmp_path / name) for name in ("alone", "split"))
    assert alone[1]["loss"] > 5.0
    assert alone[24]["loss"] < 0.7 * alone[1]["loss"]
    for step in (1, 2, 3):
        assert split[step]["loss"] == pytest.approx(alone[step]["loss"], rel=1e-5)


@pytest.mark.parametrize("launcher", [ALONE, TORCHRUN], ids=["alone", "torchrun"])
def test_own_loop(launcher: list[str], tmp_path: Path) -> None:
    printed = run(launcher, "own_loop.py", tmp_path)
    first, last = (float(value) for value in re.findall(r"loss (\S+)", printed))
    assert last < 0.5 * first
    assert [p.name for p in complete(tmp_path)] == ["step_100"]
