"""Plans and device lists as text for people: in a terminal of any width, a pipe or a log.

Short cells stand in columns; what may be long (reasons, notes) stands below its row, wrapped and indented.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelbridge.plan import ExecutionPlan
    from accelbridge.plugins import Candidate

PLAN_FILE = "plan.json"
_NARROWEST, _WIDEST = 60, 120


def write_plan(plan: ExecutionPlan, output: Path) -> None:
    """Write ``OUTPUT/plan.json``."""
    text = json.dumps(plan.as_dict(), indent=1)
    (output / PLAN_FILE).write_text(text + "\n", encoding="utf-8")


def plan_text(plan: ExecutionPlan, *, details: bool = False) -> str:
    """The plan, as a run prints it before step 0; ``details`` adds what each lowering does, and why."""
    chip, software = plan.contract["chip"], plan.contract["software"]
    lines = [f"execution plan {plan.digest}: backend {plan.backend} ({_CHOSEN.get(plan.selected_by, '')})"]
    facts = [_layout(plan), str(chip), *(f"{name} {version}" for name, version in software.items())]
    lines += _wrapped("; ".join(facts), 2)
    lines += _ops_lines(plan)
    if details:
        for lowering in plan.lowerings:
            lines += _wrapped(f"lowering {lowering.name}: {lowering.applies} -> {lowering.into}", 2)
            lines += _wrapped(f"because {lowering.reason}", 4)
    elif plan.lowerings:
        lines += _wrapped(f"lowerings, where needed: {', '.join(low.name for low in plan.lowerings)}", 2)
    for note in plan.notes:
        lines += _wrapped(note if note.startswith("FALLBACK") else f"note: {note}", 2)
    return "\n".join(lines)


_CHOSEN = {
    "argument": "by argument",
    "environment": "by the environment",
    "recipe": "by the recipe",
    "automatic": "automatic",
    "assumed": "assumed: such a host would get this plan; nothing was opened or asked",
}


def _layout(plan: ExecutionPlan) -> str:
    from accelbridge.parallel.layout import Layout

    return Layout(**plan.contract["layout"]).describe()


def _ops_lines(plan: ExecutionPlan) -> Iterator[str]:
    rows = [(c.op, c.implementation, ", ".join(c.dtypes.values()), c.support, c.evidence) for c in plan.ops]
    head, *lines = columns([("op", "implementation", "dtype", "support", "evidence"), *rows], indent=2)
    yield head
    for line, choice in zip(lines, plan.ops, strict=True):
        yield line
        if choice.note:
            yield from _wrapped(choice.note, 4)
        for rejected in choice.rejected:
            yield from _wrapped(f"not {rejected.implementation}: {rejected.reason}", 4)


def devices_text(candidates: Sequence[Candidate]) -> str:
    """The list of ``accelbridge devices``."""
    rows = [
        (c.name, "yes" if c.available else "no", _devices(c), f"{c.distribution} {c.version}".strip(), c.api_version)
        for c in candidates
    ]
    head, *lines = columns([("backend", "available", "devices", "distribution", "interface"), *rows])
    listed = [head]
    for line, candidate in zip(lines, candidates, strict=True):
        listed += [line, *_wrapped(candidate.probe.reason, 2)]
    return "\n".join(listed)


def _devices(candidate: Candidate) -> str:
    chips: dict[str, int] = {}
    for device in candidate.probe.devices:
        chips[device.chip] = chips.get(device.chip, 0) + 1
    return ", ".join(f"{count} x {chip}" for chip, count in chips.items()) or "-"


def columns(rows: Sequence[Sequence[str]], indent: int = 0) -> list[str]:
    """One line per row, columns aligned; a line is never broken, so that it can be searched for."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " " * indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _wrapped(text: str, indent: int) -> list[str]:
    """``text`` in lines that fit the terminal (a pipe or a log: 120 columns); words, such as paths, stay whole."""
    columns = shutil.get_terminal_size((_WIDEST, 24)).columns
    return textwrap.wrap(
        text,
        max(_NARROWEST, min(columns, _WIDEST)),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
