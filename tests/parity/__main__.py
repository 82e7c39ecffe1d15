"""Measure every row that this environment can run, and keep the others as they are."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.parity.compare import compare
from tests.parity.envelope import envelopes, permuted_runs
from tests.parity.measure import build_store, run_rows
from tests.parity.rows import REFERENCES, ROWS, SIM_ROWS, Row
from tests.parity.table import MARKDOWN, Line, line, read, write
from tests.ranks import run_ranks
from tests.sim import build
from tests.sim.backend import site


def measured(folder: Path, rows: tuple[Row, ...]) -> dict[str, Line]:
    """Lines of ``rows``, all run anew."""
    simulated = any(row.twin for row in rows)
    if simulated:
        build.library()
        site(folder / "site")
    store = build_store(folder / "source")
    runs = run_rows(rows, folder, store, simulated=simulated)
    bounds = envelopes(runs, run_ranks(permuted_runs, 1, folder, store, REFERENCES, timeout=900)[0])
    software = f"torch {torch.__version__} on {platform.machine()}"
    return {row.name: line(row.name, row.evidence, compare(row, runs, bounds), software) for row in rows}


def main() -> int:
    rows = ROWS if build.obstacle() else (*ROWS, *SIM_ROWS)
    with tempfile.TemporaryDirectory() as folder:
        lines = measured(Path(folder), rows)
    write({**read(), **lines})
    subprocess.run(["git", "--no-pager", "diff", "--stat", str(MARKDOWN)], check=False)
    outside = {name: line.faults() for name, line in lines.items() if line.faults()}
    for name, cells in outside.items():
        print(f"{name}: outside the bounds in {', '.join(cells)}", file=sys.stderr)
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
