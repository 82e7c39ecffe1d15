"""Collectives of NVIDIA GPUs: NCCL, native unless options ask for a lowering or calls are checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from accelbridge.backend import Lowering, Profile, World
from accelbridge.errors import ConfigError
from accelbridge.portable.discrete import unless_set
from accelbridge.portable.recorded_collectives import RecordedCollectives
from accelbridge.portable.torch_build import numbers
from accelbridge_cuda.options import CudaOptions
from accelbridge_cuda.profiles import PROFILES

LOWERINGS = {
    "fp8_bytes": Lowering(
        "fp8_bytes",
        applies="float8 tensors",
        into="uint8 views for movement; a reduction is refused",
        reason="NCCL moves e4m3fn and e5m2 itself since 2.24; older ones, and reductions below sm90, fail",
    ),
    "float32_reduce": Lowering(
        "float32_reduce",
        applies="SUM, AVG, PREMUL_SUM and PRODUCT over bfloat16 and float16",
        into="the same over float32, rounded once at the end",
        reason="NCCL's ring and tree round to the tensors' dtype at every hop (NVIDIA/nccl#1026)",
    ),
}
RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""ProcessGroupNCCL's own recorder, and the one that nccl2 is hooked into."""
NCCL2_SINCE, FR_DUMP_SINCE = (2, 14), (2, 15)
"""torch versions: nccl2 as an option (its default from 2.15 on); TORCH_FR_DUMP_ON_TIMEOUT in the place of
TORCH_NCCL_DUMP_ON_TIMEOUT. Read in the wheels' sources and binaries; none of this ran on a GPU here."""


class CudaCollectives(RecordedCollectives):
    """``cpu:gloo,cuda:nccl``, of the torch that is installed or, for a plan that is only looked at, of
    ``torch_version``. Raises ConfigError for an nccl2 that this torch doesn't have."""

    def __init__(self, options: CudaOptions | None = None, torch_version: str | None = None) -> None:
        options, torch_version = options or CudaOptions(), torch_version or torch.__version__
        self._torch, self._nccl = numbers(torch_version), options.nccl
        if options.nccl == "nccl2" and self._torch < NCCL2_SINCE:
            raise ConfigError(
                f"backend.options.nccl nccl2 asked; torch {torch_version} has none, 2.14 is the first; install a newer "
                "torch, or remove the option"
            )
        lowerings = [LOWERINGS[name] for name in dict.fromkeys(options.lowerings)]
        super().__init__("cuda", "nccl", "nccl2" if options.nccl == "nccl2" else "nccl", lowerings, RECORDERS)

    def environment(self, world: World) -> Mapping[str, str]:
        dump = "TORCH_FR_DUMP_ON_TIMEOUT" if self._torch >= FR_DUMP_SINCE else "TORCH_NCCL_DUMP_ON_TIMEOUT"
        wanted = {
            # torch's flight recorder, read when a run hangs.
            "TORCH_FR_BUFFER_SIZE": "2000",
            dump: "1",
            # Without it cuBLAS may choose among several workspaces, and torch refuses train.deterministic.
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        if self._nccl != "auto" and self._torch >= NCCL2_SINCE:
            wanted["TORCH_DIST_USE_NCCL2"] = "1" if self._nccl == "nccl2" else "0"
        others = {"TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",)}
        return {**super().environment(world), **unless_set(wanted, others)}

    def profiles(self) -> Mapping[str, Profile]:
        return PROFILES
