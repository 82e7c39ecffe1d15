"""Process groups of a library on the device itself, with torch's flight recorder beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelbridge.backend import Lowering, World
from accelbridge.portable.collectives import TorchCollectives
from accelbridge.portable.recorder import read

SPARE_S = 30.0
"""How much later than ours the library's own time limit runs out: it aborts processes, ours names the ranks first."""


class RecordedCollectives(TorchCollectives):
    """Groups over device tensors by one library and over host tensors by gloo, made for the device that the process is
    bound to. ``recorders`` are the functions by which torch tells what it has recorded
    (:func:`accelbridge.portable.recorder.read`)."""

    def __init__(
        self, device_type: str, backend: str, library: str, lowerings: Sequence[Lowering], recorders: Sequence[str]
    ) -> None:
        super().__init__(f"cpu:gloo,{device_type}:{backend}", lowerings)
        self.library = library
        self._device_type, self._recorders = device_type, tuple(recorders)

    def environment(self, world: World) -> Mapping[str, str]:
        """A run that stays on one host keeps its host traffic on the loopback interface."""
        return {"GLOO_SOCKET_IFNAME": "lo"} if world.local_size == world.size else {}

    def init_arguments(self, world: World) -> Mapping[str, Any]:
        """The device that is bound, by which the library connects at once instead of guessing later."""
        index = torch.get_device_module(self._device_type).current_device()
        return {"device_id": torch.device(self._device_type, index)}

    def init(self, store: dist.Store, world: World, timeout_s: float, check: bool) -> None:
        super().init(store, world, timeout_s + SPARE_S, check)

    def trace(self) -> Sequence[Mapping[str, Any]]:
        return read(self._recorders)
