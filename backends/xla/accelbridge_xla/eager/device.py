"""The device of a process: one TPU device, which it holds for its life."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accelbridge.backend import Probe, World
from accelbridge.errors import BackendError
from accelbridge.portable.device import TorchDevice
from accelbridge_xla.eager.collectives import SLICE
from accelbridge_xla.eager.vendor import load, tpu


class TorchTpuDevice(TorchDevice):
    """``tpu:N``, where N is what the runtime gave this process: it is bound when it opens its device, and to no other.

    Of ``torch.tpu``, what has an equivalent in ``torch.accelerator`` raises where anybody but torch calls it (torch_tpu
    0.2.0, internal_or_experimental), so the latter is called.
    """

    def __init__(self, probe: Callable[[], Probe]) -> None:
        super().__init__("tpu")
        self._probe = probe

    def count(self) -> int:
        return len(self._probe().devices)

    def bind(self, world: World) -> torch.device:
        """Open this process's device. Raises BackendError where there is none, or it cannot be opened."""
        if world.local_rank >= (seen := self.count()):
            raise BackendError(
                f"asked: a device for local rank {world.local_rank} of {world.local_size}; found: "
                f"{f'{seen} here' if seen else self._probe().reason}; do: start at most as many ranks as there are "
                "devices"
            )
        if world.size > 1 and (absent := [name for name in SLICE if name not in os.environ]):
            raise BackendError(
                f"asked: {world.size} processes on TPUs; found: {' and '.join(absent)} not set, which all of them must "
                "share; do: start them with 'accelbridge train --nproc N', or call "
                "torch.tpu.distributed.set_tpu_launch_env() in what starts them"
            )
        load()
        # Otherwise products of float32 are rounded to bfloat16.
        torch.set_float32_matmul_precision("highest")
        return self._open()

    def _open(self) -> torch.device:
        try:
            torch.zeros(1, device=self.type)
            torch.accelerator.synchronize()
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise BackendError(
                f"asked: a TPU for this process; found: it cannot be opened ({first}); do: see whether another process "
                "holds it, and that libtpu suits the chip"
            ) from error
        return torch.device(self.type, torch.accelerator.current_device_index())

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def memory(self) -> Mapping[str, int | None]:
        """See the interface. A runtime that counts nothing answers 0, also of a device with tensors on it."""
        peak = torch.accelerator.max_memory_allocated()
        if not peak:
            return {"allocated": None, "peak": None, "total": None}
        total = tpu().get_device_properties(torch.accelerator.current_device_index()).total_memory
        return {"allocated": torch.accelerator.memory_allocated(), "peak": peak, "total": total or None}

    def reset_peak_memory(self) -> None:
        return None  # the runtime keeps one peak for the life of the process

    def is_out_of_memory(self, error: BaseException) -> bool:
        told = any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "Out of memory allocating"))  # XLA's status
        return (isinstance(error, RuntimeError) and told) or super().is_out_of_memory(error)

    def rng_state(self) -> Mapping[str, Tensor]:
        return {"host": torch.get_rng_state(), "device": self._generator.get_state().cpu()}

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(state["host"])
        self._generator.set_state(state["device"])

    @property
    def _generator(self) -> Any:
        return tpu().default_generators[torch.accelerator.current_device_index()]
