"""The reference backend: a real one, and the embedded default on a machine with no accelerator."""

from __future__ import annotations

from accelbridge.hookspecs import hookimpl


@hookimpl
def accelbridge_backend():
    from accelbridge.cpu.backend import CpuBackend

    return CpuBackend
