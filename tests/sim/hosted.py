"""A backend that is not what it says: its device is the simulated one, its products are made on the host."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from accelbridge.backend import Matmul
from accelbridge.hookspecs import ENTRY_POINT_GROUP
from accelbridge.portable.matmul import PortableMatmul
from tests.sim.backend import AcmeSim, Plugin


class _OnTheHost(PortableMatmul):
    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return super().matmul(a.cpu(), b.cpu(), out_dtype).to(a.device)


class HostedSim(AcmeSim):
    """Right in every bit, and on the device in name only."""

    name: ClassVar[str] = "sim-hosted"

    @cached_property
    def matmul(self) -> Matmul:
        return _OnTheHost(self.name)


plugin = Plugin(HostedSim)


def add_to(site: Path) -> None:
    """Metadata of a distribution that provides it, in a folder on the import path."""
    info = site / "accelbridge_sim_hosted-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelbridge-sim-hosted\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nsim-hosted = {__name__}:plugin\n")
