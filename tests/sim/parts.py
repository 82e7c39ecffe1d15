"""Where the simulated backend differs from the portable interfaces."""

from __future__ import annotations

import torch

from accelbridge.backend import World
from accelbridge.portable.collectives import TorchCollectives
from accelbridge.portable.device import TorchDevice
from tests.sim.device import install
from tests.sim.names import DEVICES, LIBRARY


class SimDevice(TorchDevice):
    """Binding installs the device; before that, nothing of it exists in this process."""

    def count(self) -> int:
        return DEVICES

    def bind(self, world: World) -> torch.device:
        install(self.type)
        return super().bind(world)


class SimCollectives(TorchCollectives):
    """The collective library, by name."""

    library = LIBRARY
