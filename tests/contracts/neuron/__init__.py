"""A double of AWS's torch_neuronx (native, Neuron 2.33), over the simulated device: what its documents show, no more.

``site`` puts the package, the metadata of its distribution and a neuron-ls on the paths of new processes. Facts are in
tests/contracts/neuron.toml; what only an unofficial mirror shows is labelled "second hand" there.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

from accelbridge.hookspecs import ENTRY_POINT_GROUP

PACKAGE = Path(__file__).parent / "site"
CORES = 4
"""Logical cores of the double's one chip."""


def site(folder: Path, chip: str = "trn2", sdk: str = "") -> Path:
    """A host with one ``chip`` and the SDK, version ``sdk`` (absent: that of the installed torch), in ``folder``."""
    release = ".".join(version("torch").split("+")[0].split(".")[:2])
    _metadata(folder / "site" / "torch_neuronx-0.dist-info", "torch-neuronx", sdk or f"{release}.3.0")
    backend = folder / "site" / "accelbridge_neuron-0.dist-info"
    if "neuron" not in {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}:
        _metadata(backend, "accelbridge-neuron", "0")
        (backend / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nneuron = accelbridge_neuron\n")
    name = {"trn1": "Trainium1", "trn2": "Trainium2", "trn3": "Trainium3"}[chip]
    tree = folder / "root" / "sys/devices/virtual/neuron_device/neuron0/info/architecture"
    tree.mkdir(parents=True, exist_ok=True)
    (tree / "device_name").write_text(f"{name}\n")
    lister = folder / "root/opt/aws/neuron/bin/neuron-ls"
    lister.parent.mkdir(parents=True, exist_ok=True)
    listing = [
        {
            "neuron_device": 0,
            "bdf": "00:00.0",
            "nc_count": CORES,
            "logical_neuroncore_config": 2,
            "memory_size": 96 << 30,
            "neuroncore_ids": list(range(CORES)),
            "neuron_processes": [],
        }
    ]
    lister.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(listing)}\nEND\n")
    lister.chmod(0o755)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """What new processes on the host of :func:`site` are started with; sitecustomize, in the double's folder, shows
    them that host in the place of this one."""
    root = Path(__file__).parents[3]
    path = [folder / "site", PACKAGE, root, root / "backends/neuron"]
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {
        "PYTHONPATH": os.pathsep.join([*map(str, path), *rest]),
        "ACCELBRIDGE_PROBE_SECONDS": "60",
        "NEURON_DOUBLE_ROOT": str(folder / "root"),
    }


def enter(folder: Path) -> None:
    """Make this process, which has started already, one on the host of :func:`site`."""
    from accelbridge_neuron import driver

    found = environment(folder)
    sys.path[:0] = [part for part in found["PYTHONPATH"].split(os.pathsep) if part not in sys.path]
    os.environ |= found
    driver.ROOT = Path(found["NEURON_DOUBLE_ROOT"])


def _metadata(info: Path, name: str, number: str) -> None:
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
