"""Collectives of AMD GPUs: RCCL, which torch calls "nccl", native unless options ask for a lowering."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from accelbridge.backend import Lowering, Profile, World
from accelbridge.portable.discrete import unless_set
from accelbridge.portable.recorded_collectives import RecordedCollectives
from accelbridge.portable.torch_build import numbers
from accelbridge_rocm.options import RocmOptions
from accelbridge_rocm.profiles import PROFILES

LOWERINGS = {
    "fp8_bytes": Lowering(
        "fp8_bytes",
        applies="float8 tensors",
        into="uint8 views for movement; a reduction is refused",
        reason="which fp8 formats RCCL takes depends on its version and the architecture, and is not shown here",
    ),
    "float32_reduce": Lowering(
        "float32_reduce",
        applies="SUM, AVG, PREMUL_SUM and PRODUCT over bfloat16 and float16",
        into="the same over float32, rounded once at the end",
        reason="RCCL adds bfloat16 in float32 and rounds at every hop (2.21.5, src/device/reduce_kernel.h)",
    ),
}
RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""torch's recorder has the same names when it is built for HIP."""
FR_DUMP_SINCE = (2, 15)
"""The torch version from which TORCH_FR_DUMP_ON_TIMEOUT stands in the place of TORCH_NCCL_DUMP_ON_TIMEOUT; as for CUDA,
whose wheels were read."""


class RocmCollectives(RecordedCollectives):
    """``cpu:gloo,cuda:nccl``, where nccl is RCCL, of the torch that is installed or, for a plan that is only looked at,
    of ``torch_version``. Reductions over the fnuz formats are refused by torch itself."""

    def __init__(self, options: RocmOptions | None = None, torch_version: str | None = None) -> None:
        options = options or RocmOptions()
        self._torch = numbers(torch_version or torch.__version__)
        lowerings = [LOWERINGS[name] for name in dict.fromkeys(options.lowerings)]
        super().__init__("cuda", "nccl", "rccl", lowerings, RECORDERS)

    def environment(self, world: World) -> Mapping[str, str]:
        dump = "TORCH_FR_DUMP_ON_TIMEOUT" if self._torch >= FR_DUMP_SINCE else "TORCH_NCCL_DUMP_ON_TIMEOUT"
        # torch's flight recorder, read when a run hangs.
        wanted = {"TORCH_FR_BUFFER_SIZE": "2000", dump: "1"}
        others = {"TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",)}
        return {**super().environment(world), **unless_set(wanted, others)}

    def profiles(self) -> Mapping[str, Profile]:
        return PROFILES
