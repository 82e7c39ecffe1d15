"""TPUs, by one of two runtimes: PyTorch/XLA (spmd: one process drives every local device, sharding is annotation), or
TorchTPU (eager: one process per device)."""

from __future__ import annotations

from accelbridge.hookspecs import hookimpl


@hookimpl
def accelbridge_backend():
    from accelbridge_xla import runtimes

    return runtimes.backend()
