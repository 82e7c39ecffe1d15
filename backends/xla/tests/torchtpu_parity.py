"""The rows of the parity table on TorchTPU: evidence "vendor runtime, no chip", and collectives that are simulated.

    make .venv-torchtpu/installed
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-torchtpu/bin/python -m backends.xla.tests.torchtpu_parity

measures them, and writes them into docs/parity.md. Every row is measured as the others are, against the CPU backend on
one device in the same environment; XLA's compiler orders sums as it likes, so losses are held to 1e-4.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from backends.xla.tests import on_host
from tests.parity.compare import compare
from tests.parity.envelope import envelopes, permuted_runs
from tests.parity.measure import Run, build_store, measure, run_rows
from tests.parity.rows import REFERENCES, TORCHTPU_ROWS, Row
from tests.parity.table import line, read, write
from tests.ranks import Rank, run_ranks


def _measure(ctx: Rank, folder: Path, store: Path, rows: list[Row]) -> dict[str, Run]:
    """One rank of several rows; each takes over the checkpoint of its reference, which the CPU wrote, as well."""
    sys.path.insert(0, str(folder / "site"))
    ctx.launched()
    runs = {row.name: measure(row, folder, store, row.reference) for row in rows}
    return runs if ctx.rank == 0 else {}


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = on_host.environment(on_host.site(folder / "site"))
        os.environ["ACCELBRIDGE_BACKEND"] = "cpu"
        store = build_store(folder)
        runs = run_rows(REFERENCES, folder, store)
        bounds = envelopes(runs, run_ranks(permuted_runs, 1, folder, store, REFERENCES, timeout=900)[0])
        env["ACCELBRIDGE_BACKEND"] = on_host.NAME
        for size in sorted({row.devices for row in TORCHTPU_ROWS}):
            rows = [row for row in TORCHTPU_ROWS if row.devices == size]
            runs |= run_ranks(_measure, size, folder, store, rows, timeout=1800, env=env)[0]
    software = f"torch {torch.__version__}, torch_tpu {version('torch_tpu')} on XLA's CPU client"
    lines = {row.name: line(row.name, row.evidence, compare(row, runs, bounds), software) for row in TORCHTPU_ROWS}
    write({**read(), **lines})
    outside = {name: found for name, made in lines.items() if (found := made.faults())}
    print(outside or f"{len(lines)} rows within their bounds")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
