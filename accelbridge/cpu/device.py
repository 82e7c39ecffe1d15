"""The CPU as a device: processes share its cores and memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil
import torch

from accelbridge.backend import World
from accelbridge.cpu.backend import cores, device_count
from accelbridge.portable.device import TorchDevice


class CpuDevice(TorchDevice):
    """Index-free ``cpu`` device; binding shares the cores out among the processes of the host."""

    def __init__(self, devices: int | None = None) -> None:
        super().__init__("cpu")
        self._devices = devices

    def count(self) -> int:
        return device_count(self._devices)

    def bind(self, world: World) -> torch.device:
        # The user's own OMP_NUM_THREADS wins; a launcher's default of 1 is fine too.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, cores() // world.local_size))
        return torch.device("cpu")

    def memory(self) -> Mapping[str, int | None]:
        process = psutil.Process().memory_info()
        peak = _peak_resident_bytes()
        return {"allocated": process.rss, "peak": peak, "total": psutil.virtual_memory().total}


def _peak_resident_bytes() -> int | None:
    """Highest resident size of this process so far, where the operating system keeps it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024  # bytes on macOS, KiB on Linux (getrusage(2))
