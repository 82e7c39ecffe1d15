"""A backend whose ops are the kernels of ``accelbridge/kernels``, interpreted on the host: what the conformance suite
makes of them, without a GPU. Everything that it claims says "interpreted", and its evidence is "simulated": it shows
what the kernels' source computes, and nothing of what a compiler or a chip makes of it.

``site`` writes the metadata of a distribution that provides it, which is how any backend is found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from accelbridge.backend import (
    FULL,
    Attention,
    Capabilities,
    Device,
    DeviceInfo,
    Implementation,
    Matmul,
    Probe,
    Support,
    unsupported,
)
from accelbridge.cpu.backend import CpuBackend
from accelbridge.hookspecs import ENTRY_POINT_GROUP, hookimpl
from accelbridge.kernels import available
from accelbridge.kernels.candidates import layers
from accelbridge.kernels.flash_candidate import BLOCKS_D, KERNELS, flash_attention, variant
from accelbridge.kernels.fp8_cells import Fp8Kernels, served
from accelbridge.kernels.installed import triton_software
from accelbridge.kernels.tiles import Tile
from accelbridge.portable.device_cells import general

NAME = "interpreted"
_BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP": 2}
FP8_TILES: Mapping[str, Tile] = {
    "amax": Tile({"BLOCK": 4096}),
    "quantize_tensor": Tile({"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 256}),
    "quantize_rows": Tile({"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 256}),
    "quantize_rows.long": Tile({"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 1024}),
    "quantize_rows.transposed": Tile({"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 128}),
    "quantize_blocks.1x128": Tile({"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 256}),
    "quantize_blocks.128x128": Tile({"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128}),
    "quantize_blocks.1x32": Tile({"BLOCK_ROWS": 64, "BLOCK_COLUMNS": 128}),
    "scaled_mm.whole": Tile({**_BLOCKS, "PROMOTE": 1, "DESCRIPTORS": 0}),
    "scaled_mm.blocks": Tile({**_BLOCKS, "PROMOTE": 1, "DESCRIPTORS": 1}),
    "scaled_mm.mx": Tile({**_BLOCKS, "DESCRIPTORS": 0}),
}
_FLASH_BLOCKS = {"QUERIES": 64, "KEYS": 64}
FLASH_TILES: Mapping[str, Tile] = {
    **{
        f"{kernel}.{variant(block, dtype)}": Tile(
            {**_FLASH_BLOCKS, "DV_LAST": 1} if kernel == "flash_backward_dkdv" else _FLASH_BLOCKS
        )
        for kernel in KERNELS
        for block in BLOCKS_D
        for dtype in ("bfloat16", "float32")
    },
    "flash_delta": Tile({"QUERIES": 64}),
    "document_spans": Tile({"CHUNK": 64}),
}
_WIDTHS = tuple(2**power for power in range(7, 15))
LAYER_TILES: Mapping[str, Tile] = {
    "softmax_parts": Tile({"BLOCK": 1024}),
    "softmax_gradient": Tile({"BLOCK": 1024}),
    "swiglu_forward": Tile({"BLOCK": 1024}),
    "swiglu_backward": Tile({"BLOCK": 1024}),
    **{f"rope.{width}": Tile({"HEADS": 4, "BLOCK": width}) for width in (16, 32, 64, 128, 256)},
    **{f"rms_norm_forward.{width}": Tile({"ROWS": 8, "BLOCK": width}) for width in _WIDTHS},
    **{f"rms_norm_backward.{width}": Tile({"ROWS": 8, "BLOCK": width, "PROGRAMS": 3}) for width in _WIDTHS},
}
"""Few large tiles: an interpreter's time goes by their number."""


class InterpretedBackend(CpuBackend):
    """The CPU backend, whose attention, layers, losses, quantization and scaled products are interpreted kernels."""

    name: ClassVar[str] = NAME
    accelerator: ClassVar[bool] = True
    """Which it stands for: as a host processor's, its evidence would count as that processor's own."""

    @classmethod
    def probe(cls) -> Probe:
        found = super().probe()
        devices = tuple(DeviceInfo(device.index, f"interpreted on {device.chip}") for device in found.devices)
        software = {**found.software, **triton_software()}
        there = available(software)
        reason = "Triton's interpreter on the host; no evidence for any chip" if there else there.reason
        return replace(found, available=bool(there), reason=reason, devices=devices, software=software)

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        real, kernels = super().capabilities(chip, software), _kernels(software)
        table = dict(real.table)
        for (op, dtype, scaling), cell in real.table.items():
            if op != "scaled_mm":
                continue
            if kernel := _product(kernels, dtype, scaling):
                found = served(cell, kernel)
                table[op, dtype, scaling] = replace(found, reason=f"interpreted; {found.reason}")
            else:
                del table[op, dtype, scaling]
        return replace(real, table=table)

    @cached_property
    def device(self) -> Device:
        from tests.kernels.interpreted_device import InterpretedDevice

        return InterpretedDevice()

    @cached_property
    def _software(self) -> Mapping[str, str]:
        return (self.host or self.probe()).software

    @cached_property
    def matmul(self) -> Matmul:
        from accelbridge.portable.fp8_cells import cells
        from accelbridge.portable.scaled_mm import Conventions, TorchScaledMm

        # The library has nothing, and what is beyond a kernel's limits is refused, as the capabilities say.
        kernels = _kernels(self._software)
        table = {
            (op, dtype, scaling): replace(cell, limits=_product(kernels, dtype, scaling).limits)
            if op == "scaled_mm"
            else cell
            for (op, dtype, scaling), cell in cells().items()
            if op != "scaled_mm" or _product(kernels, dtype, scaling)
        }
        return TorchScaledMm(self.name, table, Conventions(swizzled=False), kernels)

    @cached_property
    def attention(self) -> Attention:
        from accelbridge.portable.sdpa import SdpaAttention

        return SdpaAttention([flash_attention(FLASH_TILES, {}, available(self._software), lambda _: None)])

    def implementations(self) -> Sequence[Implementation]:
        return (*self._products(), *layers(LAYER_TILES, self._software), *super().implementations())

    def _products(self) -> Sequence[Implementation]:
        kernels = _kernels(self._software)
        return (
            Implementation(
                "scaled_mm",
                "triton",
                lambda request: _product(kernels, request.dtype, request.variant).within(request.shape),
                lambda: self.matmul.scaled_mm,
                launches=("accelbridge::scaled_mm",),
            ),
            Implementation(
                "quantize",
                "triton",
                lambda _: FULL,
                lambda: self.matmul.quantize,
                launches=("accelbridge::quantize", "accelbridge::quantize_by"),
            ),
        )


def _product(kernels: Fp8Kernels, dtype: str, scaling: str) -> Support:
    """Of a pair of formats of either family: no chip has both, and MX is defined for one of them alone."""
    if scaling.startswith("mx") and "fnuz" in dtype:
        return unsupported("MX is defined for the formats of OCP")
    return kernels.product(general(scaling))


def _kernels(software: Mapping[str, str]) -> Fp8Kernels:
    return Fp8Kernels(FP8_TILES, {}, software)


@hookimpl
def accelbridge_backend() -> type[InterpretedBackend]:
    """The hook of an entry point."""
    return InterpretedBackend


def site(folder: Path) -> dict[str, str]:
    """Metadata of a distribution that provides it, in ``folder``, and the variables by which it is found there."""
    info = folder / "accelbridge_interpreted-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelbridge-interpreted\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{NAME} = {__name__}\n")
    path = [str(folder), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "ACCELBRIDGE_PROBE_SECONDS": "60",
        "TRITON_INTERPRET": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
