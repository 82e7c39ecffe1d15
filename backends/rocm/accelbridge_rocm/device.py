"""The device of a process: an AMD GPU, one die of it, or a partition. torch calls it "cuda" as well."""

from __future__ import annotations

from accelbridge.portable.discrete import DiscreteDevice
from accelbridge_rocm.host import CUDA, HIP, ROCR, probe


class RocmDevice(DiscreteDevice):
    """``cuda:N`` of a torch that is built for HIP. How many kernels were launched is not told: torch counts none."""

    visible = (HIP, CUDA, ROCR)
    lists = "amd-smi process"
    graphs = "CUDAGraph"
    # What torch's allocator, HIP, hipBLAS and RCCL say.
    used_up = ("HIP out of memory", "HIP error: out of memory", "HIPBLAS_STATUS_ALLOC_FAILED", "'out of memory'")
    flags = {
        # gfx942 multiplies float32 in fewer bits (xf32) where it is let (pytorch/pytorch#188168).
        "backends.cuda.matmul.fp32_precision": "ieee",
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": False,
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": False,
    }

    def __init__(self) -> None:
        super().__init__("cuda", probe)
