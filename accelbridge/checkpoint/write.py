"""Writing this rank's shard: checksums are computed while the bytes are on their way to the disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from accelbridge.checkpoint import manifest as manifests
from accelbridge.errors import CheckpointError

_WORTH_A_THREAD = 2**18
"""Bytes from which hashing beside the write is faster than hashing before it."""


def write_shards(path: Path, state: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, dict[str, Any]]:
    """Write ``state`` (tensors in host memory) into the folder ``path``; all ranks of ``group`` call it.

    Returns file name -> {"bytes", "sha256"} of the files that this rank wrote. Raises torch's CheckpointException
    on all ranks where one fails; the CheckpointError in it names file, cause, and bytes needed and free.
    """
    with _HashingFiles(local_bytes(state)) as files:
        writer = dcp.FileSystemWriter(path, overwrite=False)
        writer.fs = files
        dcp.save(dict(state), storage_writer=writer, process_group=group, no_dist=group is None)
        written = files.fingerprints
    if dist.get_rank(group) if group is not None else 0:
        return written
    # Written under another name and renamed by torch.
    return {name: entry for name, entry in written.items() if not name.startswith(manifests.METADATA)} | {
        manifests.METADATA: manifests.fingerprint(path / manifests.METADATA)
    }


def local_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of this rank's part of ``state``."""
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in state.values()]
    return sum(part.numel() * part.element_size() for part in parts)


def cannot_write(file: Path, error: OSError, needed: int | None = None) -> CheckpointError:
    """The error of the system with what a user needs beside it."""
    parent = next((folder for folder in (file, *file.parents) if folder.is_dir()), Path("/"))
    with contextlib.suppress(OSError):
        free = f"{shutil.disk_usage(parent).free} bytes are free there"
        need = f"this rank's part takes {needed} bytes, {free}" if needed is not None else free
        return CheckpointError(f"{file} cannot be written: {error.strerror or error}; {need}; {_advice(error)}")
    return CheckpointError(f"{file} cannot be written: {error.strerror or error}; {_advice(error)}")


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room, keep fewer (checkpoint.keep), or set another output.dir"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make the folder writable, or set another output.dir"
    return "look at the disk, or set another output.dir"


class _HashingFiles(FileSystem):
    """Files that are hashed as they are written; ``fingerprints`` has those that are done."""

    def __init__(self, needed: int) -> None:
        self.fingerprints: dict[str, dict[str, Any]] = {}
        self._needed = needed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="accelbridge-sha256")

    def __enter__(self) -> _HashingFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        file = Path(path)
        try:
            with file.open(mode) as stream:
                hashing = _Hashing(cast(IO[bytes], stream), self._thread)
                yield hashing
                hashing.check()
        except OSError as error:
            raise cannot_write(file, error, self._needed) from error
        self.fingerprints[file.name] = {"bytes": hashing.written, "sha256": hashing.digest.hexdigest()}


class _Hashing:
    """A stream that hashes what it writes. An error of the system waits for :meth:`check`: torch writes through C++,
    which turns an exception into one without the cause."""

    def __init__(self, stream: IO[bytes], thread: ThreadPoolExecutor) -> None:
        self._stream = stream
        self._thread = thread
        self._error: OSError | None = None
        self.digest = hashlib.sha256()
        self.written = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.written += size
        if self._error is not None:
            return size
        # Both release the interpreter's lock; the memory is valid during this call only.
        beside = self._thread.submit(self.digest.update, data) if size >= _WORTH_A_THREAD else None
        try:
            self._stream.write(data)
        except OSError as error:
            self._error = error
        if beside is not None:
            beside.result()
        else:
            self.digest.update(data)
        return size

    def tell(self) -> int:
        return self.written

    def flush(self) -> None:
        if self._error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._error = error

    def fileno(self) -> int:
        self.check()  # asked for to make the file durable, which would hide that it is not whole
        return self._stream.fileno()

    def close(self) -> None:
        self.flush()

    def check(self) -> None:
        """Raise the error that came first."""
        if self._error is not None:
            raise self._error
