"""The tables of GPUs that are not here, over the simulated device: what they make the trainer do, by the host's
arithmetic. Evidence for the trainer, and for no chip: every cell says "simulated"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

from accelbridge.backend import Capabilities, DeviceInfo, Matmul, Probe, unsupported
from accelbridge.portable.described import DescribedBackend
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
    real: ClassVar[type[DescribedBackend]]
    """The GPU's backend."""

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
        none = unsupported("the simulated device has no graphs")
        return replace(real, chip=replace(real.chip, name=chip, peak_flops={}), table=table, capture=none)

    @cached_property
    def matmul(self) -> Matmul:
        from tests.sim.products import TableProducts

        backend = self.real()
        backend.host = self.real.assume(self.gpu, 1, {})
        return TableProducts(self.name, backend.here.table, backend.conventions(public=True))


def _of(gpu: str) -> type[TableSim]:
    facts = import_module(f"{CHIPS[gpu]}.facts")
    real = import_module(CHIPS[gpu]).accelbridge_backend()
    return type(f"Sim_{gpu}", (TableSim,), {"name": f"sim-{gpu}", "gpu": gpu, "facts": facts, "real": real})


TABLES = {gpu: _of(gpu) for gpu in CHIPS}
globals().update({f"{gpu}_plugin": Plugin(backend) for gpu, backend in TABLES.items()})
POINTS = {backend.name: f"{__name__}:{gpu}_plugin" for gpu, backend in TABLES.items()}
"""Entry points: name of the backend, and where its plugin is."""
