"""The CUDA backend: what it states, and who does what. Everything else is in the modules beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from accelbridge.backend import Attention, Backend, Capabilities, Collectives, Device, Implementation, Matmul, Probe
from accelbridge_cuda import facts
from accelbridge_cuda.options import CudaOptions


class CudaBackend(Backend):
    """PyTorch's CUDA kernels, cuBLASLt, cuDNN and NCCL."""

    name: ClassVar[str] = "cuda"
    api_version: ClassVar[tuple[int, int]] = (1, 0)
    device_type: ClassVar[str] = "cuda"
    process_group: ClassVar[str] = "cpu:gloo,cuda:nccl"
    accelerator: ClassVar[bool] = True
    hidden_by: ClassVar[Mapping[str, str]] = {"CUDA_VISIBLE_DEVICES": ""}
    chips: ClassVar[Mapping[str, str]] = facts.CHIPS
    options_model = CudaOptions

    @classmethod
    def probe(cls) -> Probe:
        from accelbridge_cuda.host import probe

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
        from accelbridge_cuda.host import chip

        return chip(probe, self._options.mixed)

    @cached_property
    def device(self) -> Device:
        from accelbridge_cuda.device import CudaDevice

        return CudaDevice()

    @cached_property
    def collectives(self) -> Collectives:
        from accelbridge_cuda.collectives import CudaCollectives

        return CudaCollectives(self._options)

    @cached_property
    def matmul(self) -> Matmul:
        from accelbridge_cuda.matmul import make_matmul

        return make_matmul(self.name, self._here, self._software)

    @cached_property
    def attention(self) -> Attention:
        from accelbridge.portable.sdpa import SdpaAttention
        from accelbridge_cuda.attention import candidates

        return SdpaAttention(candidates(facts.architecture_of(self._here.chip.name), self._software))

    def implementations(self) -> Sequence[Implementation]:
        from accelbridge.portable.adamw import FUSED_ADAMW
        from accelbridge_cuda import matmul

        products = matmul.candidates(lambda: self.matmul.scaled_mm, self._here)
        return (*products, *self.attention.implementations(), FUSED_ADAMW)

    @property
    def _options(self) -> CudaOptions:
        return self.options if isinstance(self.options, CudaOptions) else CudaOptions()

    @cached_property
    def _probed(self) -> Probe:
        return self.host or self.probe()

    @property
    def _software(self) -> Mapping[str, str]:
        return self._probed.software

    @cached_property
    def _here(self) -> Capabilities:
        return self.capabilities(self.chip(self._probed)[0], self._software)
