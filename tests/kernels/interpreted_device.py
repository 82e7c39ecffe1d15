"""The device of the interpreted backend: binding it makes this process one that interprets."""

from __future__ import annotations

import os
import sys

import torch

from accelbridge.backend import World
from accelbridge.cpu.device import CpuDevice
from accelbridge.errors import BackendError


class InterpretedDevice(CpuDevice):
    """The CPU, in a process whose triton interprets."""

    def bind(self, world: World) -> torch.device:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise BackendError(
                "asked: interpreted kernels; found: triton, imported to compile; do: start a new process"
            )
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.kernels import interpreter

        interpreter.install()
        return super().bind(world)
