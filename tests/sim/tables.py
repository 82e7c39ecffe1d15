"""The tables of GPUs that are not here, over the simulated device: what they make the trainer do, by the host's
arithmetic. Evidence for the trainer, and for no chip: every cell says "simulated"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

from accelbridge.backend import Capabilities, DeviceInfo, Matmul, Probe
from tests.sim.backend import CAPACITY, HpuSim, Plugin
from tests.sim.names import DEVICES

CHIPS = {
    "a100": "accelbridge_cuda",
    "h100": "accelbridge_cuda",
    "b200": "accelbridge_cuda",
    "mi250x": "accelbridge_rocm",
    "mi300x": "accelbridge_rocm",
    "mi355x": "accelbridge_rocm",
}


class TableSim(HpuSim):
    """The simulated device with the table of one GPU, and with none of its kernels."""

    gpu: ClassVar[str]
    facts: ClassVar[Any]
    """The module of the GPU's facts."""

    @classmethod
    def probe(cls) -> Probe:
        found = super().probe()
        label = f"simulated with the table of {cls.facts.CHIPS[cls.gpu]}"
        devices = tuple(DeviceInfo(index, label, CAPACITY) for index in range(DEVICES))
        return replace(found, devices=devices, software=cls.facts.usual_software(found.software["torch"]))

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        real = cls.facts.capabilities(cls.facts.CHIPS[cls.gpu], software)
        table = {key: replace(cell, reason=f"simulated: {cell.reason}".strip()) for key, cell in real.table.items()}
        return replace(real, chip=replace(real.chip, name=chip, peak_flops={}), table=table)

    @cached_property
    def matmul(self) -> Matmul:
        from accelbridge.portable.fp8 import EmulatedFp8

        return EmulatedFp8(self.name)


def _of(gpu: str) -> type[TableSim]:
    facts = import_module(f"{CHIPS[gpu]}.facts")
    return type(f"Sim_{gpu}", (TableSim,), {"name": f"sim-{gpu}", "gpu": gpu, "facts": facts})


TABLES = {gpu: _of(gpu) for gpu in CHIPS}
globals().update({f"{gpu}_plugin": Plugin(backend) for gpu, backend in TABLES.items()})
POINTS = {backend.name: f"{__name__}:{gpu}_plugin" for gpu, backend in TABLES.items()}
"""Entry points: name of the backend, and where its plugin is."""
