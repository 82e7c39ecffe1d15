"""The ROCm backend: what it states, and who does what. Everything else is in the modules beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from accelbridge.backend import Capabilities, Collectives, Device, Implementation, Probe, Support
from accelbridge.kernels.fp8_cells import Fp8Kernels
from accelbridge.portable.described import DescribedBackend
from accelbridge_rocm import facts
from accelbridge_rocm.options import RocmOptions

if TYPE_CHECKING:
    from accelbridge.kernels.tiles import Tile
    from accelbridge.portable.scaled_mm import Conventions


class RocmBackend(DescribedBackend):
    """PyTorch's HIP kernels, hipBLASLt, AOTriton and RCCL. torch calls the devices "cuda" and the library "nccl"."""

    name: ClassVar[str] = "rocm"
    api_version: ClassVar[tuple[int, int]] = (1, 0)
    device_type: ClassVar[str] = "cuda"
    process_group: ClassVar[str] = "cpu:gloo,cuda:nccl"
    hidden_by: ClassVar[Mapping[str, str]] = {"ROCR_VISIBLE_DEVICES": ""}
    chips: ClassVar[Mapping[str, str]] = facts.CHIPS
    options_model = RocmOptions
    versions: ClassVar[tuple[str, ...]] = ("torch", "rocm", "rccl", "triton")
    unused: ClassVar[Mapping[str, str]] = {
        "transformer_engine": "its modules quantize, multiply and keep state in one, and take no matrix that is "
        "quantized already; as a product it calls hipBLASLt, as torch_scaled_mm does",
        "torchao": "its float8 layers call torch._scaled_mm, as torch_scaled_mm does",
    }

    @classmethod
    def probe(cls) -> Probe:
        from accelbridge_rocm.host import probe

        return probe()

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        return facts.capabilities(chip, software)

    @classmethod
    def usual_software(cls, torch: str) -> Mapping[str, str]:
        return facts.usual_software(torch)

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

        return RocmCollectives(self._options, self.software.get("torch"))

    def library_products(self) -> Mapping[tuple[str, str, str], Support]:
        return facts.library_products(self.here.chip.name, self.software)

    def fp8_kernels(self) -> Fp8Kernels:
        return facts.kernels(facts.architecture_of(self.here.chip.name), self.software)

    def architecture(self) -> str:
        return facts.architecture_of(self.here.chip.name)

    def tiles(self) -> Mapping[str, Tile]:
        from accelbridge_rocm.tiles import tiles

        return tiles(self.architecture())

    def attention_candidates(self) -> Sequence[Implementation]:
        from accelbridge_rocm.attention import candidates

        return candidates(self.architecture(), self.software)

    def conventions(self, public: bool) -> Conventions:
        from accelbridge.portable.scaled_mm import Conventions

        # Up to ROCm 7.13 MX scales are not in tiles: ScaledBlas.cpp, _scaled_mxfp8_mxfp8.
        return Conventions(swizzled=False, outputs=facts.OUTPUTS, public=public)

    @property
    def _options(self) -> RocmOptions:
        return self.options if isinstance(self.options, RocmOptions) else RocmOptions()
