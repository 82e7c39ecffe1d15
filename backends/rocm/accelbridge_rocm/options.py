"""``backend.options`` of the ROCm backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from accelbridge.config import Section


class RocmOptions(Section):
    """Options of the ROCm backend."""

    mixed: Literal["refuse", "lowest"] = "refuse"
    """GPUs of several models on one host: refused, or planned for as if all were the one of the lowest architecture."""
    lowerings: list[Literal["fp8_bytes", "float32_reduce"]] = Field(default_factory=list)
    """Rewrites of collectives to put between the run and RCCL. ``fp8_bytes``: fp8 tensors travel as uint8.
    ``float32_reduce``: sums over bfloat16 and float16 travel and are added as float32, where RCCL rounds at every
    hop."""
