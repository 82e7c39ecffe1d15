"""What the driver and neuron-ls show of a host, read without the SDK and without opening a device.

Sources: the driver's tree /sys/devices/virtual/neuron_device/neuron*/info/architecture/device_name (Neuron Sysfs user
guide; driver 2.31 moved other nodes), and ``neuron-ls --json-output`` (Neuron LS user guide; its fields as users have
published them: neuron_device, nc_count, memory_size, neuron_processes and, from trn2 on, logical_neuroncore_config).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLASS = "sys/devices/virtual/neuron_device"
MODULE = "sys/module/neuron"
LISTER = "opt/aws/neuron/bin/neuron-ls"
VISIBLE = "NEURON_RT_VISIBLE_CORES"
SECONDS = 20.0
ROOT = Path("/")
"""Where the file system begins that is read; tests lay out others."""


@dataclass(frozen=True)
class Reading:
    """What was found; judged in :mod:`.host`."""

    module: bool
    """Whether the kernel has the driver."""
    names: Mapping[int, str]
    """Device number -> the driver's device_name ("Trainium2"); "" where it cannot be read."""
    listing: tuple[Mapping[str, Any], ...] | None = None
    """What neuron-ls prints; None where it could not be asked."""
    lister: str = ""
    """Why it could not be asked, with its own words."""


def read(root: Path | None = None) -> Reading:
    """Of the file system below ``root`` (absent: :data:`ROOT`). Never raises."""
    root = root or ROOT
    names = {}
    for folder in (root / CLASS).glob("neuron*"):
        number = folder.name.removeprefix("neuron")
        if number.isdigit():
            names[int(number)] = _text(folder / "info" / "architecture" / "device_name")
    module = bool(names) or (root / MODULE).exists()
    listing, why = _listing(root) if names else (None, "")
    return Reading(module, dict(sorted(names.items())), listing, why)


def _listing(root: Path) -> tuple[tuple[Mapping[str, Any], ...] | None, str]:
    installed = root / LISTER
    tool = str(installed) if installed.exists() else shutil.which("neuron-ls")
    if tool is None:
        return None, "neuron-ls is not installed (aws-neuronx-tools)"
    try:
        done = subprocess.run([tool, "--json-output"], capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return None, f"neuron-ls: {e}"
    if done.returncode:
        return None, f"neuron-ls ended with {done.returncode}: {(done.stderr or done.stdout).strip()[:300]}"
    return parse(done.stdout)


def parse(text: str) -> tuple[tuple[Mapping[str, Any], ...] | None, str]:
    """The devices that ``neuron-ls --json-output`` printed, or why that is none."""
    try:
        found = json.loads(text)
    except ValueError as e:
        return None, f"neuron-ls printed no JSON: {e}"
    if not isinstance(found, list) or not all(isinstance(each, dict) and "neuron_device" in each for each in found):
        return None, "neuron-ls printed JSON of another form"
    return tuple(found), ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def visible_cores(environment: Mapping[str, str] = os.environ) -> str:
    """NEURON_RT_VISIBLE_CORES, "" where it is not set."""
    return environment.get(VISIBLE, "").strip()
