"""A record on its way to or from the file: blocks that threads move, and the handle that waits for all of them."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait

import numpy as np
from torch import Tensor

from accelbridge.memory.store.buffers import ALIGNMENT, StagingBuffers, round_up
from accelbridge.memory.store.errors import StoreDeviceError, StoreError, translated
from accelbridge.memory.store.files import Files


class Handle:
    """A read or write that goes on, and the tensor that it needs: one lives as long as the other.

    Until :meth:`wait` returns, nobody may change the tensor of a write, or look at or change that of a read.
    """

    def __init__(self, x: Tensor) -> None:
        self._x: Tensor | None = x
        self._futures: list[Future[None]] = []
        self._error: StoreError | None = None
        self._crashed = False
        self._lock = threading.Lock()

    def start(self, executor: Executor, tasks: Sequence[Callable[[], None]], finish: Callable[[], None]) -> Handle:
        """Run ``tasks`` on ``executor``; once all have ended well, ``finish`` by the thread that ends the last."""
        left = [len(tasks)]

        def run(task: Callable[[], None]) -> None:
            try:
                if self._error is None:  # the rest of a record that cannot be whole is not worth its time
                    task()
            except StoreError as error:
                self._error = self._error or error
            except BaseException:  # a bug: settle() raises it
                self._crashed = True
                raise
            finally:
                with self._lock:
                    left[0] -= 1
                    last = left[0] == 0
                if last and self._error is None and not self._crashed:
                    self._end(finish)

        self._futures = [executor.submit(run, task) for task in tasks]
        if not tasks:
            self._futures = [executor.submit(self._end, finish)]
        return self

    def _end(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except StoreError as error:
            self._error = error

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return all(future.done() for future in self._futures)

    def settle(self) -> None:
        """Wait for the end, whatever it is. A bug in a thread is raised here as it was."""
        wait(self._futures)
        for future in self._futures:
            future.result()

    def wait(self) -> Tensor:
        """Wait, and return the tensor. Raises StoreError; a tensor that was read into then has undefined contents."""
        self.settle()
        if self._error is not None:
            self._x = None
            raise self._error
        assert self._x is not None
        return self._x


class BlockMover:
    """Moves blocks between memory and an open file, whole, through staging buffers where memory is not aligned."""

    def __init__(self, files: Files, descriptor: int, direct: bool, staging: StagingBuffers | None, name: str) -> None:
        self._files = files
        self._descriptor = descriptor
        self._direct = direct
        self._staging = staging
        self._name = name

    def write(self, data: memoryview, address: int, offset: int) -> int:
        """Write ``data``, which lies at ``address``, and return its crc32."""
        if not self._needs_staging(address, len(data)):
            found = zlib.crc32(data)
            self._all(self._files.write, "write", data, offset)
            return found
        assert self._staging is not None
        with self._staging.one() as buffer:
            _copy(buffer, data)
            whole = round_up(len(data))
            buffer[len(data) : whole] = bytes(whole - len(data))
            found = zlib.crc32(buffer[: len(data)])
            self._all(self._files.write, "write", buffer[:whole], offset)
        return found

    def read(self, data: memoryview, address: int, offset: int) -> int:
        """Fill ``data``, which lies at ``address``, and return the crc32 of what is then there."""
        if not self._needs_staging(address, len(data)):
            self._all(self._files.read, "read", data, offset)
            return zlib.crc32(data)
        assert self._staging is not None
        with self._staging.one() as buffer:
            self._all(self._files.read, "read", buffer[: round_up(len(data))], offset)
            _copy(data, buffer[: len(data)])
        return zlib.crc32(data)

    def _needs_staging(self, address: int, size: int) -> bool:
        return self._direct and (address % ALIGNMENT != 0 or size % ALIGNMENT != 0)

    def _all(self, call: Callable[[int, list[memoryview], int], int], verb: str, data: memoryview, offset: int) -> None:
        """Repeat ``call`` until all of ``data`` is moved: it may end early. Raises StoreError."""
        done = 0
        asked = f"{verb} of {len(data):,} bytes at {offset:,} of {self._name} asked"
        while done < len(data):
            try:
                moved = call(self._descriptor, [data[done:]], offset + done)
            except OSError as error:
                raise translated(asked, error) from error
            done += moved
            if self._direct and done < len(data):
                done -= done % ALIGNMENT  # what follows must be aligned again
                moved = moved if done else 0
            if moved == 0:
                raise StoreDeviceError(
                    f"{asked}; it ended after {done:,} bytes: the file is shorter than it was made, or its device does "
                    "not take more; resume from the last checkpoint"
                )


def _copy(target: memoryview, source: memoryview) -> None:
    """Into the beginning of ``target``. By NumPy, which lets go of the interpreter's lock as a slice does not."""
    np.copyto(np.frombuffer(target, np.uint8, len(source)), np.frombuffer(source, np.uint8))
