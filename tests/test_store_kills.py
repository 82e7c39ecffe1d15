"""SIGKILL at any moment of a process that writes: what can be read afterwards is a whole write, and the newest stays.

The writer says on a pipe what it has begun and what has ended well, one line each. After a kill, the record is either
the write that ended last, or a later one that had begun and is whole, or it is refused: never a mixture, and never
older than what had ended well.
"""

from __future__ import annotations

import multiprocessing as mp
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from accelbridge.memory.store import DamagedRecord, FileStore, Record, StoreOptions
from tests.ranks import PRELOAD, START_S

OPTIONS = StoreOptions(buffer_size=64 << 10, buffer_count=3, queue_depth=4)
RECORDS = [Record(name, (300_001,), torch.float32) for name in ("a", "b", "c")]


def content(name: str, generation: int) -> torch.Tensor:
    """What the writer gives ``name``: every element depends on the generation."""
    return torch.arange(300_001, dtype=torch.float32) * (generation + 1) + ord(name)


def write(path: Path, generation: int, pipe: Connection) -> None:
    """Write all records, generation after generation, and say so, until somebody kills this."""
    torch.set_num_threads(1)
    with FileStore.open(path, OPTIONS) as store:
        while True:
            under_way = []
            for name in store.layout.slots:
                x = content(name, generation)
                pipe.send(("begun", name, generation))
                under_way.append((name, store.write(name, x, generation)))
            for name, handle in under_way:
                handle.wait()
                pipe.send(("ended", name, generation))
            generation += 1


def killed_after(path: Path, generation: int, seconds: float) -> tuple[dict[str, int], dict[str, int]]:
    """Let a writer run for ``seconds`` from its first write on; the newest generation that began, and that ended."""
    context: Any = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=write, args=(path, generation, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(START_S), "the writer came to its first write"
    time.sleep(seconds)
    process.kill()
    process.join()
    assert process.exitcode == -9
    seen: dict[str, dict[str, int]] = {"begun": {}, "ended": {}}
    try:
        while True:
            what, name, number = ours.recv()
            seen[what][name] = number
    except EOFError:
        ours.close()
    return seen["begun"], seen["ended"]


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.full)])
def test_no_kill_leaves_torn_data(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "store"
    FileStore.create(path, RECORDS, OPTIONS).close()
    newest = dict.fromkeys("abc", -1)
    generation, whole, refused = 0, 0, 0
    for _ in range(kills):
        begun, ended = killed_after(path, generation, random.uniform(0, 0.1))
        newest |= ended
        with FileStore.open(path, OPTIONS) as store:
            for name in "abc":
                found = store.generation(name)
                try:
                    x = store.read(name, store.empty(name)).wait()
                except DamagedRecord:
                    # Only a write that had begun and not ended can have torn it.
                    assert begun.get(name, -1) > ended.get(name, -1) or newest[name] == -1
                    refused += 1
                    newest[name] = -1
                    continue
                assert found is not None
                assert torch.equal(x, content(name, found)), f"{name} of generation {found} is another's"
                assert newest[name] <= found <= max(begun.get(name, -1), newest[name])
                newest[name] = found
                whole += 1
        generation = max(generation, *begun.values()) + 1
    assert whole + refused == 3 * kills
    assert whole > 0
    if kills == 50:
        assert refused > 0, "no kill hit a write: nothing was tested"
