"""How fast a disk is, by the store itself: checksums, alignment and queue depth as in a run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from accelbridge.memory.store.files import Files
from accelbridge.memory.store.layout import Record
from accelbridge.memory.store.place import look_at
from accelbridge.memory.store.store import FileStore, StoreOptions
from accelbridge.memory.store.transfer import Handle

_RECORD = 8 << 20
_MOST_RECORDS = 32
_LEAST = 1 << 20


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second."""

    read: float
    write: float
    direct: bool
    """False: the page cache had a part in it, and the disk itself may be slower."""

    def shortfall(self, needed: float, verb: str = "read") -> str | None:
        """What to warn of where a step needs ``needed`` bytes per second of ``verb`` (read, write) to be hidden."""
        found = getattr(self, verb)
        if found >= needed:
            return None
        return f"this disk {verb}s {found / 1e9:.1f} GB/s; the step needs {needed / 1e9:.1f} GB/s to hide it"


def measure(
    folder: Path, seconds: float = 2.0, options: StoreOptions | None = None, files: Files | None = None
) -> Bandwidth:
    """Write and read a file in ``folder`` for half of ``seconds`` each, and remove it.

    Takes 256 MiB of the disk, or less: a quarter of what is free, and what is written once in half of ``seconds``.
    Raises StoreError.
    """
    place = look_at(folder, files)
    size = _RECORD if place.free // 4 >= 4 * _RECORD else _LEAST
    count = max(2, min(_MOST_RECORDS, place.free // 4 // size))
    records = [Record(str(number), (size,), torch.uint8) for number in range(count)]
    path = folder / f".accelbridge-{uuid.uuid4().hex}.bandwidth"
    try:
        with FileStore.create(path, records, options, files) as store:
            # Bytes that a disk cannot leave out as zeros, or compress.
            tensors = [store.empty(record.name).random_() for record in records[:2]]
            written = _written_once(store, tensors[0], seconds / 2)
            write = _rate(lambda turn: store.write(str(turn % written), tensors[turn % 2], turn), size, seconds / 2)
            store.sync()
            read = _rate(lambda turn: store.read(str(turn % written), tensors[turn % 2]), size, seconds / 2)
            return Bandwidth(read, write, place.direct)
    finally:
        path.unlink(missing_ok=True)


def _written_once(store: FileStore, x: Tensor, seconds: float) -> int:
    """Write the first records, as space that was never written is slower; returns how many it were, 2 or more."""
    began = time.monotonic()
    for number, name in enumerate(store.layout.slots):
        if number >= 2 and time.monotonic() - began >= seconds:
            return number
        store.write(name, x, 0).wait()
    return len(store.layout.slots)


def _rate(start: Callable[[int], Handle], size: int, seconds: float) -> float:
    """Bytes per second of ``start(turn)``, with the next one always begun before the last is waited for."""
    began = time.monotonic()
    under_way, turn = start(0), 1
    while time.monotonic() - began < seconds:
        following = start(turn)
        under_way.wait()
        under_way, turn = following, turn + 1
    under_way.wait()
    return turn * size / (time.monotonic() - began)
