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
    Offload,
    Probe,
    Support,
    unsupported,
)

CHIPS = 8
OPS = ("linear", "matmul", "attention", "embedding", "rms_norm", "rope", "swiglu", "dropout", "cross_entropy", "adamw",
       "vocab_parallel_cross_entropy")  # fmt: skip


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
    for op in (*OPS[:3], "all_reduce"):
        table[op, "float64", "sum" if op == "all_reduce" else ""] = unsupported("the toy chip has no float64")
    return table
