"""accelbridge on the double: `python -m tests.contracts.neuron certify --level core --out DIR` is `accelbridge conform
certify --backend neuron ...` on a host with one simulated chip. Any other subcommand of conform is passed on too."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.contracts.neuron import environment, site
from tests.sim import build


def main(arguments: list[str]) -> int:
    """Returns the exit status of conform."""
    build.library()  # not on the clock of a test
    command, *rest = arguments
    backend = [] if command == "verify" else ["--backend", "neuron"]
    with tempfile.TemporaryDirectory() as folder:
        there = {**os.environ, **environment(site(Path(folder)))}
        run = [sys.executable, "-m", "accelbridge", "conform", command, *backend, *rest]
        return subprocess.run(run, env=there, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
