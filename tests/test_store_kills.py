"""SIGKILL at any moment of a process that writes: what can be read afterwards is a whole write, and the newest stays.

The writer says on a pipe what it has begun and what has ended well, one line each. After a kill, the record is either
the write that ended last, or a later one that had begun and is whole, or it is refused: never a mixture, and never
older than what had ended well.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from accelbridge.memory.store import DamagedRecord, FileStore, Record, StoreOptions
from tests import cli

OPTIONS = StoreOptions(buffer_size=64 << 10, buffer_count=3, queue_depth=4)
RECORDS = [Record(name, (300_001,), torch.float32) for name in ("a", "b", "c")]
WRITER = """
import sys
from pathlib import Path
from accelbridge.memory.store import FileStore
from tests.test_store_kills import OPTIONS, content

with FileStore.open(Path(sys.argv[1]), OPTIONS) as store:
    generation = int(sys.argv[2])
    while True:
        under_way = []
        for name in store.layout.slots:
            x = content(name, generation)
            print("begun", name, generation, flush=True)
            under_way.append((name, store.write(name, x, generation)))
        for name, handle in under_way:
            handle.wait()
            print("ended", name, generation, flush=True)
        generation += 1
"""


def content(name: str, generation: int) -> torch.Tensor:
    """What the writer gives ``name``: every element depends on the generation."""
    return torch.arange(300_001, dtype=torch.float32) * (generation + 1) + ord(name)


def killed_after(path: Path, generation: int, seconds: float) -> tuple[dict[str, int], dict[str, int]]:
    """Let a writer run for ``seconds`` from its first write on; the newest generation that began, and that ended."""
    command = [sys.executable, "-c", WRITER, str(path), str(generation)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=cli.environment(), cwd=Path(__file__).parent.parent
    )
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    assert lines[0].startswith("begun"), "the writer came to its first write"
    time.sleep(seconds)
    process.kill()
    lines += process.stdout.read().splitlines()
    assert process.wait() == -9
    seen: dict[str, dict[str, int]] = {"begun": {}, "ended": {}}
    for line in lines:
        if len(words := line.split()) == 3:
            seen[words[0]][words[1]] = int(words[2])
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
