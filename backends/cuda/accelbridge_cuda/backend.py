"""The CUDA backend: what it states, and who does what. Everything else is in the modules beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from accelbridge.backend import Capabilities, Collectives, Device, Implementation, Probe, Support
from accelbridge.errors import ConfigError
from accelbridge.kernels.fp8_cells import Fp8Kernels
from accelbridge.portable.described import DescribedBackend
from accelbridge_cuda import facts
from accelbridge_cuda.options import CudaOptions

if TYPE_CHECKING:
    from accelbridge.kernels.tiles import Tile
    from accelbridge.portable.scaled_mm import Conventions


class CudaBackend(DescribedBackend):
    """PyTorch's CUDA kernels, cuBLASLt, cuDNN and NCCL."""

    name: ClassVar[str] = "cuda"
    api_version: ClassVar[tuple[int, int]] = (1, 0)
    device_type: ClassVar[str] = "cuda"
    process_group: ClassVar[str] = "cpu:gloo,cuda:nccl"
    hidden_by: ClassVar[Mapping[str, str]] = {"CUDA_VISIBLE_DEVICES": ""}
    chips: ClassVar[Mapping[str, str]] = facts.CHIPS
    options_model = CudaOptions
    versions: ClassVar[tuple[str, ...]] = ("torch", "cuda", "cudnn", "nccl", "triton")
    unused: ClassVar[Mapping[str, str]] = {
        # Transformer Engine 2.20, transformer_engine/pytorch/module.
        "transformer_engine": "its modules quantize, multiply and keep state in one, and take no matrix that is "
        "quantized already; as a product it calls cuBLASLt, as torch_scaled_mm does",
        # torchao 0.18, torchao/float8/float8_ops.py.
        "torchao": "its float8 layers call torch._scaled_mm, as torch_scaled_mm does",
    }

    @classmethod
    def probe(cls) -> Probe:
        from accelbridge_cuda.host import probe

        return probe()

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        return facts.capabilities(chip, software)

    @classmethod
    def usual_software(cls, torch: str) -> Mapping[str, str]:
        return facts.usual_software(torch)

    @classmethod
    def assume(cls, chip: str, devices: int, software: Mapping[str, str]) -> Probe:
        from accelbridge_cuda.host import BLACKWELL_SINCE, lacks_code

        probe = super().assume(chip, devices, software)
        if lacks_code(probe.devices[0].chip, cuda := probe.software.get("cuda")):
            raise ConfigError(
                f"{probe.devices[0].chip} with CUDA {cuda} asked; torch's wheels for it hold no code for that chip; "
                f"assume cuda={'.'.join(map(str, BLACKWELL_SINCE))} or later"
            )
        return probe

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

        return CudaCollectives(self._options, self.software.get("torch"))

    def library_products(self) -> Mapping[tuple[str, str, str], Support]:
        return facts.library_products(self.here.chip.name, self.software)

    def fp8_kernels(self) -> Fp8Kernels:
        return facts.kernels(facts.architecture_of(self.here.chip.name), self.software)

    def architecture(self) -> str:
        return facts.architecture_of(self.here.chip.name)

    def tiles(self) -> Mapping[str, Tile]:
        from accelbridge_cuda.tiles import tiles

        return tiles(self.architecture())

    def attention_candidates(self) -> Sequence[Implementation]:
        from accelbridge_cuda.attention import candidates

        return candidates(self.architecture(), self.software)

    def conventions(self, public: bool) -> Conventions:
        from accelbridge.portable.scaled_mm import Conventions

        given = facts.outputs(self.architecture(), self.software)
        # MX scales in tiles 32_4_4: ScaledBlas.cpp, _scaled_mxfp8_mxfp8.
        return Conventions(swizzled=True, outputs=given, public=public)

    @property
    def _options(self) -> CudaOptions:
        return self.options if isinstance(self.options, CudaOptions) else CudaOptions()
