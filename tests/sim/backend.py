"""The simulated device as an accelbridge backend; everything that it claims is labelled "simulated".

``site`` writes the metadata of a distribution that provides it, which is how any backend is found: with that
folder on the import path, ``backend.name: sim-hpu`` and ``sim-acme`` work like a vendor's. Like a vendor's, it can
be probed, in a process of its own, without importing torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

from accelbridge.backend import (
    Backend,
    Capabilities,
    Chip,
    Collectives,
    Device,
    DeviceInfo,
    Probe,
    Support,
    unsupported,
)
from accelbridge.hookspecs import ENTRY_POINT_GROUP, hookimpl
from tests.sim.names import DEVICES, HPU, LIBRARY, RENAMED

FLOATS = ("float32", "float64", "bfloat16", "float16")
OPS = (
    "linear",
    "attention",
    "embedding",
    "rms_norm",
    "rope",
    "swiglu",
    "cross_entropy",
    "dropout",
    "vocab_parallel_cross_entropy",
    "adamw",
)
MOVES = ("all_gather", "broadcast", "all_to_all")
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
CAPACITY = 8 << 30


class SimBackend(Backend):
    """What both keys share. A backend has one device type, so each key is a class of its own."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    accelerator: ClassVar[bool] = True

    @classmethod
    def probe(cls) -> Probe:
        devices = tuple(DeviceInfo(index, f"simulated-{cls.device_type}", CAPACITY) for index in range(DEVICES))
        return Probe(True, "simulated on the host; no evidence for any chip", devices, {"torch": version("torch")})

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        return Capabilities(chip=Chip(chip, memory_bytes=CAPACITY), table=_table())

    @cached_property
    def device(self) -> Device:
        from tests.sim.parts import SimDevice

        return SimDevice(self.device_type)

    @cached_property
    def collectives(self) -> Collectives:
        from tests.sim.parts import SimCollectives

        return SimCollectives(self.process_group)


class HpuSim(SimBackend):
    """On torch's own HPU key."""

    name: ClassVar[str] = "sim-hpu"
    device_type: ClassVar[str] = HPU
    process_group: ClassVar[str] = f"cpu:gloo,{HPU}:{LIBRARY}"


class AcmeSim(SimBackend):
    """On PrivateUse1 under a name of its own."""

    name: ClassVar[str] = "sim-acme"
    device_type: ClassVar[str] = RENAMED
    process_group: ClassVar[str] = f"cpu:gloo,{RENAMED}:{LIBRARY}"


BACKENDS: dict[str, type[SimBackend]] = {HPU: HpuSim, RENAMED: AcmeSim}


class Plugin:
    """The module that an entry point would name, as an object: one hook per class."""

    def __init__(self, backend: type[SimBackend]) -> None:
        self._backend = backend

    @hookimpl
    def accelbridge_backend(self) -> type[Backend]:
        return self._backend


hpu_plugin = Plugin(HpuSim)
acme_plugin = Plugin(AcmeSim)


def environment(folder: Path) -> dict[str, str]:
    """What makes the simulated backends found, whose :func:`site` is ``folder / "site"``."""
    repository = Path(__file__).parents[2]
    # A backend from outside the core is probed in a process of its own, which may be slow on a busy machine.
    path = [str(folder / "site"), str(repository), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "ACCELBRIDGE_PROBE_SECONDS": "60"}


def site(folder: Path, more: Mapping[str, str] | None = None) -> Path:
    """Metadata of a distribution with both backends, and ``more`` (name -> "module:plugin"), in ``folder``, which goes
    on the import path."""
    info = folder / "accelbridge_sim-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelbridge-sim\nVersion: 0\n")
    points = {"sim-hpu": f"{__name__}:hpu_plugin", "sim-acme": f"{__name__}:acme_plugin", **(more or {})}
    lines = [f"{name} = {plugin}" for name, plugin in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines, ""]))
    return folder


def _table() -> dict[tuple[str, str, str], Support]:
    """Whatever the host computes, the device does. Each cell is emulated, and says by what."""
    ours = Support("emulated", "simulated: the host's kernels")
    table: dict[tuple[str, str, str], Support] = {}
    for dtype in FLOATS:
        table |= {(op, dtype, ""): ours for op in (*OPS, *MOVES)}
        table |= {(op, dtype, kind): ours for op in REDUCTIONS for kind in ("sum", "avg", "min", "max")}
    table["scaled_mm", "float8_e4m3fn", ""] = unsupported("simulated: no fp8 arithmetic")
    return table
