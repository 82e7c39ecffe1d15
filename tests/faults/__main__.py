"""Play all scenes, or those whose names contain one of the arguments, and write docs/faults.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests import cli
from tests.faults.measure import play
from tests.faults.scenes import SCENES
from tests.faults.table import line, read, write


def main() -> int:
    wanted = sys.argv[1:]
    scenes = [scene for scene in SCENES if not wanted or any(text in scene.name for text in wanted)]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        store = cli.build_store(Path(folder) / "store")
        for number, scene in enumerate(scenes):
            try:
                outcome = play(scene, Path(folder) / str(number), store)
            except AssertionError as error:  # the run ended, or did not start, before the fault could be put in
                print(f"{scene.name}: could not be played: {error}", flush=True)
                wrong += 1
                continue
            row = line(scene, outcome)
            print(f"{scene.name}: {'; '.join(row['wrong']) or row['outcome']} ({row['seconds']} s)", flush=True)
            wrong += bool(row["wrong"])
            write({**read(), scene.name: row})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
