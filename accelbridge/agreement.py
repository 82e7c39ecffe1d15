"""All ranks agree on one plan before the first collective, or every rank fails at once with the difference.

Each rank writes its contract to the CPU store; rank 0 compares and publishes one verdict, so the cost is O(N).
This comes before ``init_process_group``: eager initialisation already communicates, and some vendors allow no
device use before it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accelbridge.backend import World
from accelbridge.errors import AgreementError

if TYPE_CHECKING:
    from torch.distributed import Store

_GRACE_SECONDS = 3.0
"""How long a rank waits beyond the limit for a verdict that rank 0 publishes at the limit."""
_POLL_SECONDS = 0.02


def agree(store: Store, world: World, contract: Mapping[str, Any], timeout_s: float) -> None:
    """Raise AgreementError on every rank unless all ``world.size`` ranks bring an equal ``contract``.

    A mismatch raises within seconds of the last arrival, an absent rank after ``timeout_s`` seconds. Runs that
    share a store do not collide: keys carry the run id and the restart count.
    """
    from torch.distributed import PrefixStore

    shared = PrefixStore(f"accelbridge/{world.run_id}/{world.restart}", store)
    text = json.dumps(contract, sort_keys=True)
    shared.set(f"contract/{world.rank}", text)
    if world.rank == 0:
        verdict = _compare(*_collect(shared, world, timeout_s), text)
        shared.set("verdict", json.dumps(verdict))
        _wait_for_readers(shared, world)
    else:
        verdict = _read_verdict(shared, world, timeout_s)
    if verdict["problem"]:
        raise AgreementError(verdict["problem"])
    if verdict["contract"] != text:  # a rank that rank 0 did not expect, such as one of a larger world
        raise AgreementError(
            f"rank {world.rank} does not belong to this run:\n"
            + "\n".join(_differences(json.loads(verdict["contract"]), {world.rank: contract}))
        )


def _collect(shared: Store, world: World, timeout_s: float) -> tuple[dict[int, Any], list[int]]:
    """Contracts by rank as far as they arrive in time, and the ranks that did not."""
    deadline = time.monotonic() + timeout_s
    contracts: dict[int, Any] = {}
    missing = set(range(world.size))
    while missing:
        for rank in sorted(missing):
            if shared.check([f"contract/{rank}"]):
                contracts[rank] = json.loads(shared.get(f"contract/{rank}"))
                missing.discard(rank)
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return contracts, sorted(missing)


def _compare(contracts: dict[int, Any], missing: list[int], text: str) -> dict[str, str]:
    lines = []
    if missing:
        ranks = ", ".join(map(str, missing))
        present = ", ".join(map(str, sorted(contracts)))
        lines.append(
            f"rank{'s' * (len(missing) > 1)} {ranks} did not state a plan in time (present: {present}); "
            "look at the log of the absent, or raise parallel.agreement_timeout"
        )
    reference = contracts[0]
    others = {rank: contract for rank, contract in contracts.items() if contract != reference}
    if others:
        lines.append("ranks resolved different plans; make these equal on all ranks:")
        lines += _differences(reference, others)
    return {"problem": "\n".join(lines), "contract": text}


def _differences(reference: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """One line per differing entry: the value of rank 0, then each other value with the ranks that hold it."""
    base = flatten(reference)
    flat = {rank: flatten(contract) for rank, contract in others.items()}
    lines = []
    for key in sorted(set(base).union(*flat.values())):
        holders: dict[str, list[int]] = {}
        for rank, entries in flat.items():
            if entries.get(key, "absent") != base.get(key, "absent"):
                holders.setdefault(str(entries.get(key, "absent")), []).append(rank)
        if holders:
            values = "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in holders.items())
            lines.append(f"  {key}: {base.get(key, 'absent')} on rank 0; {values}")
    return lines


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _wait_for_readers(shared: Store, world: World) -> None:
    """Rank 0 may host the store: it stays until the others have read, but not for long."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while shared.add("readers", 0) < world.size - 1 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _read_verdict(shared: Store, world: World, timeout_s: float) -> dict[str, str]:
    try:
        shared.wait(["verdict"], timedelta(seconds=timeout_s + _GRACE_SECONDS))
    except Exception as error:  # torch raises DistStoreError, RuntimeError or DistNetworkError by version
        raise AgreementError(
            f"rank {world.rank}: rank 0 published no verdict on the plan within {timeout_s:.0f} s; "
            f"it is absent or failed first; look at its log ({type(error).__name__})"
        ) from error
    verdict = json.loads(shared.get("verdict"))
    shared.add("readers", 1)
    return verdict
