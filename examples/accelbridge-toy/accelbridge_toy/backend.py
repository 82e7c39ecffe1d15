"""What the toy chip is and does; everything else is accelbridge's portable default."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from accelbridge.backend import (
    FULL,
    Backend,
    Capabilities,
    Chip,
    Collectives,
    Device,
    DeviceInfo,
    Matmul,
    Offload,
    Probe,
    Support,
    unsupported,
)
from accelbridge.portable.fp8_cells import cells as fp8_cells

CHIPS = 8
OPS = ("linear", "attention", "embedding", "rms_norm", "rope", "swiglu", "dropout", "cross_entropy", "adamw",
       "vocab_parallel_cross_entropy")  # fmt: skip
FACTS = {
    "fp8.variant": "fnuz",  # its e4m3 has no infinities and no negative zero, and 240 is the largest number
    "fp8.overflow": "asked",
    "reduce.minmax_nan": "propagates",  # by a lowering
    "collective.on_mismatch": "abort",  # gloo's own checks end the process
    "collective.op_mismatch": "undetected",
    "p2p.tags": "matched",
}


class ToyBackend(Backend):
    """Eight virtual chips per host."""

    name: ClassVar[str] = "toy"
    api_version: ClassVar[tuple[int, int]] = (1, 0)
    device_type: ClassVar[str] = "cpu"
    process_group: ClassVar[str] = "toyccl"

    @classmethod
    def probe(cls) -> Probe:
        devices = tuple(DeviceInfo(index, "toy1") for index in range(CHIPS))
        return Probe(True, f"{CHIPS} virtual chips", devices, software={"toyccl": "1.0"})

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        return Capabilities(
            chip=Chip(chip),
            table=_table(),
            pinned_host_memory=unsupported("the toy chip reads host memory by copies only"),
            facts=FACTS,
        )

    @cached_property
    def device(self) -> Device:
        from accelbridge_toy.device import ToyDevice

        return ToyDevice(CHIPS)

    @cached_property
    def collectives(self) -> Collectives:
        from accelbridge_toy.collectives import ToyCollectives

        return ToyCollectives()

    @cached_property
    def matmul(self) -> Matmul:
        from accelbridge.portable.fp8 import EmulatedFp8

        return EmulatedFp8(self.name)

    @cached_property
    def offload(self) -> Offload:
        from accelbridge.portable.offload import PortableOffload

        return PortableOffload(self.device_type, pinned=False)


def _table() -> dict[tuple[str, str, str], Support]:
    """Ops x dtype x variant; the lowerings are those of ``accelbridge_toy.collectives``."""
    table: dict[tuple[str, str, str], Any] = {}
    for dtype in ("float32", "bfloat16"):
        low = "float32_reduce" if dtype == "bfloat16" else ""
        for op in OPS:
            table[op, dtype, ""] = FULL
        for op in ("all_reduce", "reduce_scatter", "reduce"):
            table[op, dtype, "sum"] = table[op, dtype, "product"] = Support("full", lowering=low)
            table[op, dtype, "avg"] = Support("full", lowering="avg_as_sum")
            table[op, dtype, "premul_sum"] = Support("full", lowering="premul_as_sum")
            table[op, dtype, "min"] = table[op, dtype, "max"] = Support("full", lowering="nan_minmax")
        for op in ("all_gather", "broadcast", "all_to_all"):
            table[op, dtype, ""] = FULL
    for op in ("linear", "attention"):
        table[op, "float64", ""] = unsupported("the toy chip has no float64")
    return table | {cell: support for cell, support in fp8_cells().items() if _fnuz(cell[1])}


def _fnuz(formats: str) -> bool:
    """Whether all of "A x B" are of the kind that the chip has."""
    return all(format.endswith("fnuz") for format in formats.split(" x "))
