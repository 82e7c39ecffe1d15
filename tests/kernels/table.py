"""docs/kernels.md: what compilers make of every kernel for every chip, and of which kernels and tiles it speaks. To
check it takes no triton."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from accelbridge.kernels.tiles import Tile
from tests.kernels.aot import TARGETS, Case, Compiled, Target, cases_of, faults, shared_bytes, tiles_of
from tests.kernels.cases import FAMILIES

MARKDOWN = Path(__file__).parents[2] / "docs" / "kernels.md"
HEAD = ("kernel", "tile", "registers", "spilled, bytes", "shared, KiB", "instructions", "multiplies by")
Found = Mapping[tuple[str, str], Compiled]
"""By chip and name of the case."""

INTRODUCTION = """# Kernels

What the compilers make of every portable kernel for every chip, ahead of time: evidence of the strength "compiles",
nothing here ran on a GPU. Made by `make kernels` on {date} with triton {triton}, and the assemblers that come with it;
`tests/test_kernels.py` checks that it speaks of the kernels and tiles that are shipped, `make test-kernels` compiles
all of them anew.

Registers are those of a thread (on AMD vector registers, with those for accumulation); spilled is what of them lies in
memory instead; shared is the memory that a program's threads have in common. Tiles: see `accelbridge/kernels/tiles.py`;
those of a chip lie with its backend (`tiles/`).
"""


def all_cases() -> list[tuple[Target, Case]]:
    return [pair for family in FAMILIES for pair in cases_of(family)]


def tile_text(tile: Tile) -> str:
    parts = [*(f"{name} {size}" for name, size in tile.blocks.items()), f"{tile.warps} warps", f"{tile.stages} stages"]
    return ", ".join([*parts, *(f"{name} {value}" for name, value in tile.options.items())])


def named() -> set[tuple[str, str, str]]:
    """(chip, kernel, tile) of all that is shipped, as the table has to name them."""
    return {
        (target.name, case.name, tile_text(tiles_of(target)[0][case.tile]))
        for target, case in all_cases()
        if case.tile in tiles_of(target)[0]
    }


def markdown(found: Found, triton: str) -> str:
    """The whole file."""
    text = INTRODUCTION.format(date=date.today().isoformat(), triton=triton)
    return text + "".join(_section(target, found) for target in TARGETS.values())


def _section(target: Target, found: Found) -> str:
    tiles, lacking = tiles_of(target)
    cases = [case for each, case in all_cases() if each == target and case.tile in tiles]
    lines = [f"\n## {target.name}\n", f"A program may share {shared_bytes(target) // 1024} KiB.\n"]
    if cases:
        lines += [_row(*HEAD), _row(*["---"] * len(HEAD))]
        lines += [_line(case, target, tiles[case.tile], found[target.name, case.name]) for case in cases]
    reasons: dict[str, list[str]] = {}
    for name, why in lacking.items():
        reasons.setdefault(why, []).append(name)
    lines += ["", *(f"- not shipped: {', '.join(names)}: {why}" for why, names in reasons.items())] if reasons else []
    return "\n".join(lines) + "\n"


def _line(case: Case, target: Target, tile: Tile, found: Compiled) -> str:
    if found.error:
        return _row(case.name, tile_text(tile), f"**{found.error[:200]}**", *[""] * 4)
    matrix = ", ".join(f"{name} x {count}" for name, count in found.matrix.items())
    wrong = "".join(f" **{fault}**" for fault in faults(case, target, found))
    numbers = (found.registers, found.spilled, f"{found.shared / 1024:.0f}", found.instructions)
    return _row(case.name, tile_text(tile), *numbers, f"{matrix}{wrong}")


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def read() -> set[tuple[str, str, str]]:
    """(chip, kernel, tile) of the rows of the file."""
    rows, chip = set(), ""
    for line in MARKDOWN.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## (\S+)$", line):
            chip = heading[1]
        elif chip and line.startswith("| ") and not line.startswith(("| kernel |", "| --- ")):
            kernel, tile = (cell.strip() for cell in line.split("|")[1:3])
            rows.add((chip, kernel, tile))
    return rows
