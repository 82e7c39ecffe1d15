"""NVIDIA GPUs through CUDA: torch's own kernels, cuBLASLt, cuDNN and NCCL."""

from __future__ import annotations

from accelbridge.hookspecs import hookimpl


@hookimpl
def accelbridge_backend():
    from accelbridge_cuda.backend import CudaBackend

    return CudaBackend
