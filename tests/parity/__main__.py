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
from tests.parity.rows import REFERENCES, ROWS, SIM_ROWS
from tests.parity.table import MARKDOWN, Line, line, read, write
from tests.ranks import run_ranks
from tests.sim import build
from tests.sim.backend import site


def measured(folder: Path) -> dict[str, Line]:
    """Lines of all rows that can run here, all run anew."""
    host = [*ROWS, *(row for row in SIM_ROWS if not row.twin)]
    store = build_store(folder)
    runs = run_rows(host, folder, store)
    simulated = [] if build.obstacle() else [row for row in SIM_ROWS if row.twin]
    if simulated:  # in processes of their own: a device is installed before torch has looked for any
        build.library()
        site(folder / "site")
        runs |= run_rows(simulated, folder, store, simulated=True)
    bounds = envelopes(runs, run_ranks(permuted_runs, 1, folder, store, REFERENCES, timeout=900)[0])
    software = f"torch {torch.__version__} on {platform.machine()}"
    return {row.name: line(row.name, row.evidence, compare(row, runs, bounds), software) for row in (*host, *simulated)}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        lines = measured(Path(folder))
    write({**read(), **lines})
    subprocess.run(["git", "--no-pager", "diff", "--stat", str(MARKDOWN)], check=False)
    outside = {name: line.faults() for name, line in lines.items() if line.faults()}
    for name, cells in outside.items():
        print(f"{name}: outside the bounds in {', '.join(cells)}", file=sys.stderr)
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
