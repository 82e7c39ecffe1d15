"""How fast the device copies its own memory: what everything that moves data is to be compared with."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from arms import head, row
from gpu.bench import Bench, rotating
from gpu.timing import copies_for

TITLE = "Copying on the device"


def measure(bench: Bench) -> None:
    for size in bench.sizes.copies:
        if not bench.has_time(f"{size} bytes", 2):
            continue
        calls = bench.working(f"{size} bytes", partial(_copies, bench, size))
        if calls is None:
            continue
        timing = bench.take_turns({"copy": calls})["copy"]
        # What is read and what is written, as vendors count the bandwidth of a memory.
        bench.row(bytes=size, **timing.as_dict(), gb_per_s=2 * size / timing.seconds / 1e9)


def _copies(bench: Bench, size: int) -> list[Any]:
    def pair() -> Any:
        source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
        return partial(torch.empty_like(source).copy_, source)

    return rotating(pair, copies_for(2 * size, bench.rotate_bytes))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [head("bytes", "ms", "GB/s, read and written")]
    lines += [row(r["bytes"], f"{r['ms']:.3f}", f"{r['gb_per_s']:.0f}") for r in rows]
    return "\n".join(lines)
