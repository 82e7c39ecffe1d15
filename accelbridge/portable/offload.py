"""Movement between device, host memory and files, for any device with an ordinary ``torch.<device_type>``
module.

A stored tensor is one file, little more than its bytes; reading it never runs code:

    offset 0     8 bytes   b"abtensor"
    offset 8     4 bytes   length of the header, unsigned, little-endian
    offset 12    header    JSON: version, dtype, shape, byteorder, crc32 of the bytes
    then         bytes     the elements in row-major order
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import uuid
import zlib
from collections.abc import Sequence
from functools import cached_property
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from accelbridge.backend import Offload, Transfer
from accelbridge.errors import DataError

_MAGIC = b"abtensor"
_LENGTH = struct.Struct("<I")
_MAX_HEADER = 1 << 16
_VERSION = 1


class _Copied(Transfer):
    """A copy that is done."""

    def __init__(self, out: Tensor) -> None:
        self._out = out

    def wait(self) -> Tensor:
        return self._out


class _Copying(Transfer):
    """A copy queued on the device's current stream; keeps both ends alive."""

    def __init__(self, x: Tensor, out: Tensor, device: torch.device) -> None:
        self._x: Tensor | None = x
        self._out = out
        self._event = torch.Event(device=device)
        self._event.record()

    def wait(self) -> Tensor:
        self._event.synchronize()
        self._x = None
        return self._out

    def order(self) -> Tensor:
        torch.accelerator.current_stream().wait_event(self._event)
        self._x = None  # its memory is given to work that comes after the copy
        return self._out


class PortableOffload(Offload):
    """Copies on the device's current stream, so that they see all work queued before them and none after.

    Where torch knows the device as this machine's accelerator, copies don't block and host memory is pinned
    (unless ``pinned`` is False); elsewhere each call returns when its copy is done.
    """

    def __init__(self, device_type: str, pinned: bool = True) -> None:
        self.device_type = device_type
        self._want_pinned = pinned

    @cached_property
    def _accelerated(self) -> bool:
        # torch.accelerator promises events and pinned memory for the device it names, and for no other.
        found = torch.accelerator.current_accelerator()
        return found is not None and found.type == self.device_type and torch.accelerator.is_available()

    @property
    def pinned(self) -> bool:
        """Whether host memory made here is pinned."""
        return self._want_pinned and self._accelerated

    def lane(self) -> Offload:
        return _Lane(self.device_type, self._want_pinned) if self._accelerated else self

    def to_host(self, x: Tensor, out: Tensor | None = None) -> Transfer:
        """Start copying ``x`` into ``out``, or into new contiguous host memory; never an alias of ``x``.

        Raises ``ValueError`` where ``out`` isn't a host tensor of the shape and dtype of ``x``.
        """
        if out is None:
            out = self.host_empty(x.shape, x.dtype)
        _check_same(x, out, "cpu")
        return self._copy(x, out)

    def to_device(self, x: Tensor, out: Tensor | None = None) -> Transfer:
        """Start copying the host tensor ``x`` into ``out``, or into new memory on the bound device; never an
        alias.

        Raises ``ValueError`` where ``out`` isn't a tensor on the device of the shape and dtype of ``x``.
        """
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=self.device_type)
        _check_same(x, out, self.device_type)
        return self._copy(x, out)

    def write(self, path: Path, x: Tensor) -> None:
        """Store the elements of ``x`` at ``path``, which appears whole or not at all, also after a power cut.

        Raises ``OSError`` if the folder is missing or full; what was at ``path`` is then still there.
        """
        payload = _as_bytes(x if x.device.type == "cpu" else self.to_host(x).wait())
        header = {
            "version": _VERSION,
            "dtype": _dtype_name(x.dtype),
            "shape": list(x.shape),
            "byteorder": sys.byteorder,
            "crc32": zlib.crc32(payload),
        }
        text = json.dumps(header).encode()
        # In the same folder, as only a rename within one file system is atomic.
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "xb") as file:
                file.write(_MAGIC + _LENGTH.pack(len(text)) + text)
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def read(self, path: Path, out: Tensor) -> Tensor:
        """Fill ``out`` with the elements stored at ``path`` and return it.

        Raises ``DataError`` if the file is missing, damaged, or of another dtype or shape; ``out`` is then as
        before.
        """
        try:
            with open(path, "rb") as file:
                host = self._read_host(path, file, out)
        except FileNotFoundError:
            raise DataError(f"{path}: asked to read a tensor, found no such file; was it written?") from None
        self._copy(host, out).wait()
        return out

    def _read_host(self, path: Path, file: BufferedReader, out: Tensor) -> Tensor:
        header = _read_header(path, file)
        asked = {"version": _VERSION, "dtype": _dtype_name(out.dtype), "shape": list(out.shape)}
        asked["byteorder"] = sys.byteorder
        for key, value in asked.items():
            if header.get(key) != value:
                raise DataError(f"{path}: asked for {key} {value}, found {header.get(key)}; is it of another run?")
        size = math.prod(out.shape) * out.dtype.itemsize
        found = os.fstat(file.fileno()).st_size - file.tell()
        if found != size:
            raise DataError(f"{path}: asked for {size} bytes of elements, found {found}; write the file again")
        host = self.host_empty(out.shape, out.dtype)
        buffer = _as_bytes(host)
        if file.readinto(buffer) != size or zlib.crc32(buffer) != header.get("crc32"):
            raise DataError(f"{path}: the checksum of the elements differs, the file is damaged; write it again")
        return host

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self.pinned)

    def _copy(self, x: Tensor, out: Tensor) -> Transfer:
        x, target = x.detach(), out.detach()
        if not self._accelerated or x.device == target.device:
            target.copy_(x)
            return _Copied(out)
        target.copy_(x, non_blocking=True)
        return _Copying(x, out, x.device if target.device.type == "cpu" else target.device)


