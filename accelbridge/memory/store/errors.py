"""What can go wrong with a file of a store, by what to do about it."""

from __future__ import annotations

import errno
import os

from accelbridge.errors import AccelbridgeError


class StoreError(AccelbridgeError):
    """A file store that cannot do what was asked."""


class StoreFull(StoreError):
    """No space, or a limit of the file's size or of a quota."""


class StoreReadOnly(StoreError):
    """A file system that is, or has become, read-only, or lacks permission."""


class StoreGone(StoreError):
    """A folder, file, device or mount that is not there, or no longer."""


class StoreDeviceError(StoreError):
    """The device could not read or write: a defect, or a file that is shorter than it was made."""


class DamagedRecord(StoreError):
    """A record that is not whole, or not the one asked for."""


_BY_NUMBER: dict[int, tuple[type[StoreError], str]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), (StoreFull, "free space there, or give another path")),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), (StoreReadOnly, "give a path that can be written to")),
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTCONN, errno.EBADF),
        (StoreGone, "mount it again or give another path, and resume from the last checkpoint"),
    ),
    errno.EIO: (StoreDeviceError, "look into the kernel's log, give another path, and resume from the last checkpoint"),
}


def translated(asked: str, error: OSError) -> StoreError:
    """``error`` of the operating system, while ``asked`` was tried, as one of the classes above."""
    kind, advice = _BY_NUMBER.get(error.errno or 0, (StoreError, "give another path"))
    found = os.strerror(error.errno) if error.errno else str(error)
    return kind(f"{asked}; {found}; {advice}")
