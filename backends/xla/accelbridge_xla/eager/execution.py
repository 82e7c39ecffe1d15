"""Eager execution as everywhere, but for the compiler."""

from __future__ import annotations

import torch
from torch import nn

from accelbridge.portable.execution import EagerExecution


class TorchTpuExecution(EagerExecution):
    """One process per device, FSDP2 and DTensor."""

    def compile(self, unit: nn.Module) -> None:
        # Said here rather than left to the torch.compile that torch_tpu puts in place; it takes static shapes only.
        unit.forward = torch.compile(unit.forward, fullgraph=True, backend="tpu", dynamic=False)
