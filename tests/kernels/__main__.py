"""Compile every kernel for every chip, and write docs/kernels.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from accelbridge.kernels.installed import installed_triton
from tests.kernels.aot import Compiler, faults, tiles_of
from tests.kernels.table import MARKDOWN, all_cases, markdown

CACHE = Path(".pytest_cache/d/triton")
"""Where the tests keep what they compiled."""


def main() -> int:
    triton = installed_triton()
    if triton is None:
        sys.exit("error: triton is not installed; install accelbridge[kernels]")
    found, wrong = {}, 0
    with Compiler(CACHE.resolve()) as compiler:
        for target, case in all_cases():
            tiles, _ = tiles_of(target)
            if case.tile not in tiles:
                continue
            compiled = found[target.name, case.name] = compiler.compile(case, tiles[case.tile], target)
            for fault in faults(case, target, compiled):
                wrong += 1
                print(f"{target.name} {case.name}: {fault}", file=sys.stderr)
    MARKDOWN.write_text(markdown(found, triton), encoding="utf-8")
    subprocess.run(["git", "--no-pager", "diff", "--stat", str(MARKDOWN)], check=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
