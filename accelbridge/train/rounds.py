"""Which start of the ranks this is: where one store outlives them, what earlier ranks left in it must not be read.

An elastic agent counts restarts for itself. The agent of a node on which no rank failed takes part in a restart without
counting it, and one that joins later begins at 0, so the count does not tell one start from another. Here rank 0
names each start anew, and every rank makes sure that the name it reads is that of a living rank 0: it signs in under
the name, and waits until its own signature is on the list that rank 0 then puts up.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from accelbridge.backend import World

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_SECONDS = 0.02


def meet(store: Store, world: World, timeout_s: float) -> tuple[Store, World]:
    """A view of ``store`` that the ranks of this start have for themselves, and ``world`` with rank 0's restart count
    and a ``run_id`` of this start.

    Raises nothing: where ranks are absent for ``timeout_s`` seconds, or the store is lost, those that are there get
    what they have, and the agreement of the ranks, which comes next, says what is wrong.
    """
    if world.size == 1:
        return store, world
    from torch.distributed import PrefixStore

    board = PrefixStore(f"accelbridge/{world.run_id}/starts", store)
    deadline = time.monotonic() + timeout_s
    try:
        name, restart = _convene(board, world, deadline) if world.rank == 0 else _attend(board, world, deadline)
    except RuntimeError:  # what torch raises for a store that is gone, by whatever class
        return store, world
    return PrefixStore(f"start/{name}", store), replace(world, run_id=f"{world.run_id}/{name}", restart=restart)


def _convene(board: Store, world: World, deadline: float) -> tuple[str, int]:
    """Name this start, and put up who signed in."""
    name = uuid.uuid4().hex
    board.set("current", json.dumps([name, world.restart]))
    keys = [f"{name}/{rank}" for rank in range(1, world.size)]
    while not board.check(keys):
        if time.monotonic() > deadline:
            return name, world.restart
        time.sleep(_POLL_SECONDS)
    board.set(f"{name}/all", json.dumps([signature.decode() for signature in board.multi_get(keys)]))
    return name, world.restart


def _attend(board: Store, world: World, deadline: float) -> tuple[str, int]:
    """Sign in under the current name, again where it changes, until rank 0 has our signature."""
    signature = uuid.uuid4().hex
    name, restart = "none", world.restart
    while time.monotonic() < deadline:
        if board.check(["current"]):
            current, count = json.loads(board.get("current"))
            if current != name:
                name, restart = current, count
                board.set(f"{name}/{world.rank}", signature)
            if board.check([f"{name}/all"]) and signature in json.loads(board.get(f"{name}/all")):
                break
        time.sleep(_POLL_SECONDS)
    return name, restart
