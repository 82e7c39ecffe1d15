"""The program of ranks that a launcher starts in a test (FLT-014): rank 1 raises while rank 0 waits for it. Alone, it
raises at once.

``launched.py SETTINGS``: a JSON object with the backend, its options and a folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

RAISED = "raised_at"
"""File that holds the Unix time of the error."""
PIDS = "pids"
"""File with the process of each rank."""
_ENOUGH_S = 100.0
"""After that a rank ends by itself, whatever became of its launcher."""


def main() -> None:
    """Join the group, and then raise (rank 1) or wait for the one that did."""
    settings = json.loads(sys.argv[1])
    folder = Path(settings["folder"])
    with (folder / PIDS).open("a") as file:
        file.write(f"{os.getpid()}\n")
    from accelbridge.plugins import choose, instantiate
    from accelbridge.train.world import connect, world_from_environment

    world = world_from_environment()
    backend = instantiate(choose(settings["backend"]), settings["options"])
    import torch
    import torch.distributed as dist

    if world.size == 1:  # it needs no device, which the process that started the launcher may hold
        _fail(folder)
    from accelbridge.portable.collectives import join

    device = join(backend.device, backend.collectives, connect(world, 60.0), world, _ENOUGH_S)
    x = torch.ones(64, device=device)
    dist.all_reduce(x)
    if world.rank == 1:
        _fail(folder)
    time.sleep(1.0)  # its error must not be found by way of the broken connection alone
    try:
        dist.all_reduce(x)
        backend.device.synchronize()
    except Exception:
        time.sleep(_ENOUGH_S)  # a rank that does not end by itself
        raise


def _fail(folder: Path) -> NoReturn:
    (folder / RAISED).write_text(str(time.time()))
    raise ValueError("a reason of its own")


if __name__ == "__main__":
    main()
