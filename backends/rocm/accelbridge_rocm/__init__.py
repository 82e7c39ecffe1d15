"""AMD GPUs through ROCm: torch's own kernels, hipBLASLt, AOTriton and RCCL."""

from __future__ import annotations

from accelbridge.hookspecs import hookimpl


@hookimpl
def accelbridge_backend():
    from accelbridge_rocm.backend import RocmBackend

    return RocmBackend
