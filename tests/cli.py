"""Running the command line as a user does, and a small token store to train on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil

ACCELBRIDGE = [sys.executable, "-m", "accelbridge"]
TINY_MODEL = {"vocab_size": 257, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64}


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher or an earlier test left in it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELBRIDGE_", "TORCHELASTIC_", "SLURM_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        clean.pop(name, None)
    return clean | {"OMP_NUM_THREADS": "1"} | extra


def run(*args: str, timeout: float = 120, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """``accelbridge ARGS``, to its end."""
    return subprocess.run(
        [*ACCELBRIDGE, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=environment(**env),
        check=False,
    )


def start(*args: str, output: IO[str] | None = None, **env: str) -> subprocess.Popen[str]:
    """``accelbridge ARGS`` in a process group of its own, so that a test can kill all of it. What it says goes to
    ``output``, or to a pipe."""
    return subprocess.Popen(
        [*ACCELBRIDGE, *args],
        stdout=output or subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**env),
        start_new_session=True,
    )


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a launcher and all its ranks (which an agent puts into sessions of their own)."""
    root = psutil.Process(process.pid)
    for victim in [*root.children(recursive=True), root]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait()


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll every 10 ms; AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.01)


def build_store(out: Path) -> Path:
    """Token stores (train, validation) made from this package's own source."""
    package = Path(__file__).parent.parent / "accelbridge"
    done = run("data", "build", str(package), str(out), "--suffix", ".py", "--validation-fraction", "0.1")
    assert done.returncode == 0, done.stderr
    return out


def recipe(output: Path, store: Path, /, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A small recipe; ``sections`` are merged into it."""
    recipe: dict[str, dict[str, Any]] = {
        "model": dict(TINY_MODEL),
        "data": {"train": str(store / "train")},
        "train": {"steps": 20, "seq_len": 32, "global_batch_size": 8, "seed": 7},
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "metrics": {"interval": 5},
        "output": {"dir": str(output)},
    }
    for name, values in sections.items():
        recipe.setdefault(name, {}).update(values)
    return recipe


def write_recipe(path: Path, store: Path, /, **sections: dict[str, Any]) -> Path:
    """The same as a file (JSON is YAML) whose output is ``run-<stem>`` beside it."""
    path.write_text(json.dumps(recipe(path.parent / f"run-{path.stem}", store, **sections), indent=1))
    return path


def lines_of(output: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics, events included."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def steps_of(output: Path) -> dict[int, dict[str, Any]]:
    """Step lines of a run's metrics by step."""
    return {line["step"]: line for line in lines_of(output) if "event" not in line}
