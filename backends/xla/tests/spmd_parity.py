"""The rows of the parity table on the XLA backend: evidence "vendor runtime, no chip".

    .venv-xla/bin/python backends/xla/tests/spmd_parity.py [BEGINNING...]     measure them (those whose names begin so),
                                                                              and write them into docs/parity.md

One process for each number of virtual devices. Every row is measured as the others are, against the CPU backend on one
device in the same environment. XLA's compiler orders sums anew for every layout, so losses are held to 1e-4.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch  # noqa: E402 (a script: the path comes first)
from environment import environment  # noqa: E402 # pyright: ignore[reportMissingImports]

from tests.parity.compare import compare  # noqa: E402
from tests.parity.envelope import envelopes, permuted_runs  # noqa: E402
from tests.parity.measure import Run, build_store, measure, run_rows  # noqa: E402
from tests.parity.rows import REFERENCES, SPMD_ROWS  # noqa: E402
from tests.parity.table import line, read, write  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402


def main(beginnings: tuple[str, ...]) -> int:
    rows = [row for row in SPMD_ROWS if row.name.startswith(beginnings or "")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["ACCELBRIDGE_BACKEND"] = "cpu"
        store = build_store(folder)
        references = run_rows(REFERENCES, folder, store)
        bounds = envelopes(references, run_ranks(permuted_runs, 1, folder, store, REFERENCES, timeout=900)[0])
        runs: dict[str, Run] = {**references}
        for devices in sorted({row.devices for row in rows}):
            # A process of its own: the runtime counts its devices once, when it starts.
            names = [row.name for row in rows if row.devices == devices]
            command = [sys.executable, str(Path(__file__)), "--measure", str(folder), *names]
            env = environment(folder / "site", devices) | {"ACCELBRIDGE_BACKEND": "xla"}
            subprocess.run(command, env=env, check=True, stdout=sys.stderr)
            runs |= pickle.loads((folder / "runs.pickle").read_bytes())
    software = f"torch {torch.__version__}, torch_xla {_version()} on 4 and 8 virtual CPU devices"
    lines = {row.name: line(row.name, row.evidence, compare(row, runs, bounds), software) for row in rows}
    write({**read(), **lines})
    outside = {name: found for name, made in lines.items() if (found := made.faults())}
    print(outside or f"{len(lines)} rows within their bounds")
    return 1 if outside else 0


def _version() -> str:
    from importlib.metadata import version

    return version("torch_xla")


def _measure(folder: Path, names: list[str]) -> None:
    """In the process that drives the devices; every row takes over the reference's checkpoint as well."""
    chosen = [row for row in SPMD_ROWS if row.name in names]
    runs = {row.name: measure(row, folder, folder / "store", row.reference) for row in chosen}
    (folder / "runs.pickle").write_bytes(pickle.dumps(runs))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        _measure(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(tuple(sys.argv[1:])))
