"""The calls to the operating system that a store makes, as one small class: a test replaces some of them by faults.

Reads and writes take positions, so that any number of threads may share a descriptor; each releases the interpreter's
lock while the kernel works (CPython's ``os.preadv`` and ``os.pwritev``).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

DIRECT = getattr(os, "O_DIRECT", 0)
"""The flag for I/O that passes the page cache by; 0 where the system has none."""


class Files:
    """The operating system as it is. Every method raises ``OSError`` as the call it stands for."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def lock(self, descriptor: int) -> None:
        """Take the file for this process alone, until it is closed. ``BlockingIOError`` where another has it."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def allocate(self, descriptor: int, size: int) -> None:
        """Reserve ``size`` bytes from the file's beginning, so that no later write into them lacks space."""
        os.posix_fallocate(descriptor, 0, size)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(descriptor, buffers, offset)

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def free(self, folder: Path) -> int:
        """Bytes that this user may still write there."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def type_of(self, folder: Path) -> str:
        """The name of the file system there, as the kernel's table of mounts has it; "unknown" without one."""
        real = folder.resolve()
        mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
        return next((mounts[path] for path in (real, *real.parents) if path in mounts), "unknown")
