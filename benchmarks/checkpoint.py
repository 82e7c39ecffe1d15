"""What a checkpoint costs: how long a step waits for it, what steps cost while it is written, and how fast it is.

    .venv/bin/python benchmarks/checkpoint.py --out benchmarks/results

One process with a state of float32 tensors in host memory, as a rank on the CPU has it; the local disk. Ways to save
take turns, in an order that is reversed every time:

    accelbridge         Checkpointer: staged copy, SHA-256 of every byte, fsync, manifest, one rename
    dcp.async_save      torch.distributed.checkpoint.async_save: staged copy, fsync; no checksums, no publishing
    torch.save          one file, with an fsync; nothing goes on meanwhile

Beside them stands a copy of the same bytes into memory that is there already: no save that lets the next step change
the state can wait less. While each writes in the background, steps (matrix products of one thread) go on and are timed.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from arms import Ratio, end_on_sigterm, head, machine, row, write

from accelbridge.checkpoint.manifest import Manifest, complete
from accelbridge.checkpoint.save import Checkpointer

TARGET = 1.3
"""Most that an asynchronous save may stall, in copies of the same bytes."""
STEP_S = 0.02
"""About what one step takes."""
SKIPPED = 1
"""First turns in which buffers are allocated; they are in the result on their own."""


@dataclass
class Arm:
    """One way to save, and what it took."""

    name: str
    begin: Callable[[int], Callable[[], None]]
    """Start the save of a step; returns how to wait for its end."""
    stall: list[float] = field(default_factory=list)
    """Seconds until the state may change."""
    total: list[float] = field(default_factory=list)
    """Seconds until it is on the disk."""
    slow_down: list[float] = field(default_factory=list)
    """Median step while it is written over median step with nothing else, just before."""

    def turn(self, number: int, step: Callable[[], None]) -> None:
        alone = timed(step, 15)
        began = time.perf_counter()
        wait = self.begin(number)
        self.stall.append(time.perf_counter() - began)
        ended: list[float] = []
        thread = threading.Thread(target=lambda: (wait(), ended.append(time.perf_counter())))
        thread.start()
        during = []
        while thread.is_alive():
            during += timed(step, 1)
        self.total.append(ended[0] - began)
        during = during[:-1]  # the last may have run on alone
        self.slow_down.append(statistics.median(during) / statistics.median(alone) if len(during) >= 3 else 1.0)


def timed(step: Callable[[], None], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


def make_state(megabytes: int) -> dict[str, torch.Tensor]:
    """As a decoder of some 4096 features has it: many matrices of 16 MiB, and small vectors."""
    state = {f"layers.{i}.weight": torch.randn(2048, 2048) for i in range(max(1, megabytes * 2**20 // 2**24))}
    return state | {f"layers.{i}.norm": torch.randn(2048) for i in range(len(state))}


def make_step() -> Callable[[], None]:
    """A step of about STEP_S that uses one thread and little memory."""
    a = torch.randn(384, 384)
    began = time.perf_counter()
    for _ in range(20):
        torch.mm(a, a)
    count = max(1, round(STEP_S / ((time.perf_counter() - began) / 20)))

    def step() -> None:
        for _ in range(count):
            torch.mm(a, a)

    return step


def arms(state: dict[str, torch.Tensor], folder: Path) -> tuple[list[Arm], Checkpointer]:
    saver = Checkpointer(folder / "ours", group=None, rank=0)

    def ours(number: int) -> Callable[[], None]:
        saver.save(state, Manifest(step=number + 1, world_size=1))
        return saver.wait

    def theirs(number: int) -> Callable[[], None]:
        future = dcp.async_save(dict(state), checkpoint_id=folder / "dcp" / str(number), no_dist=True)

        def wait() -> None:
            future.result()  # type: ignore[union-attr]

        return wait

    def plain(number: int) -> Callable[[], None]:
        with (folder / f"plain_{number}").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    return [Arm("accelbridge", ours), Arm("dcp.async_save", theirs), Arm("torch.save", plain)], saver


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    state, step = make_state(options.megabytes), make_step()
    size = sum(t.nbytes for t in state.values())
    target = {name: torch.empty_like(t) for name, t in state.items()}
    copies: list[float] = []

    def copy() -> None:
        for name, tensor in state.items():
            target[name].copy_(tensor)

    copy()  # its memory is there
    ways, saver = arms(state, folder)
    for turn in range(options.turns + SKIPPED):
        for arm in ways if turn % 2 == 0 else reversed(ways):
            beside = arm.name == "accelbridge"
            before = timed(copy, 1)[0] if beside else 0.0
            arm.turn(turn, step)
            if beside:
                copies.append((before + timed(copy, 1)[0]) / 2)
            clean(folder)
    saver.close()
    return {"bytes": size, "copy_seconds": copies, "arms": [vars(arm) | {"begin": None} for arm in ways]}


def clean(folder: Path) -> None:
    """What was written is deleted, and the disk is idle, before the next turn."""
    for path in complete(folder / "ours"):
        shutil.rmtree(path)
    shutil.rmtree(folder / "dcp", ignore_errors=True)
    for path in folder.glob("plain_*"):
        path.unlink()
    os.sync()


def spread(values: list[float], scale: float = 1.0, digits: int = 2) -> str:
    """Median, and the least and greatest."""
    shown = (statistics.median(values) * scale, min(values) * scale, max(values) * scale)
    return "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*shown, d=digits)


def table(found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    size, copies = found["bytes"], found["copy_seconds"][SKIPPED:]
    lines = [
        head(
            "save of " + f"{size / 1e6:.0f} MB",
            "stall, ms",
            "stall / copy [95 %]",
            f"target {TARGET}",
            "first save: stall, ms",
            "steps meanwhile / alone",
            "until it is on the disk, s",
            "MB/s",
        )
    ]
    verdicts: dict[str, Any] = {}
    for arm in found["arms"]:
        stall, total = arm["stall"][SKIPPED:], arm["total"][SKIPPED:]
        ratio = Ratio.of(stall, copies)
        verdicts[arm["name"]] = ratio.judged(TARGET)
        waits = arm["name"] == "torch.save"
        lines.append(
            row(
                arm["name"],
                spread(stall, 1000, 0),
                ratio,
                ratio.verdict(TARGET) if arm["name"] == "accelbridge" else "",
                f"{arm['stall'][0] * 1000:.0f}",
                "none run" if waits else spread(arm["slow_down"][SKIPPED:]),
                spread(total),
                spread([size / t for t in total], 1e-6, 0),
            )
        )
    lines.append(
        row(
            "copy of the same bytes",
            spread(copies, 1000, 0),
            "1",
            *[""] * 4,
            spread([size / c for c in copies], 1e-6, 0),
        )
    )
    return "\n".join(lines), verdicts


def main() -> None:
    end_on_sigterm()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="of state")
    parser.add_argument("--turns", type=int, default=8, help="saves of each way")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="folder for the results, for example benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine() | {"ranks": 1}
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder:
        found = measure(options, Path(folder))
    text, verdicts = table(found)
    print(text)
    if options.out:
        date = time.strftime("%Y-%m-%d")
        title = f"Saves beside a copy of memory, {date}; {options.turns} turns each, median [least, greatest]"
        result = {"date": date, "machine": facts, "verdicts": verdicts, **found}
        write(options.out, f"checkpoint-{date}", result, title, text, facts)


if __name__ == "__main__":
    main()
