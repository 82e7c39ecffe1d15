"""What the Trainer costs over a loop written by hand: ``python benchmarks/overhead.py``.

Both train the same model on the same batches from the same initial values, on two CPU ranks of one thread each, over
gloo, with FSDP2 (ZeRO 3), fused AdamW and clipping. They take turns; see README.md for how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arms import (
    HERE,
    Arm,
    costs,
    cpu_ratio,
    end_on_sigterm,
    greatest_difference,
    head,
    joined,
    machine,
    memory_ratios,
    quiet_ratio,
    row,
    take_turns,
    total_steps,
    wall_ratio,
    write,
)
from cases import SIZES, make_case

TARGET = 1.02
"""Processor time and memory, Trainer over the loop by hand."""
SAME = 1e-6
"""Losses of the first COMPARED steps may differ by so much, relative."""
COMPARED = 20
"""Both sum the squares of the gradient norm in another order. Training amplifies such a last bit, in a larger model to
1e-3 within 250 steps, so later losses say nothing of whether both do the same work."""


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One size: turns, memory and losses of both. Raises AssertionError where the losses differ."""
    turns = options.turns // options.pairs
    steps = total_steps(turns, options.steps, options.warmup, options.profile_steps)
    pairs, differences, last_loss = [], [], 0.0
    for number in range(options.pairs):
        case = make_case(folder / f"{name}-{number}", SIZES[name], steps)
        ours, bare, losses = _pair(name, case, turns, options)
        assert len(losses["bare"]) == steps, f"{len(losses['bare'])} losses of {steps} steps"
        difference = greatest_difference(losses["trainer"][:COMPARED], losses["bare"][:COMPARED])
        assert difference <= SAME, f"{name}: losses differ by {difference:.1e}, so this compares different things"
        differences.append((difference, greatest_difference(losses["trainer"], losses["bare"])))
        pairs.append((ours, bare))
        last_loss = losses["bare"][-1]
    ours, bare = map(joined, zip(*pairs, strict=True))
    difference, drift = map(max, zip(*differences, strict=True))
    memory = memory_ratios(ours, bare)
    return {
        "size": name,
        "steps": steps,
        "greatest_loss_difference": {
            f"first {COMPARED} steps": difference,
            f"all {steps} steps": drift,
        },
        "last_loss": last_loss,
        "cpu_ratio": cpu_ratio(ours, bare).judged(TARGET),
        "cpu_ratio_of_quiet_steps": quiet_ratio(ours, bare),
        "wall_ratio": asdict(wall_ratio(ours, bare)),
        "memory_ratios": {**memory, "target": TARGET, "verdict": _verdict(memory)},
        "trainer": costs(ours),
        "bare": costs(bare),
        "row": row(
            name,
            cpu_ratio(ours, bare),
            cpu_ratio(ours, bare).verdict(TARGET),
            f"{quiet_ratio(ours, bare):.3f}",
            wall_ratio(ours, bare),
            *(f"{memory[key]:.3f}" for key in MEMORY),
            _verdict(memory),
            f"{difference:.0e}",
            costs(bare)["cpu_ms_per_quiet_step"],
        ),
    }


def _pair(name: str, case: dict[str, Any], turns: int, options: argparse.Namespace) -> tuple[Arm, Arm, dict[str, Any]]:
    """Both sides in new processes, which take ``turns`` turns each; what was measured, and all losses."""
    with (
        Arm("trainer", "ours.py", case, sys.executable) as ours,
        Arm("bare", "bare_loop.py", case, sys.executable) as bare,
    ):
        for arm in (ours, bare):
            arm.turn(options.warmup, keep=False)
        take_turns((ours, bare), turns, options.steps)
        for arm in (ours, bare):
            arm.memory()
        if options.profile:
            for arm in (ours, bare):
                arm.tell(f"profile {options.profile_steps} {options.profile / f'{name}-{arm.name}'}")
                arm.hear()
        return ours, bare, {arm.name: arm.losses() for arm in (ours, bare)}


def _verdict(memory: Mapping[str, float]) -> str:
    return "PASS" if max(memory[key] for key in MEMORY) <= TARGET else "FAIL"


MEMORY = ("peak_rss", "tensors_between_steps", "tensors_peak")
HEAD = head(
    "size",
    "CPU ratio [95 %]",
    f"target {TARGET}",
    "CPU ratio of quiet steps",
    "wall ratio [95 %]",
    "peak RSS ratio",
    "tensors between steps, ratio",
    "tensors at peak, ratio",
    f"target {TARGET}",
    f"losses of {COMPARED} steps differ by",
    "bare loop, CPU ms per quiet step",
)


def main() -> None:
    end_on_sigterm()
    options = _options()
    began = time.monotonic()
    facts = machine()
    sizes: list[dict[str, Any]] = []
    lines = [HEAD]
    print(HEAD)
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        for name in options.sizes.split(","):
            sizes.append(measure(name, Path(folder), options))
            lines.append(sizes[-1].pop("row"))
            print(lines[-1], flush=True)
    table = "\n".join(lines)
    print(f"{time.monotonic() - began:.0f} s; load before: {facts['load_average_1_min_before']}")
    if options.out:
        date = time.strftime("%Y-%m-%d")
        how = f"{options.turns} turns of {options.steps} steps, in {options.pairs} pairs of new processes"
        title = f"Trainer over a loop by hand, {date}; {how}"
        result = {"date": date, "machine": facts, "sizes": sizes}
        write(options.out, f"overhead-{date}", result, title, table, facts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="demo,larger,vocabulary", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--turns", type=int, default=12, help="turns of each side in all")
    parser.add_argument("--pairs", type=int, default=4, help="how often both sides start anew in that time")
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
