"""Plans and device lists as text for people, in a terminal or a log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from accelbridge.plan import ExecutionPlan
    from accelbridge.plugins import Candidate

PLAN_FILE = "plan.json"
_WIDTH = 118


def write_plan(plan: ExecutionPlan, output: Path) -> None:
    """Write ``OUTPUT/plan.json``."""
    text = json.dumps(plan.as_dict(), indent=1)
    (output / PLAN_FILE).write_text(text + "\n", encoding="utf-8")


def plan_text(plan: ExecutionPlan) -> str:
    """The plan as ``accelbridge explain`` prints it."""
    contract = plan.contract
    console = _console()
    with console.capture() as capture:
        console.print(f"execution plan {plan.digest}: backend {plan.backend} (by {plan.selected_by})")
        console.print(f"  {_layout(plan)}; {contract['chip']}; {_software(plan)}")
        console.print(_ops_table(plan))
        for lowering in plan.lowerings:
            console.print(f"  lowering {lowering.name}: {lowering.applies} -> {lowering.into}")
        for note in plan.notes:
            console.print(f"  note: {note}")
    return capture.get().rstrip()


def _console() -> Console:
    return Console(width=_WIDTH, no_color=True, highlight=False, markup=False, emoji=False, soft_wrap=False)


def _layout(plan: ExecutionPlan) -> str:
    from accelbridge.parallel.layout import Layout

    return Layout(**plan.contract["layout"]).describe()


def _software(plan: ExecutionPlan) -> str:
    return ", ".join(f"{name} {version}" for name, version in plan.contract["software"].items())


def _ops_table(plan: ExecutionPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2))
    for column in ("op", "implementation", "dtype", "support", "evidence", "rejected, and notes"):
        table.add_column(column, overflow="fold")
    for choice in plan.ops:
        why = [f"{r.implementation}: {r.reason}" for r in choice.rejected]
        dtypes = ", ".join(choice.dtypes.values())
        table.add_row(
            choice.op,
            choice.implementation,
            dtypes,
            choice.support,
            choice.evidence,
            "; ".join([*filter(None, [choice.note]), *why]),
        )
    return table


def devices_text(candidates: Sequence[Candidate]) -> str:
    """The list of ``accelbridge devices``."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("backend", "available", "devices", "distribution", "interface", "reason"):
        table.add_column(column, overflow="fold")
    for c in candidates:
        table.add_row(
            c.name,
            "yes" if c.available else "no",
            _devices(c),
            f"{c.distribution} {c.version}".strip(),
            c.api_version,
            c.probe.reason,
        )
    console = _console()
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def _devices(candidate: Candidate) -> str:
    chips: dict[str, int] = {}
    for device in candidate.probe.devices:
        chips[device.chip] = chips.get(device.chip, 0) + 1
    return ", ".join(f"{count} x {chip}" for chip, count in chips.items()) or "-"
