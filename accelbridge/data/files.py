"""Folders that appear whole or not at all, and checksums of files."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from accelbridge.errors import DataError


def absolute(path: str | os.PathLike[str]) -> Path:
    """``path`` with ``~`` expanded, independent of later changes of the working folder."""
    return Path(path).expanduser().absolute()


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in chunks. Raises ``OSError``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_existing(out: Path) -> None:
    """Raise ``DataError`` if anything is at ``out``, be it a dangling link."""
    if os.path.lexists(out):
        raise DataError(f"{out} already exists and is never overwritten; choose another path or remove it first")


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden sibling of ``out`` to fill; it becomes ``out`` when the block ends without an exception.

    After an exception nothing is left behind. Raises ``DataError`` if ``out`` exists, before and after the
    block, and for any ``OSError`` of the block (disk full, no permission).
    """
    refuse_existing(out)
    # Not tempfile.mkdtemp: its folders are closed to everyone but the owner, and would stay so after the
    # rename.
    staged = out.parent / f".{out.name}.building-{uuid4().hex[:8]}"
    try:
        staged.mkdir(parents=True)
        yield staged
        refuse_existing(out)
        _sync_folder(staged)
        staged.rename(out)
        _sync_folder(out.parent)
    except OSError as error:
        raise DataError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
