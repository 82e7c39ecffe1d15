"""TPUs through PyTorch/XLA: one process drives every local device, and sharding is annotation."""

from __future__ import annotations

from accelbridge.hookspecs import hookimpl


@hookimpl
def accelbridge_backend():
    from accelbridge_xla.backend import XlaBackend

    return XlaBackend
