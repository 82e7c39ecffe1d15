"""The ROCm backend: what it states, and who does what. Everything else is in the modules beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from accelbridge.backend import Attention, Backend, Capabilities, Collectives, Device, Implementation, Matmul, Probe
from accelbridge_rocm import facts
from accelbridge_rocm.options import RocmOptions


class RocmBackend(Backend):
    """PyTorch's HIP kernels, hipBLASLt, AOTriton and RCCL. torch calls the devices "cuda" and the library "nccl"."""

    name: ClassVar[str] = "rocm"
    api_version: ClassVar[tuple[int, int]] = (1, 0)
    device_type: ClassVar[str] = "cuda"
    process_group: ClassVar[str] = "cpu:gloo,cuda:nccl"
    accelerator: ClassVar[bool] = True
    hidden_by: ClassVar[Mapping[str, str]] = {"HIP_VISIBLE_DEVICES": ""}
    chips: ClassVar[Mapping[str, str]] = facts.CHIPS
    options_model = RocmOptions

    @classmethod
    def probe(cls) -> Probe:
        from accelbridge_rocm.host import probe

        return probe()

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        return facts.capabilities(chip, software)

    @classmethod
    def assume(cls, chip: str, devices: int, software: Mapping[str, str]) -> Probe:
        probe = super().assume(chip, devices, software)
        usual = facts.usual_software(probe.software["torch"])
        return replace(probe, software={**usual, **software})

    def chip(self, probe: Probe) -> tuple[str, str]:
        from accelbridge_rocm.host import chip

        return chip(probe, self._options.mixed)

    @cached_property
    def device(self) -> Device:
        from accelbridge_rocm.device import RocmDevice

        return RocmDevice()

    @cached_property
    def collectives(self) -> Collectives:
        from accelbridge_rocm.collectives import RocmCollectives

        return RocmCollectives(self._options)

    @cached_property
    def matmul(self) -> Matmul:
        from accelbridge_rocm.matmul import make_matmul

        return make_matmul(self.name, self._here, self._software)

    @cached_property
    def attention(self) -> Attention:
        from accelbridge.portable.sdpa import SdpaAttention
        from accelbridge_rocm.attention import candidates

        return SdpaAttention(candidates(facts.architecture_of(self._here.chip.name), self._software))

    def implementations(self) -> Sequence[Implementation]:
        from accelbridge.portable.adamw import FUSED_ADAMW
        from accelbridge_rocm import matmul

        products = matmul.candidates(lambda: self.matmul.scaled_mm, self._here)
        return (*products, *self.attention.implementations(), FUSED_ADAMW)

    @property
    def _options(self) -> RocmOptions:
        return self.options if isinstance(self.options, RocmOptions) else RocmOptions()

    @cached_property
    def _probed(self) -> Probe:
        return self.host or self.probe()

    @property
    def _software(self) -> Mapping[str, str]:
        return self._probed.software

    @cached_property
    def _here(self) -> Capabilities:
        return self.capabilities(self.chip(self._probed)[0], self._software)
