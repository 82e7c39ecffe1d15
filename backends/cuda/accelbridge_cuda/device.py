"""The device of a process: an NVIDIA GPU or a MIG device."""

from __future__ import annotations

from accelbridge.portable.discrete import DiscreteDevice
from accelbridge_cuda.host import VISIBLE, probe


class CudaDevice(DiscreteDevice):
    """``cuda:N``. How many kernels were launched is not told: torch counts none, and CUPTI, which does, would have to
    be attached to the process."""

    visible = (VISIBLE,)
    lists = "nvidia-smi"
    graphs = "CUDAGraph"
    # What torch's allocator (class OutOfMemoryError), the runtime, cuBLAS and NCCL say.
    used_up = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "'out of memory'")
    busy = ("busy or unavailable",)  # cudaErrorDevicesUnavailable, by the compute mode
    flags = {
        # float32 is float32 (the fact matmul.float32), by the flags that torch has since 2.9; it refuses to mix them
        # with the older allow_tf32 and set_float32_matmul_precision.
        "backends.cuda.matmul.fp32_precision": "ieee",
        "backends.cudnn.conv.fp32_precision": "ieee",
        "backends.cudnn.rnn.fp32_precision": "ieee",
        # Otherwise True: parts of a product that are split along K may then be added in 16 bits.
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": False,
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": False,
    }

    def __init__(self) -> None:
        super().__init__("cuda", probe)
