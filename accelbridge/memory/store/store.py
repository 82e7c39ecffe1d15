"""Reading and writing the records of a store.

Why threads and not io_uring: a block here is not only moved. Its checksum is computed and, where memory is not
aligned, it is copied, both best by the thread that moves it, while the kernel works for the others; a ring would save
one system call per block of a mebibyte. And Python has no ring to recommend: ``liburing`` 2026.3.30 on PyPI calls
itself alpha and needs Linux 6.14. ``benchmarks/offload.py`` holds the threads against fio's io_uring.

Checksums are zlib's crc32, which releases the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Self

import psutil
from pydantic import Field
from torch import Tensor

from accelbridge.config import Section
from accelbridge.memory.store.buffers import ALIGNMENT, Allocate, StagingBuffers, aligned, as_bytes, round_up
from accelbridge.memory.store.errors import DamagedRecord, StoreError, StoreGone, translated
from accelbridge.memory.store.files import DIRECT, Files
from accelbridge.memory.store.layout import Layout, Record, Slot
from accelbridge.memory.store.place import Place, check_memory, check_space, look_at
from accelbridge.memory.store.transfer import BlockMover, Handle


class StoreOptions(Section):
    """How a store moves bytes."""

    buffer_count: Annotated[int, Field(ge=1, le=4096)] = 8
    """Staging buffers of host memory, for tensors that are not aligned."""
    buffer_size: Annotated[int, Field(ge=ALIGNMENT, multiple_of=ALIGNMENT)] = 1 << 20
    """Bytes of each, and of one read or write of the file."""
    queue_depth: Annotated[int, Field(ge=1, le=256)] = 8
    """Reads and writes that are under way at once."""


class FileStore:
    """Tensors of one rank in one file. Made by :meth:`create` or :meth:`open`; a context manager.

    Calls come from one thread. Reads and writes of one record follow each other in the order of the calls; those of
    different records overlap.
    """

    def __init__(
        self, path: Path, place: Place, layout: Layout, options: StoreOptions, files: Files, descriptor: int,
        allocate: Allocate,
    ) -> None:  # fmt: skip
        self.path = path
        self.place = place
        self.layout = layout
        self.options = options
        self._files = files
        self._descriptor = descriptor
        staging = StagingBuffers(options.buffer_count, layout.block, allocate) if place.direct else None
        self._mover = BlockMover(files, descriptor, place.direct, staging, str(path))
        self._executor = ThreadPoolExecutor(options.queue_depth, thread_name_prefix="accelbridge-store")
        self._whole: dict[str, tuple[int, Sequence[int]]] = {}
        """Generation and checksums of records whose header is known to be the one in the file."""
        self._under_way: dict[str, Handle] = {}
        self._closed = False

    # ------------------------------------------------------------------------------------------- making, opening

    @classmethod
    def create(
        cls, path: Path, records: Sequence[Record], options: StoreOptions | None = None, files: Files | None = None,
        allocate: Allocate = aligned,
    ) -> FileStore:  # fmt: skip
        """A new store at ``path``, which replaces one that is there and in use by nobody.

        All space is reserved before this returns. Raises StoreFull with the bytes that are missing, StoreGone,
        StoreReadOnly or another StoreError; what was at ``path`` is then still there.
        """
        options, files = options or StoreOptions(), files or Files()
        place = look_at(path.parent, files)
        check_memory(options.buffer_count, options.buffer_size, psutil.virtual_memory().available)
        layout = Layout(records, options.buffer_size)
        asked = f"a store of {layout.size:,} bytes at {path} asked"
        temporary = path.with_name(f"{path.name}.tmp")
        try:
            temporary.unlink(missing_ok=True)  # of a process that was killed here: it may be as large
            check_space(path.parent, layout.size, files.free(path.parent))
            descriptor = files.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _flag(place))
            try:
                _lock(files, descriptor, temporary)
                files.allocate(descriptor, layout.size)
                start = aligned(len(layout.superblock))
                as_bytes(start)[:] = layout.superblock
                mover = BlockMover(files, descriptor, place.direct, None, str(path))
                mover.write(as_bytes(start), start.data_ptr(), 0)
                _in_use_by_nobody(files, path)
                files.sync(descriptor)
                files.replace(temporary, path)
            except BaseException:
                files.close(descriptor)
                raise
        except BaseException as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise translated(asked, error) from error
            raise
        return cls(path, place, layout, options, files, descriptor, allocate)

    @classmethod
    def open(
        cls, path: Path, options: StoreOptions | None = None, files: Files | None = None, allocate: Allocate = aligned
    ) -> FileStore:
        """The store that is at ``path``, after whatever happened to the process that wrote it.

        ``options.buffer_size`` is the one that it was made with. Raises StoreGone where there is no file, and
        DamagedRecord where it is no store.
        """
        options, files = options or StoreOptions(), files or Files()
        place = look_at(path.parent, files)
        asked = f"the store at {path} asked"
        try:
            descriptor = files.open(path, os.O_RDWR | _flag(place))
        except OSError as error:
            raise translated(asked, error) from error
        try:
            _lock(files, descriptor, path)
            layout = _read_layout(BlockMover(files, descriptor, place.direct, None, str(path)), asked)
            check_memory(options.buffer_count, layout.block, psutil.virtual_memory().available)
            return cls(path, place, layout, options, files, descriptor, allocate)
        except BaseException:
            files.close(descriptor)
            raise

    def describe(self) -> dict[str, object]:
        """How this store works, for a plan."""
        return {
            "path": str(self.path),
            "bytes": self.layout.size,
            "file_system": self.place.file_system,
            "direct": self.place.direct or self.place.why_not_direct,
            "engine": f"{self.options.queue_depth} threads of preadv and pwritev",
            "block": self.layout.block,
            "staging": f"{self.options.buffer_count} buffers" if self.place.direct else "none",
            "checksum": "crc32 of every block",
            "warnings": self.place.warnings,
        }

    # ------------------------------------------------------------------------------------------ reading, writing

    def empty(self, name: str) -> Tensor:
        """Host memory for a record, aligned and padded so that no staging buffer is needed."""
        record = self._slot(name).record
        return aligned(round_up(record.size))[: record.size].view(record.dtype).reshape(record.shape)

    def write(self, name: str, x: Tensor, generation: int) -> Handle:
        """Start storing the contiguous host tensor ``x`` as the record ``name``.

        ``generation`` (0 or more, such as the count of updates) is what a later :meth:`read` can ask for. Until the
        handle has ended well the record counts as not whole. Raises ``ValueError`` for another shape or dtype.
        """
        slot = self._begin(name, x)
        self._whole.pop(name, None)
        sums = [0] * slot.blocks
        data, address = as_bytes(x), x.data_ptr()

        def block(number: int) -> None:
            first, size = slot.span(number)
            part = data[first : first + size]
            sums[number] = self._mover.write(part, address + first, slot.payload + first)

        def finish() -> None:
            header = aligned(slot.header_size)
            as_bytes(header)[:] = slot.header(generation, sums)
            self._mover.write(as_bytes(header), header.data_ptr(), slot.offset)
            self._whole[name] = (generation, sums)

        return self._start(name, x, [partial(block, number) for number in range(slot.blocks)], finish)

    def read(self, name: str, out: Tensor, generation: int | None = None) -> Handle:
        """Start filling the contiguous host tensor ``out`` with the record ``name``.

        The handle raises DamagedRecord where the record is torn, damaged, never written, or of another generation
        than the one that is given. Raises ``ValueError`` for another shape or dtype.
        """
        slot = self._begin(name, out)
        data, address = as_bytes(out), out.data_ptr()
        known: list[tuple[int, Sequence[int]]] = []

        def header() -> None:
            known.append(self._whole.get(name) or self._read_header(slot))
            if generation is not None and known[0][0] != generation:
                raise _damaged(slot, f"of generation {generation}", f"it is of generation {known[0][0]}")

        def block(number: int) -> None:
            first, size = slot.span(number)
            found = self._mover.read(data[first : first + size], address + first, slot.payload + first)
            if found != known[0][1][number]:
                raise _damaged(slot, "", f"block {number} of {slot.blocks} has another checksum: torn or damaged")

        handle = Handle(out)
        try:
            header()
        except StoreError as error:
            return self._start(name, out, [partial(_fail, error)], lambda: None, handle)
        return self._start(name, out, [partial(block, n) for n in range(slot.blocks)], lambda: None, handle)

    def generation(self, name: str) -> int | None:
        """The generation that the record's header names; None if it was never written. Looks at no payload."""
        slot = self._slot(name)
        self._settle(name)
        if known := self._whole.get(name):
            return known[0]
        found = slot.parse(self._header_bytes(slot))
        return found[0] if found else None

    def sync(self) -> None:
        """Wait for all that is under way, and for the device to have it. Raises the StoreError of a failed flush."""
        for name in list(self._under_way):
            self._settle(name)
        try:
            self._files.sync(self._descriptor)
        except OSError as error:
            raise translated(f"flush of {self.path} asked", error) from error

    def close(self) -> None:
        """Wait for all that is under way and let go of the file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._executor.shutdown(wait=True)
        self._files.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------- details

    def _slot(self, name: str) -> Slot:
        if self._closed:
            raise ValueError(f"the store at {self.path} is closed")
        if name not in self.layout.slots:
            raise ValueError(f'record "{name}" asked; the store at {self.path} was made without it')
        return self.layout.slots[name]

    def _begin(self, name: str, x: Tensor) -> Slot:
        slot = self._slot(name)
        record = slot.record
        if (tuple(x.shape), x.dtype) != (record.shape, record.dtype):
            raise ValueError(
                f'record "{name}" is {record.dtype} {record.shape}; found a tensor of {x.dtype} {tuple(x.shape)}'
            )
        self._settle(name)
        return slot

    def _settle(self, name: str) -> None:
        if handle := self._under_way.pop(name, None):
            handle.settle()

    def _start(
        self, name: str, x: Tensor, tasks: Sequence[Callable[[], None]], finish: Callable[[], None],
        handle: Handle | None = None,
    ) -> Handle:  # fmt: skip
        for other in [other for other, earlier in self._under_way.items() if earlier.done()]:
            del self._under_way[other]  # so that a handle that nobody waits for does not keep its tensor
        self._under_way[name] = handle = (handle or Handle(x)).start(self._executor, tasks, finish)
        return handle

    def _header_bytes(self, slot: Slot) -> bytes:
        header = aligned(slot.header_size)
        self._mover.read(as_bytes(header), header.data_ptr(), slot.offset)
        return bytes(as_bytes(header))

    def _read_header(self, slot: Slot) -> tuple[int, Sequence[int]]:
        found = slot.parse(self._header_bytes(slot))
        if found is None:
            raise _damaged(slot, "", "it was never written whole")
        return found


def _fail(error: StoreError) -> None:
    raise error


def _damaged(slot: Slot, which: str, found: str) -> DamagedRecord:
    asked = f'record "{slot.record.name}"{which and f" {which}"} asked'
    return DamagedRecord(f"{asked}; {found}; resume from the last checkpoint")


def _flag(place: Place) -> int:
    return DIRECT if place.direct else 0


def _lock(files: Files, descriptor: int, path: Path) -> None:
    try:
        files.lock(descriptor)
    except BlockingIOError:
        raise StoreError(f"{path} asked; another process has it open; give each rank a path of its own") from None


def _in_use_by_nobody(files: Files, path: Path) -> None:
    """Raises StoreError where a process has the store at ``path`` open."""
    try:
        descriptor = files.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        _lock(files, descriptor, path)
    finally:
        files.close(descriptor)


def _read_layout(mover: BlockMover, asked: str) -> Layout:
    """The layout in the file's superblock. Raises StoreGone or DamagedRecord."""
    advice = "make a new one, and resume from the last checkpoint"
    start = aligned(ALIGNMENT)
    try:
        mover.read(as_bytes(start), start.data_ptr(), 0)
        size = Layout.superblock_size(bytes(as_bytes(start)))
        if size is not None:
            whole = aligned(size)
            mover.read(as_bytes(whole), whole.data_ptr(), 0)
            if layout := Layout.parse(bytes(as_bytes(whole))):
                return layout
    except StoreGone:
        raise
    except StoreError as error:
        raise DamagedRecord(f"{asked}; {error}; {advice}") from error
    raise DamagedRecord(f"{asked}; the file is no store of this version and machine; {advice}")
