"""``accelbridge report RUN``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def report_command(
    run: Annotated[Path, typer.Argument(help="Output directory of a run.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="PNG to write.", show_default="RUN/report.png", metavar="PNG")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Draw and sum up the metrics of a run."""
    from accelbridge.train.report import as_text, read_history, report, summarise

    history = read_history(run)
    summary = summarise(history)
    path = report(run, out)
    if as_json:
        typer.echo(json.dumps(asdict(summary) | {"report": str(path)}, indent=2, allow_nan=False))
    else:
        typer.echo(as_text(history, summary, path))
