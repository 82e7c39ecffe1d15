"""One section in a process of its own: ``python -m gpu.section '{"section": "gemm", ...}'``, started by run.py.

So a section that hangs can be ended, a device's error that poisons its process stays in it, and memory is given back.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from pathlib import Path

from arms import end_on_sigterm
from gpu.bench import Bench
from gpu.sizes import SIZES


def main() -> None:
    end_on_sigterm()
    # A program that was started in the background ignores this, and so would what it starts: see conformance.py.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asked = json.loads(sys.argv[1])
    bench = Bench(Path(asked["report"]), SIZES[asked["size"]], asked["backend"], asked["seconds"])
    with bench.attempt("the section"):
        importlib.import_module(f"gpu.{asked['section']}").measure(bench)
    bench.end()


if __name__ == "__main__":
    main()
