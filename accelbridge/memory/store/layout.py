"""Where everything lies in a store's file; every part begins at a multiple of 4096 bytes.

    superblock       magic, length and crc32 of a JSON text: version, identity, block size, byte order, records
    per record       header: magic, crc32 of what follows, generation, number of blocks, crc32 of every block
                     payload: the elements in row-major order, in blocks of ``block`` bytes, the last one shorter

A record is written in place: its payload, then its header. Whatever a kill leaves behind, a block belongs to a header
only if its crc32 is the one that the header has; a mixture is refused. The crc32 of a header begins with the identity
of the store and the record, so that a header of another file, or at another place, is none.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from accelbridge.errors import ConfigError
from accelbridge.memory.store.buffers import round_up
from accelbridge.memory.store.errors import DamagedRecord

VERSION = 1
MOST_SUPERBLOCK = 1 << 28
"""Bytes: a million records take less."""
_SUPER = struct.Struct("<8sII")
_SUPER_MAGIC = b"abstore\n"
_HEADER = struct.Struct("<8sIQI")
_HEADER_MAGIC = b"abrecord"


@dataclass(frozen=True)
class Record:
    """A tensor that a store has room for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """The place of a record."""

    record: Record
    offset: int
    """Of its header."""
    block: int
    identity: str
    """Of its store."""

    @property
    def blocks(self) -> int:
        return -(-self.record.size // self.block)

    @cached_property
    def header_size(self) -> int:
        return round_up(_HEADER.size + 4 * self.blocks)

    @property
    def payload(self) -> int:
        """Position of the payload."""
        return self.offset + self.header_size

    @property
    def end(self) -> int:
        return self.payload + round_up(self.record.size)

    def span(self, block: int) -> tuple[int, int]:
        """(first byte, number of bytes) of a block within the payload."""
        first = block * self.block
        return first, min(self.block, self.record.size - first)

    def header(self, generation: int, sums: Sequence[int]) -> bytes:
        """What lies at ``offset``."""
        body = struct.pack(f"<QI{len(sums)}I", generation, len(sums), *sums)
        return (_HEADER_MAGIC + struct.pack("<I", zlib.crc32(body, self._seed)) + body).ljust(self.header_size, b"\0")

    def parse(self, header: bytes) -> tuple[int, list[int]] | None:
        """(generation, crc32 of every block); None where the record was never written. Raises DamagedRecord."""
        if not any(header):
            return None
        magic, found, generation, count = _HEADER.unpack_from(header)
        if magic == _HEADER_MAGIC and count == self.blocks:
            body = header[_HEADER.size - 12 : _HEADER.size + 4 * count]
            if zlib.crc32(body, self._seed) == found:
                return generation, list(struct.unpack_from(f"<{count}I", header, _HEADER.size))
        raise DamagedRecord(
            f'record "{self.record.name}" asked; its header is damaged; resume from the last checkpoint'
        )

    @cached_property
    def _seed(self) -> int:
        record = self.record
        return zlib.crc32(repr((self.identity, record.name, record.shape, str(record.dtype))).encode())


class Layout:
    """The slots of ``records`` in blocks of ``block`` bytes."""

    def __init__(self, records: Sequence[Record], block: int, identity: str | None = None) -> None:
        self.block = block
        self.identity = identity or uuid.uuid4().hex
        self.records = tuple(records)
        self.slots: dict[str, Slot] = {}
        offset = len(self.superblock)
        for record in records:
            if record.name in self.slots:
                raise ConfigError(f'record "{record.name}" asked twice; give each a name of its own')
            self.slots[record.name] = slot = Slot(record, offset, block, self.identity)
            offset = slot.end
        self.size = offset
        """Bytes of the whole file."""

    @cached_property
    def superblock(self) -> bytes:
        """What lies at the beginning, padded."""
        records = [[r.name, list(r.shape), str(r.dtype).removeprefix("torch.")] for r in self.records]
        head = {"version": VERSION, "identity": self.identity, "block": self.block, "byteorder": sys.byteorder}
        text = json.dumps({**head, "records": records}).encode()
        content = _SUPER.pack(_SUPER_MAGIC, len(text), zlib.crc32(text)) + text
        return content.ljust(round_up(len(content)), b"\0")

    @staticmethod
    def superblock_size(start: bytes) -> int | None:
        """Bytes of the superblock that begins with ``start``; None if none does."""
        magic, length, _ = _SUPER.unpack_from(start)
        fits = magic == _SUPER_MAGIC and 0 < length <= MOST_SUPERBLOCK
        return round_up(_SUPER.size + length) if fits else None

    @classmethod
    def parse(cls, superblock: bytes) -> Layout | None:
        """The layout that :attr:`superblock` describes; None where it is damaged, or of another machine or version."""
        _, length, found = _SUPER.unpack_from(superblock)
        text = superblock[_SUPER.size : _SUPER.size + length]
        if len(text) != length or zlib.crc32(text) != found:
            return None
        head = json.loads(text)
        if (head["version"], head["byteorder"]) != (VERSION, sys.byteorder):
            return None
        records = [Record(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in head["records"]]
        return cls(records, head["block"], head["identity"])