class _Lane(PortableOffload):
    """Copies on a stream of their own. No memory is recorded on it: a source lives until its :class:`Transfer` is
    waited for or ordered, and a destination is of the stream on which it will be used."""

    @cached_property
    def _stream(self) -> torch.Stream:
        return torch.Stream(device=torch.accelerator.current_stream().device)

    def _copy(self, x: Tensor, out: Tensor) -> Transfer:
        ours = torch.accelerator.current_stream()
        self._stream.wait_stream(ours)
        torch.accelerator.set_stream(self._stream)
        try:
            return super()._copy(x, out)
        finally:
            torch.accelerator.set_stream(ours)


def _check_same(x: Tensor, out: Tensor, device_type: str) -> None:
    # copy_ would broadcast and convert without a word.
    if out.shape != x.shape or out.dtype != x.dtype or out.device.type != device_type:
        raise ValueError(
            f"the destination must be {_dtype_name(x.dtype)} {tuple(x.shape)} on {device_type}; "
            f"found {_dtype_name(out.dtype)} {tuple(out.shape)} on {out.device.type}"
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_bytes(x: Tensor) -> memoryview:
    """The elements of a host tensor in row-major order; its own memory if it is contiguous."""
    plain = x.detach().resolve_conj().resolve_neg().contiguous()
    # Flattened first: a 0-d tensor can't be viewed in another size of element.
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _read_header(path: Path, file: BufferedReader) -> dict[str, object]:
    start = file.read(len(_MAGIC) + _LENGTH.size)
    if len(start) == len(_MAGIC) + _LENGTH.size and start.startswith(_MAGIC):
        (length,) = _LENGTH.unpack_from(start, len(_MAGIC))
        if length <= _MAX_HEADER:
            try:
                header = json.loads(file.read(length))
            except (ValueError, RecursionError):
                header = None
            if isinstance(header, dict):
                return header
    raise DataError(f"{path}: asked for a stored tensor, found a file without its header; write it again")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
