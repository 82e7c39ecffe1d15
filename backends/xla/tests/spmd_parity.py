"""Rows of the parity table on the XLA backend: evidence "vendor runtime, no chip".

    .venv-xla/bin/python backends/xla/tests/spmd_parity.py OUT.json

Four virtual devices, one process, layouts 2 x 2, measured as ``tests/parity.py`` measures its rows and compared with
the CPU backend on one device in the same environment. Another compiler orders the sums, so losses are held to 1e-4.

OUT.json maps each row's name to the fields of ``tests.parity.Cells`` and to ``evidence`` and ``faults``.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent.parent)]

from tests import parity  # noqa: E402 (a script: the path comes first)
from tests.parity import ACCUMULATE, DROPOUT, TIED, Cells, Row, Run  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

EVIDENCE = "vendor runtime, no chip"
LOSS = 1e-4
DEVICES = 4
TP: dict[str, Any] = {"parallel": {"tp": 2}}
TP_SP: dict[str, Any] = {"parallel": {"tp": 2, "sequence_parallel": True}}
ONE, ONE_TIED, ONE_DROPOUT = "1 device", "tied, 1 device", "dropout 0.1, 1 device"
REFERENCES = (Row(ONE, 1), Row(ONE_TIED, 1, TIED, ONE_TIED), Row(ONE_DROPOUT, 1, DROPOUT, ONE_DROPOUT))
ROWS = (
    Row("XLA spmd, shard 2 x tp 2", DEVICES, TP),
    Row("XLA spmd, accumulation 4, shard 2 x tp 2", DEVICES, {**ACCUMULATE, **TP}),
    Row("XLA spmd, tied, shard 2 x tp 2", DEVICES, {**TIED, **TP}, ONE_TIED),
    Row("XLA spmd, dropout 0.1, shard 2 x tp 2, sequence parallel", DEVICES, {**DROPOUT, **TP_SP}, ONE_DROPOUT),
)


def spmd_rows(folder: Path, environment: dict[str, str], rows: tuple[Row, ...] = ROWS) -> dict[str, Cells]:
    """Measure ``rows`` and their references in ``folder``; ``environment`` is that of a process that sees the XLA
    backend on :data:`DEVICES` virtual devices."""
    store = folder / "store"
    build = ("data", "build", str(ROOT / "accelbridge"), str(store), "--suffix", ".py")
    subprocess.run([sys.executable, "-m", "accelbridge", *build], env=environment, check=True, stdout=sys.stderr)
    os.environ["ACCELBRIDGE_BACKEND"] = "cpu"
    wanted = {ONE, *(row.reference for row in rows)}
    references = parity.run_rows([row for row in REFERENCES if row.name in wanted], folder, store)
    bounds = parity.envelope(references[ONE], run_ranks(parity.permuted_runs, 1, folder, store, timeout=600)[0])
    command = [sys.executable, str(Path(__file__)), "--measure", str(folder)]
    names = json.dumps([row.name for row in rows])
    subprocess.run([*command, names], env=environment | {"ACCELBRIDGE_BACKEND": "xla"}, check=True, stdout=sys.stderr)
    runs: dict[str, Run] = pickle.loads((folder / "runs.pickle").read_bytes())
    return {row.name: parity.compare(runs[row.name], references[row.reference], bounds) for row in rows}


def _measure(folder: Path, names: list[str]) -> None:
    """In the process that drives the devices: every row free, forced, resumed, and moved from the CPU's checkpoint."""
    rows = [row for row in ROWS if row.name in names]
    runs = {row.name: parity.measure(row, folder, folder / "store", row.reference) for row in rows}
    (folder / "runs.pickle").write_bytes(pickle.dumps(runs))


def main(out: Path) -> None:
    from environment import environment

    with tempfile.TemporaryDirectory() as folder:
        cells = spmd_rows(Path(folder), environment(Path(folder) / "site", DEVICES))
    found = {name: asdict(c) | {"evidence": EVIDENCE, "faults": c.faults(LOSS)} for name, c in cells.items()}
    out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        _measure(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main(Path(sys.argv[1]))
