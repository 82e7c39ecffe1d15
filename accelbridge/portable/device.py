"""Any device that has an ordinary ``torch.<type>`` module."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from accelbridge.backend import Device, World


class TorchDevice(Device):
    """Device written on ``torch.get_device_module(type)``; a vendor overrides what its module does otherwise."""

    def __init__(self, type: str) -> None:
        self.type = type

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.type)

    def count(self) -> int:
        return int(self._module.device_count())

    def bind(self, world: World) -> torch.device:
        self._module.set_device(world.local_rank)
        return torch.device(self.type, world.local_rank)

    def synchronize(self) -> None:
        self._module.synchronize()

    def memory(self) -> Mapping[str, int | None]:
        module = self._module
        free_total = module.mem_get_info()
        return {
            "allocated": module.memory_allocated(),
            "peak": module.max_memory_allocated(),
            "total": free_total[1],
        }

    def reset_peak_memory(self) -> None:
        # Where the module keeps no peak, memory() says so; nothing is to be reset.
        reset = getattr(self._module, "reset_peak_memory_stats", None)
        if reset is not None:
            reset()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or super().is_out_of_memory(error)

    def seed(self, seed: int) -> None:
        torch.manual_seed(_host_seed(seed))  # the host's generator, and those of devices that torch knows of
        seed_device = getattr(self._module, "manual_seed_all", None)
        if seed_device is not None:
            seed_device(seed)

    def rng_state(self) -> Mapping[str, Tensor]:
        state = {"host": torch.get_rng_state()}
        if self.type != "cpu":
            state["device"] = self._module.get_rng_state()
        return state

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(state["host"])
        if "device" in state:
            self._module.set_rng_state(state["device"])


def _host_seed(seed: int) -> int:
    """``seed``, with what it has above bit 31 folded in: of torch's seeds the host's generator, a Mersenne Twister,
    takes 32 bits (torch 2.13: 1 and 2**32 + 1 gave the same stream)."""
    if seed < 2**32:
        return seed
    return int.from_bytes(blake2b(seed.to_bytes(16, "little"), digest_size=4).digest(), "little")
