"""A process of its own: records the step in FOLDER/step.pickle on FOLDER's virtual devices, and exports it.

    python -m accelbridge_xla.ahead.export FOLDER

Writes program.pb (a serialised HloModuleProto) and program.json; where the step cannot be recorded, refused.txt.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
import time
from pathlib import Path

from accelbridge.errors import AccelbridgeError
from accelbridge_xla.ahead.compile_tpu import end_with_parent
from accelbridge_xla.ahead.recording import RecordingExecution
from accelbridge_xla.device import XlaDevice


def main(folder: Path) -> None:
    began = time.monotonic()
    end_with_parent()
    step = pickle.loads((folder / "step.pickle").read_bytes())
    execution = RecordingExecution(XlaDevice())
    try:
        step(execution)
    except AccelbridgeError as error:
        (folder / "refused.txt").write_text(str(error))
        return
    recorded = execution.recorded
    if recorded is None:
        raise AssertionError("the step ended without Execution.end_step()")
    (folder / "program.pb").write_bytes(recorded.program)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts = {**recorded.facts(), "seconds": round(time.monotonic() - began, 1), "host_bytes": peak}
    (folder / "program.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
