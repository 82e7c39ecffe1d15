"""Whether a folder can hold a store, and how: looked at before a run, changed by a probe file only."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from accelbridge.memory.store.buffers import ALIGNMENT, aligned, as_bytes
from accelbridge.memory.store.errors import StoreError, StoreFull, StoreGone, translated
from accelbridge.memory.store.files import DIRECT, Files

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems that are host memory."""


@dataclass(frozen=True)
class Place:
    """What a folder is."""

    folder: Path
    file_system: str
    direct: bool
    """Whether reads and writes pass the page cache by."""
    why_not_direct: str
    free: int
    """Bytes."""

    @property
    def warnings(self) -> list[str]:
        """What works but is hardly meant."""
        found = []
        if self.file_system in IN_MEMORY:
            found.append(
                f"{self.folder} asked for offload to NVMe; it is {self.file_system}, which is host memory, so nothing "
                "is saved; give a folder on a disk, or offload to the host"
            )
        elif not self.direct:
            found.append(
                f"{self.folder} asked for offload to NVMe; {self.why_not_direct}, so bytes go through the page cache "
                "and take host memory as well; give a folder on ext4 or xfs for direct I/O"
            )
        return found


def look_at(folder: Path, files: Files | None = None) -> Place:
    """What ``folder`` is. Raises StoreGone, StoreReadOnly or another StoreError where no file can be written there."""
    files = files or Files()
    asked = f"offload to {folder} asked"
    if not folder.is_dir():
        found = "it is no folder" if folder.exists() else "there is no such folder"
        raise StoreGone(f"{asked}; {found}; make it, or give another path")
    probe = folder / f".accelbridge-{uuid.uuid4().hex}.probe"
    try:
        try:
            files.close(files.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL))
            why_not = _refusal_of_direct(probe, files)
        finally:
            with contextlib.suppress(OSError):  # what went wrong first is the one to tell
                probe.unlink(missing_ok=True)
        return Place(folder, files.type_of(folder), not why_not, why_not, files.free(folder))
    except OSError as error:
        raise translated(asked, error) from error


def _refusal_of_direct(probe: Path, files: Files) -> str:
    """Why direct I/O of aligned blocks does not work on ``probe``; empty if it does."""
    if not DIRECT:
        return "this system has no O_DIRECT"
    buffer = as_bytes(aligned(ALIGNMENT))
    try:
        descriptor = files.open(probe, os.O_RDWR | DIRECT)
        try:
            whole = files.write(descriptor, [buffer], 0) == files.read(descriptor, [buffer], 0) == ALIGNMENT
        finally:
            files.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return f"its file system refuses direct I/O in blocks of {ALIGNMENT} bytes ({os.strerror(error.errno)})"
    return "" if whole else f"its file system does not move {ALIGNMENT} bytes at once"


def check_space(folder: Path, needed: int, free: int) -> None:
    """Raises StoreFull where ``needed`` bytes are more than the ``free`` ones of ``folder``."""
    if needed > free:
        raise StoreFull(
            f"{needed:,} bytes in {folder} asked; {free:,} are free; free {needed - free:,} more, or give another path"
        )


def check_memory(count: int, size: int, available: int) -> None:
    """Raises StoreError where ``count`` staging buffers of ``size`` bytes are more than ``available`` host memory."""
    if count * size > available:
        raise StoreError(
            f"buffer_count {count} and buffer_size {size:,} asked, {count * size:,} bytes of staging buffers; the host "
            f"has {available:,} available; set them so that their product is less"
        )
