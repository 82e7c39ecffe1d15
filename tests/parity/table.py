"""The table's results: kept in docs/parity.json with their dates, shown in docs/parity.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tests.parity.compare import Cells
from tests.parity.rows import ENVELOPE, GRADIENT, LOSS, NO_CHIP

DOCS = Path(__file__).parents[2] / "docs"
JSON, MARKDOWN = DOCS / "parity.json", DOCS / "parity.md"
XLA_LOSS = 1e-4
"""Bound of losses of XLA's programs, whose compiler reorders and fuses as it likes."""


@dataclass(frozen=True)
class Line:
    """One row with its figures, where they come from and when."""

    row: str
    evidence: str
    cells: Cells
    software: str
    date: str

    def faults(self) -> list[str]:
        return self.cells.faults(XLA_LOSS if self.evidence.startswith(NO_CHIP) else LOSS)


def line(row: str, evidence: str, cells: Cells, software: str) -> Line:
    return Line(row, evidence, cells, software, date.today().isoformat())


def read() -> dict[str, Line]:
    """The lines of docs/parity.json by row."""
    entries: list[dict[str, Any]] = json.loads(JSON.read_text()) if JSON.exists() else []
    return {entry["row"]: Line(**{**entry, "cells": Cells(**entry["cells"])}) for entry in entries}


def write(lines: Mapping[str, Line]) -> None:
    """Both files."""
    JSON.write_text(json.dumps([asdict(line) for line in lines.values()], indent=1) + "\n")
    MARKDOWN.write_text(markdown(lines))


_TEXT = f"""# Parity

What every layout does to the numbers of one training run. Made by `make parity`; `tests/test_parity.py` checks it, and
measures a part of it anew. What the cells are and how they are measured: `tests/parity/__init__.py`.

Bounds: loss and moved {LOSS:g} ({XLA_LOSS:g} on XLA), norm and gradient {GRADIENT:g}, free norm and weights
{ENVELOPE:g} times the envelope of permuted reduction orders on one device. A gradient of more than its bound has in
parentheses how many such envelopes it is: it is within its bound up to {ENVELOPE:g}, since then the order of sums alone
makes as much. A cell in bold is outside its bound; "-" is not measured.

| row | loss | norm | gradient | free norm | weights | same | moved | evidence |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def markdown(lines: Mapping[str, Line]) -> str:
    rows = "".join(f"| {' | '.join(_shown(line))} |\n" for line in lines.values())
    software = sorted({f"{line.software} ({line.date})" for line in lines.values()})
    return f"{_TEXT}{rows}\nMeasured with {'; '.join(software)}.\n"


def _shown(line: Line) -> list[str]:
    cells, outside = line.cells, line.faults()

    def figure(name: str, form: str) -> str:
        value = getattr(cells, name)
        text = "-" if value is None else format(value, form)
        if name == "gradient" and cells.rounding is not None:
            text += f" ({cells.rounding:.1f})"
        return f"**{text}**" if name in outside else text

    same = "-" if cells.same is None else f"**{cells.same}**" if cells.same else "bitwise"
    evidence = line.evidence
    if cells.twin is not None:
        evidence += f"; **differs from the CPU: {cells.twin}**" if cells.twin else "; bitwise equal to the CPU"
    return [
        line.row,
        *(figure(name, ".0e") for name in ("loss", "norm", "gradient")),
        *(figure(name, ".1f") for name in ("free_norm", "weights")),
        same,
        figure("moved", ".0e"),
        evidence,
    ]
