"""What the file store of offloaded state makes of a disk, beside fio.

    .venv/bin/python benchmarks/offload.py --out benchmarks/results

fio (from the distribution's packages) with io_uring, and the store with its threads: the same file system, block size,
queue depth, direct I/O and bytes, a file that is there already, in turns within one run. The store computes and
compares a crc32 of every block, and fio nothing. Two ways of ours: tensors from ``FileStore.empty``, which the disk
reads and writes where they are, and tensors of torch's allocator, which pass through staging buffers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from arms import Ratio, end_on_sigterm, head, machine, row, write
from torch import Tensor

from accelbridge.memory.store import FileStore, Record, StoreOptions
from accelbridge.memory.store.place import look_at

TARGET = 0.9
"""Least bandwidth of the store, as a share of fio's."""
RECORD = 32 << 20
OURS = ("aligned", "staged")


@dataclass
class Arm:
    """One way to move bytes, and bytes per second of every turn."""

    name: str
    read: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)


def fio(path: Path, verb: str, size: int, options: StoreOptions, seconds: float) -> float:
    """Bytes per second of fio."""
    command = [
        "fio", "--name=peer", f"--filename={path}", f"--size={size}", f"--rw={verb}", "--direct=1",
        "--ioengine=io_uring", f"--bs={options.buffer_size}", f"--iodepth={options.queue_depth}", "--overwrite=1",
        "--time_based", f"--runtime={seconds}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["jobs"][0][verb]["bw_bytes"]


def ours(store: FileStore, verb: str, tensors: list[Tensor], seconds: float) -> float:
    """Bytes per second of the store; the next record is always under way before the last one is waited for."""
    names = list(store.layout.slots)
    under_way, began = [], time.monotonic()
    turn = 0
    while time.monotonic() - began < seconds:
        tensor, name = tensors[turn % len(tensors)], names[turn % len(names)]
        handle = store.write(name, tensor, turn) if verb == "write" else store.read(name, tensor)
        under_way.append(handle)
        if len(under_way) == len(tensors):
            under_way.pop(0).wait()
        turn += 1
    for handle in under_way:
        handle.wait()
    return turn * RECORD / (time.monotonic() - began)


def measure(options: argparse.Namespace, folder: Path) -> list[Arm]:
    how = StoreOptions(buffer_size=options.block, queue_depth=options.depth, buffer_count=options.depth)
    records = [Record(str(number), (RECORD,), torch.uint8) for number in range(options.megabytes * 10**6 // RECORD)]
    arms = {name: Arm(name) for name in ("fio", *OURS)}
    with FileStore.create(folder / "store", records, how) as store:
        tensors = {"aligned": [store.empty("0").random_() for _ in range(2)]}
        tensors["staged"] = [torch.empty(RECORD + 8, dtype=torch.uint8)[8:].copy_(t) for t in tensors["aligned"]]
        for record in records:  # space that was never written is not what a step meets
            store.write(record.name, tensors["aligned"][0], 0).wait()
        size = len(records) * RECORD
        fio(folder / "fio", "write", size, how, 1.0)
        for turn in range(options.turns):
            order = list(arms) if turn % 2 == 0 else list(reversed(arms))
            for verb in ("write", "read"):
                for name in order:
                    run = (
                        fio(folder / "fio", verb, size, how, options.seconds)
                        if name == "fio"
                        else ours(store, verb, tensors[name], options.seconds)
                    )
                    getattr(arms[name], verb).append(run)
    return list(arms.values())


def table(arms: list[Arm]) -> tuple[str, dict[str, Any]]:
    """Markdown and verdicts, by bandwidths of ours over those of fio, turn by turn."""
    lines = [head("", "write, MB/s", "share of fio [95 %]", "read, MB/s", "share of fio [95 %]", f"target {TARGET}")]
    peer, verdicts = arms[0], {}
    for arm in arms:
        shares = {verb: Ratio.of(getattr(arm, verb), getattr(peer, verb)) for verb in ("write", "read")}
        cells = [f"{statistics.median(getattr(arm, verb)) / 1e6:.0f}" for verb in shares]
        verdict = ""
        if arm is not peer:
            verdicts[arm.name] = {verb: {**asdict(r), "verdict": judge(r)} for verb, r in shares.items()}
            verdict = ", ".join(f"{verb} {judge(ratio)}" for verb, ratio in shares.items())
        shown = [str(ratio) if arm is not peer else "1" for ratio in shares.values()]
        lines.append(row(arm.name, cells[0], shown[0], cells[1], shown[1], verdict))
    return "\n".join(lines), verdicts


def judge(share: Ratio) -> str:
    if share.low >= TARGET:
        return "PASS"
    return "within the spread" if share.high >= TARGET else "FAIL"


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="of each file")
    parser.add_argument("--block", type=int, default=1 << 20, help="bytes of one read or write")
    parser.add_argument("--depth", type=int, default=8, help="of them under way at once")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one turn")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk that is measured")
    parser.add_argument("--out", type=Path, help="folder for the results, for example benchmarks/results")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio asked; it is not installed; install the distribution's package fio")
    place = look_at(options.folder)
    for warning in place.warnings:
        sys.exit(f"{warning}; this compares direct I/O")
    torch.set_num_threads(1)
    facts = machine() | {"ranks": 1, "file_system": place.file_system, "block": options.block, "depth": options.depth}
    facts["fio"] = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="offload-", dir=options.folder) as folder:
        arms = measure(options, Path(folder))
    text, verdicts = table(arms)
    print(text)
    if options.out:
        date = time.strftime("%Y-%m-%d")
        title = f"The file store beside fio, {date}; {options.turns} turns of {options.seconds:g} s each, medians"
        result = {"date": date, "machine": facts, "verdicts": verdicts, "arms": [asdict(arm) for arm in arms]}
        write(options.out, f"offload-{date}", result, title, text, facts)


if __name__ == "__main__":
    main()
