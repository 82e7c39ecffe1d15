"""What the CPU and gloo need beyond ``accelbridge/portable``: read this first, then write your own."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import psutil
from pydantic import Field

from accelbridge.backend import (
    FULL,
    Attention,
    Backend,
    Capabilities,
    Chip,
    Collectives,
    Device,
    DeviceInfo,
    Implementation,
    Matmul,
    Probe,
    Support,
    unsupported,
)
from accelbridge.config import Section
from accelbridge.portable.fp8_cells import FACTS as FP8_FACTS
from accelbridge.portable.fp8_cells import cells

FLOATS = ("float32", "float64", "bfloat16", "float16")
MOVES = ("all_gather", "broadcast", "all_to_all")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")

FACTS: Mapping[str, str | int] = {
    **FP8_FACTS,
    # gloo's own checks of a message's size end the process (glog's fatal, in the thread of a connection), unless
    # calls are compared before they run. Ranks that name different roots or operations wait until the time limit.
    "collective.on_mismatch": "abort",
    # gloo sends no reduce operation: of ranks that ask for SUM and for MAX each gets something.
    "collective.op_mismatch": "undetected",
    # By the lowerings of accelbridge.cpu.collectives.
    "reduce.minmax_nan": "propagates",
    # A message goes into the slot of its tag (ProcessGroupGloo::send).
    "p2p.tags": "matched",
}


class CpuOptions(Section):
    """Options of the CPU backend."""

    devices: int | None = Field(default=None, gt=0)
    """Processes that this host may run, each standing for a device; absent: the cores, but at least 8."""


class CpuBackend(Backend):
    """PyTorch's CPU kernels and gloo."""

    name: ClassVar[str] = "cpu"
    api_version: ClassVar[tuple[int, int]] = (1, 0)
    device_type: ClassVar[str] = "cpu"
    process_group: ClassVar[str] = "gloo"
    accelerator: ClassVar[bool] = False
    chips = {name: name for name in ("x86_64", "aarch64", "arm64")}
    options_model = CpuOptions

    @classmethod
    def probe(cls) -> Probe:
        try:
            torch = version("torch")
        except PackageNotFoundError:
            return Probe(False, "torch is not installed")
        chip = platform.machine() or "cpu"
        devices = tuple(DeviceInfo(index, chip) for index in range(device_count(None)))
        return Probe(
            True,
            f"{cores()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB shared by its processes",
            devices,
            software={"torch": torch},
            facts={"host": platform.node(), "python": platform.python_version(), "cores": str(cores())},
        )

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        return Capabilities(
            chip=Chip(chip),  # peaks of host processors are not tabulated: MFU stays "unknown"
            table=_table(),
            pinned_host_memory=unsupported("host memory is device memory"),
            facts=dict(FACTS),
        )

    @cached_property
    def device(self) -> Device:
        from accelbridge.cpu.device import CpuDevice

        return CpuDevice(self.options.devices if isinstance(self.options, CpuOptions) else None)

    @cached_property
    def collectives(self) -> Collectives:
        from accelbridge.cpu.collectives import CpuCollectives

        return CpuCollectives()

    @cached_property
    def matmul(self) -> Matmul:
        from accelbridge.portable.fp8 import EmulatedFp8

        return EmulatedFp8(self.name)

    @cached_property
    def attention(self) -> Attention:
        from accelbridge.cpu.attention import CpuAttention

        return CpuAttention()

    def implementations(self) -> Sequence[Implementation]:
        from accelbridge.portable.adamw import FUSED_ADAMW

        return (*super().implementations(), FUSED_ADAMW)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_count(asked: int | None) -> int:
    """Processes that may stand for a device: more than cores is slow but right, and 8 lets layouts be tried."""
    return asked or max(8, cores())


def _table() -> dict[tuple[str, str, str], Support]:
    """Ops x dtype x variant. The lowerings are those of ``accelbridge.cpu.collectives``."""
    table: dict[tuple[str, str, str], Any] = {}
    for dtype in FLOATS:
        for op in (
            "linear",
            "attention",
            "embedding",
            "rms_norm",
            "rope",
            "swiglu",
            "dropout",
            "cross_entropy",
            "vocab_parallel_cross_entropy",
            "linear_cross_entropy",
            "vocab_parallel_linear_cross_entropy",
            "adamw",
        ):
            table[op, dtype, ""] = FULL
        if dtype == "float16":
            table["adamw", dtype, ""] = unsupported(
                "float16 cannot hold the squares of gradients below 2^-12: keep parameters in float32"
            )
        low = "float32_reduce" if dtype in ("bfloat16", "float16") else ""
        for op in ("all_reduce", "reduce_scatter", "reduce"):
            table[op, dtype, "sum"] = table[op, dtype, "product"] = Support("full", lowering=low)
            table[op, dtype, "avg"] = Support("full", lowering="avg_as_sum")
            table[op, dtype, "premul_sum"] = Support("full", lowering="premul_as_sum")
            table[op, dtype, "min"] = table[op, dtype, "max"] = Support("full", lowering="nan_minmax")
        for op in MOVES:
            table[op, dtype, ""] = FULL
    for dtype in FP8:
        for op in MOVES:
            table[op, dtype, ""] = Support("full", lowering="fp8_bytes")
        table["all_reduce", dtype, "sum"] = unsupported("gloo has no arithmetic on 8-bit floats")
    for op in MOVES:
        table[op, "uint8", ""] = FULL  # codes of 8-bit formats, for one
    return table | cells()
