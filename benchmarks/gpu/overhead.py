"""What the Trainer costs over a loop by hand on one device: the arms of ``benchmarks/overhead.py``, in turns.

Both train the model of bare_loop.py with FSDP2 on a mesh of one, in bfloat16, without document masks. The ratio of the
times on the clock is what a run would see; that of processor time shows what a device's queue hides.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arms import Arm, Ratio, cpu_ratio, greatest_difference, head, row, take_turns, wall_ratio
from cases import make_case
from gpu.bench import Bench

TITLE = "The Trainer over a loop by hand"
COMPARED = 5
"""First steps whose losses are compared; training amplifies what differs in the last bits."""
SAME = 1e-2
"""Relative difference of those losses beyond which the two do other work: bfloat16 rounds to 2^-8."""
STARTING = 0.5
"""Share of the section's time that making the case and starting may take."""


def measure(bench: Bench) -> None:
    sizes, backend = bench.sizes, bench.target.backend
    steps = sizes.warmup + sizes.turns * sizes.turn_steps + 1
    settings = {
        "own_model": False,
        "documents": False,
        "compute": "bfloat16",
        "backend": bench.name,
        "device": backend.device_type,
        "process_group": backend.process_group,
    }
    began = time.monotonic()
    budget = bench.left()
    with tempfile.TemporaryDirectory(prefix="gpu-overhead-") as folder:
        case = make_case(Path(folder) / "case", sizes.overhead, steps, **settings)
        with (
            Arm("trainer", "ours.py", case, sys.executable, ranks=1) as ours,
            Arm("bare", "bare_loop.py", case, sys.executable, ranks=1) as bare,
        ):
            for arm in (ours, bare):
                arm.turn(sizes.warmup, keep=False)
            bench.fact(seconds_until_the_first_turn=round(time.monotonic() - began, 1))
            if bench.has_time("turns", (1 - STARTING) * budget):
                take_turns((ours, bare), sizes.turns, sizes.turn_steps)
                bench.row(**_row(case, ours, bare))


def _row(case: dict[str, Any], ours: Arm, bare: Arm) -> dict[str, Any]:
    losses = {arm.name: arm.losses() for arm in (ours, bare)}
    difference = greatest_difference(losses["trainer"][:COMPARED], losses["bare"][:COMPARED])
    assert difference <= SAME, f"losses differ by {difference:.1e}: this compares different things"
    blocks = {"trainer": ours.blocks, "bare": bare.blocks}
    return {
        "model": case["model"],
        "tokens_per_step": case["global_batch_size"] * case["seq_len"],
        "wall_ratio": asdict(wall_ratio(ours, bare)),
        "cpu_ratio": asdict(cpu_ratio(ours, bare)),
        "wall_ms": {name: [1e3 * block.wall for block in found] for name, found in blocks.items()},
        "cpu_ms": {name: [1e3 * block.cpu for block in found] for name, found in blocks.items()},
        "losses_differ_by": difference,
    }


def table(rows: list[dict[str, Any]]) -> str:
    names = ("tokens a step", "time, Trainer / by hand", "processor time", "by hand, ms a step", "losses differ by")
    lines = [head(*names)]
    for r in rows:
        by_hand = sorted(r["wall_ms"]["bare"])[len(r["wall_ms"]["bare"]) // 2]
        lines.append(
            row(
                r["tokens_per_step"],
                Ratio(**r["wall_ratio"]),
                Ratio(**r["cpu_ratio"]),
                f"{by_hand:.2f}",
                f"{r['losses_differ_by']:.0e}",
            )
        )
    return "\n".join(lines)
