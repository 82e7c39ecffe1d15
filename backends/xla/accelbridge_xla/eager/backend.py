"""The XLA backend on TorchTPU: what it states, and who does what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

from accelbridge.backend import Attention, Backend, Capabilities, Collectives, Device, Execution, Implementation, Probe
from accelbridge_xla import hardware
from accelbridge_xla.eager import facts, host


class TorchTpuBackend(Backend):
    """TorchTPU: kernels that XLA compiles op by op, and its process group ``tpu_dist``."""

    name: ClassVar[str] = "xla"
    api_version: ClassVar[tuple[int, int]] = (1, 0)
    device_type: ClassVar[str] = "tpu"
    process_group: ClassVar[str] = "cpu:gloo,tpu:tpu_dist"
    accelerator: ClassVar[bool] = True
    chips = {each.name.removeprefix("TPU ").lower(): each.name for each in hardware.GENERATIONS.values()}
    versions: ClassVar[tuple[str, ...]] = host.VERSIONS

    @classmethod
    def probe(cls) -> Probe:
        return host.probe()

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        return facts.capabilities(chip, software)

    @cached_property
    def device(self) -> Device:
        from accelbridge_xla.eager.device import TorchTpuDevice

        return TorchTpuDevice(self.probe)

    @cached_property
    def collectives(self) -> Collectives:
        from accelbridge_xla.eager.collectives import TorchTpuCollectives

        return TorchTpuCollectives()

    @cached_property
    def attention(self) -> Attention:
        from accelbridge.portable.sdpa import SdpaAttention
        from accelbridge_xla.eager.attention import candidates

        found = self.host or self.probe()
        chip, _ = self.chip(found)
        return SdpaAttention(candidates(chip in {each.name for each in hardware.GENERATIONS.values()}, found.software))

    def implementations(self) -> Sequence[Implementation]:
        from accelbridge.portable.adamw import FUSED_ADAMW

        return (*super().implementations(), FUSED_ADAMW)

    @cached_property
    def execution(self) -> Execution:
        from accelbridge_xla.eager.execution import TorchTpuExecution

        return TorchTpuExecution(self.device, self.collectives)
