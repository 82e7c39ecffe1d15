"""Tensors of one rank in a file: aligned direct I/O, checksums, and nothing that is half of a write is ever data.

The parts: :mod:`files` (what is asked of the operating system, which tests replace), :mod:`place` (what a folder is
good for), :mod:`layout` (where everything lies), :mod:`buffers` (aligned host memory), :mod:`store` (reading and
writing), :mod:`bandwidth` (a measurement of two seconds).
"""

from accelbridge.memory.store.bandwidth import Bandwidth, measure
from accelbridge.memory.store.errors import (
    DamagedRecord,
    StoreDeviceError,
    StoreError,
    StoreFull,
    StoreGone,
    StoreReadOnly,
)
from accelbridge.memory.store.layout import Record
from accelbridge.memory.store.store import FileStore, StoreOptions

__all__ = [
    "Bandwidth",
    "DamagedRecord",
    "FileStore",
    "Record",
    "StoreDeviceError",
    "StoreError",
    "StoreFull",
    "StoreGone",
    "StoreOptions",
    "StoreReadOnly",
    "measure",
]
