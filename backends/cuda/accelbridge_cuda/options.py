"""``backend.options`` of the CUDA backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from accelbridge.config import Section


class CudaOptions(Section):
    """Options of the CUDA backend."""

    mixed: Literal["refuse", "lowest"] = "refuse"
    """GPUs of several models on one host: refused, or planned for as if all were the one of the lowest architecture."""
    nccl: Literal["auto", "legacy", "nccl2"] = "auto"
    """Which of torch's two process groups over NCCL: torch's own default, the older one, or nccl2 (torch 2.14 on)."""
    lowerings: list[Literal["fp8_bytes", "float32_reduce"]] = Field(default_factory=list)
    """Rewrites of collectives to put between the run and NCCL. ``float32_reduce``: sums over bfloat16 and float16
    travel and are added as float32, where NCCL's ring rounds at every hop. ``fp8_bytes``: fp8 tensors travel as
    uint8."""
