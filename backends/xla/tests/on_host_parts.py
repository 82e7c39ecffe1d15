"""Device and collectives of :mod:`.on_host`, which need torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from accelbridge.backend import Lowering, World
from accelbridge.cpu.collectives import CPU_LOWERINGS
from accelbridge.portable import lowerings
from accelbridge.portable.collectives import TorchCollectives
from accelbridge.portable.lowerings import Call, Codec, Step, Transport, substitute
from accelbridge_xla.eager.device import TorchTpuDevice
from accelbridge_xla.eager.host import LIBRARY_VARIABLE
from backends.xla.tests.on_host import alone, plugin_library


class OnHostDevice(TorchTpuDevice):
    """``tpu:0`` in every process, each of which the runtime takes for the only one."""

    def bind(self, world: World) -> torch.device:
        from torch_tpu._internal.utils import hardware  # pyright: ignore[reportMissingImports]

        hardware.get_tpu_device_count = lambda: 1
        with alone():
            return super().bind(World())


_ON_HOST = Codec(
    wants=lambda t: t.device.type == "tpu",
    encode=lambda t: t.detach().cpu(),
    allocate=lambda t: torch.empty(t.shape, dtype=t.dtype),
    decode=lambda buffer, t: _back(buffer, t),
)


def _back(buffer: Tensor, t: Tensor) -> None:
    t.copy_(buffer)


def host_staged(call: Call, transport: Transport) -> Step | None:
    """Tensors of the device -> copies in the host's memory, written back."""
    return substitute(call, transport.rank, _ON_HOST)


_STAGING = Lowering("host_staged", "tensors of the device", "copies in the host's memory", "there is no tpu_dist here")


class HostStagedCollectives(TorchCollectives):
    """gloo for both kinds of tensors, with what it takes to be right (see accelbridge/cpu/collectives.py)."""

    def __init__(self) -> None:
        if "host_staged" not in lowerings.LIBRARY:
            after = dict(lowerings.LIBRARY)
            lowerings.LIBRARY.clear()
            lowerings.LIBRARY.update({"host_staged": host_staged, **after})
        super().__init__("cpu:gloo,tpu:gloo", (_STAGING, *CPU_LOWERINGS))
        self.library = "gloo, staged through the host (simulated)"

    def environment(self, world: World) -> Mapping[str, str]:
        return {"GLOO_SOCKET_IFNAME": "lo", "TF_CPP_MIN_LOG_LEVEL": "3", LIBRARY_VARIABLE: str(plugin_library())}
