"""Where the simulated backend differs from the portable interfaces."""

from __future__ import annotations

from functools import cache

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

    def launches(self) -> int:
        native = install(self.type).native
        return sum(native.calls(name) for name in _kernels())


@cache
def _kernels() -> tuple[str, ...]:
    """Every op that the device may be asked to run; it counts calls by these names."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return tuple(sorted(name for name in names if name.startswith("aten::")))


class SimCollectives(TorchCollectives):
    """The collective library, by name."""

    library = LIBRARY
