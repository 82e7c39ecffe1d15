"""How the tests start processes that see the XLA backend on virtual CPU devices."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from accelbridge.hookspecs import ENTRY_POINT_GROUP

XLA = Path(__file__).parent.parent
ROOT = XLA.parent.parent
NAMES = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "ACCELBRIDGE_BACKEND", "RANK", "WORLD_SIZE")

needs_torch_xla = pytest.mark.skipif(
    find_spec("torch_xla") is None, reason="torch_xla is not installed here; make test-xla makes an environment with it"
)


def environment(site: Path, devices: int = 4) -> dict[str, str]:
    """Ours, with ``devices`` virtual devices, and with the entry point where the installation lacks it (as it does
    until it is installed again)."""
    path = [str(ROOT), str(XLA)]
    if not entry_points(group=ENTRY_POINT_GROUP, name="xla"):
        info = site / "accelbridge_xla-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelbridge-xla\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nxla = accelbridge_xla\n")
        path.append(str(site))
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "ACCELBRIDGE_PROBE_SECONDS": "60"}
    path += filter(None, [os.environ.get("PYTHONPATH")])  # the caller's, after ours
    return clean | variables | {"PYTHONPATH": os.pathsep.join(path)}


def python(*args: str | Path, env: dict[str, str], timeout: float = 900) -> str:
    """Standard output of ``python ARGS``, run to its end."""
    done = subprocess.run(
        [sys.executable, *map(str, args)], env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
