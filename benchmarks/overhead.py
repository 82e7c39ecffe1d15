"""What the Trainer costs over a loop written by hand: ``python benchmarks/overhead.py``.

Both train the same model on the same batches from the same initial values, on two CPU ranks of one thread each, over
gloo, with FSDP2 (ZeRO 3), fused AdamW and clipping. They take turns; see README.md for how to read the figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from arms import (
    HERE,
    Arm,
    cpu_ratio,
    costs,
    greatest_difference,
    machine,
    take_turns,
    total_steps,
    wall_ratio,
    write,
)
from cases import SIZES, make_case

TARGET = 1.02
"""Processor time and memory, Trainer over the loop by hand."""
SAME = 1e-6
"""Losses of every step may differ by so much, relative."""


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One size: turns, memory and losses of both. Raises AssertionError where the losses differ."""
    steps = total_steps(options.turns, options.steps, options.warmup, options.profile_steps)
    case = make_case(folder / name, SIZES[name], steps)
    with (
        Arm("trainer", "ours.py", case, sys.executable) as ours,
        Arm("bare", "bare_loop.py", case, sys.executable) as bare,
    ):
        take_turns((ours, bare), options.turns, options.steps, options.warmup)
        memory = {arm.name: arm.memory() for arm in (ours, bare)}
        if options.profile:
            for arm in (ours, bare):
                arm.tell(f"profile {options.profile_steps} {options.profile / f'{name}-{arm.name}'}")
                arm.hear()
        losses = {arm.name: arm.losses() for arm in (ours, bare)}
    assert len(losses["bare"]) == steps, f"{len(losses['bare'])} losses of {steps} steps"
    difference = greatest_difference(losses["trainer"], losses["bare"])
    assert difference <= SAME, f"{name}: losses differ by {difference:.1e}, so this compares different things"
    cpu, wall = cpu_ratio(ours, bare), wall_ratio(ours, bare)
    rss = statistics.mean(ours.peak_rss) / statistics.mean(bare.peak_rss)
    resident, peak = (memory["trainer"][i] / memory["bare"][i] for i in (0, 1))
    return {
        "size": name,
        "steps": steps,
        "greatest_loss_difference": difference,
        "last_loss": losses["bare"][-1],
        "cpu_ratio": {**vars(cpu), "target": TARGET, "verdict": cpu.verdict(TARGET)},
        "wall_ratio": vars(wall),
        "peak_rss_ratio": {"value": rss, "target": TARGET, "verdict": "PASS" if rss <= TARGET else "FAIL"},
        "tensor_bytes_ratio": {"between_steps": resident, "peak": peak},
        "tensor_bytes": {name: {"between_steps": m[0], "peak": m[1]} for name, m in memory.items()},
        "trainer": costs(ours),
        "bare": costs(bare),
        "row": f"| {name} | {cpu} | {cpu.verdict(TARGET)} | {wall} | {rss:.3f} | {'PASS' if rss <= TARGET else 'FAIL'} "
        f"| {resident:.3f} | {peak:.3f} | {difference:.0e} | {1000 * statistics.median(b.cpu for b in bare.blocks):.1f} |",
    }


HEAD = (
    f"| size | CPU ratio [95 %] | target {TARGET} | wall ratio | peak RSS ratio | target {TARGET} | tensors between "
    "steps | tensors at peak | losses differ by | bare loop, CPU ms/step |\n|" + " --- |" * 10
)


def main() -> None:
    options = _options()
    began = time.monotonic()
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        sizes = [measure(name, Path(folder), options) for name in options.sizes.split(",")]
    table = "\n".join((HEAD, *(size.pop("row") for size in sizes)))
    print(table)
    print(f"{time.monotonic() - began:.0f} s; load before: {facts['load_average_1_min_before']}")
    if options.out:
        date = time.strftime("%Y-%m-%d")
        title = f"Trainer over a loop by hand, {date}; {options.turns} turns of {options.steps} steps each\n\n"
        write(options.out, f"overhead-{date}", {"date": date, "machine": facts, "sizes": sizes}, title + table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="demo,larger", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--turns", type=int, default=12, help="turns of each side")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the first turn")
    parser.add_argument("--out", type=Path, help=f"folder for the results, for example {HERE.name}/results")
    parser.add_argument("--profile", type=Path, help="folder for cProfile's tables of both, after the turns")
    options = parser.parse_args()
    options.profile_steps = options.steps if options.profile else 0
    if options.profile:
        options.profile = options.profile.resolve()
        options.profile.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    main()
