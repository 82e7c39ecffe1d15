"""The debug guard: every collective is compared between its ranks before it runs.

Ranks that call differently otherwise hang, abort, or silently get each other's bytes (on torch 2.13's host
backend SUM against MAX succeeds on both ranks and a different root times out, also with
``TORCH_DISTRIBUTED_DEBUG=DETAIL``). With the guard each of them is a
:class:`~accelbridge.errors.CollectiveMismatch` on every rank, before anything has been sent, and the group
can still be used.

Every rank writes the fingerprint of its n-th call to the group's store, waits for all others' and compares
them itself. O(size) per rank and call: for debugging, not for production. Point-to-point calls are left out.
"""

# pyright: reportPrivateImportUsage=false
# (torch.distributed re-exports without saying so)

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accelbridge.errors import CollectiveMismatch
from accelbridge.portable.lowerings import Call, flatten
from accelbridge.portable.ring import POINT_TO_POINT, call_site

# ----------------------------------------------------------------------------------------------- fingerprints


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shapes(nested: Any) -> list[str]:
    return [_shape(t) for t in flatten(nested)]


def _split_sizes(tensor: Tensor, splits: Sequence[int], size: int) -> list[str]:
    """Elements for each peer of one side of an all_to_all_single."""
    rows = tensor.shape[0] if tensor.dim() else 1
    splits = splits or [rows // size] * size
    row = tensor.numel() // rows if rows else 0
    return [f"{str(tensor.dtype).removeprefix('torch.')} x {n * row}" for n in splits]


def _exchange(call: Call, rank: int, size: int) -> tuple[list[str | None], list[str | None]]:
    """What this rank sends to and expects from each peer, where that may differ between ranks."""
    nothing: list[str | None] = [None] * size
    if call.op == "all_to_all_single":
        received, sent = call.extra
        return [*_split_sizes(call.inputs, sent, size)], [*_split_sizes(call.outputs, received, size)]
    sent, received = _shapes(call.inputs), _shapes(call.outputs)
    if call.op == "alltoall":
        return [*sent], [*received]
    if call.op == "allgather":
        return [sent[0]] * size, [*received]
    at_root = [r == call.root for r in range(size)]
    if call.op == "gather":
        return [sent[0] if here else None for here in at_root], [*received] if rank == call.root else nothing
    if call.op == "scatter":
        return [*sent] if rank == call.root else nothing, [received[0] if here else None for here in at_root]
    return nothing, nothing


def fingerprint(call: Call, rank: int, size: int) -> dict[str, Any]:
    """What must fit between ranks, as JSON data.

    ``tensors`` must be equal; ``sends[j]`` of rank i must equal ``expects[i]`` of rank j. A PREMUL_SUM's
    factor may differ between ranks and is left out.
    """
    sends, expects = _exchange(call, rank, size)
    free = any(sends) or any(expects) or call.op in ("gather", "scatter", "allgather", "alltoall")
    tensors = [] if free else _shapes(call.outputs if call.inputs is None else call.inputs)
    return {
        "op": call.op,
        "reduce op": call.reduce_op,
        "root": call.root,
        "tensors": tensors,
        "sends": sends,
        "expects": expects,
        "site": call_site(),
    }


# ------------------------------------------------------------------------------------------------ differences


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _unequal(field: str, prints: Sequence[dict[str, Any]], ranks: Sequence[int]) -> str | None:
    """``"root: 0 on ranks 0, 1; 1 on rank 2"``, or None where all ranks have the same."""
    found: dict[str, list[int]] = {}
    for rank, one in zip(ranks, prints, strict=True):
        value = one[field]
        found.setdefault(", ".join(value) if isinstance(value, list) else str(value), []).append(rank)
    return None if len(found) == 1 else f"{field}: " + "; ".join(f"{v} on {_ranks(r)}" for v, r in found.items())


def differences(prints: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[str]:
    """How the ranks' fingerprints (in rank order) differ; empty where they fit."""
    if different := _unequal("op", prints, ranks):
        return [different]
    lines = [line for f in ("reduce op", "root", "tensors") if (line := _unequal(f, prints, ranks))]
    for i, sender in enumerate(prints):
        for j, receiver in enumerate(prints):
            sends, expects = sender["sends"][j], receiver["expects"][i]
            if sends != expects and None not in (sends, expects):
                lines.append(f"rank {ranks[i]} sends {sends} to rank {ranks[j]}, which expects {expects}")
    return lines


def _describe(one: dict[str, Any]) -> str:
    parts = [one["op"], one["reduce op"], ", ".join(one["tensors"])]
    parts += [f"root {one['root']}"] if one["root"] is not None else []
    return f"{' '.join(p for p in parts if p)} at {one['site']}"


# ------------------------------------------------------------------------------------------------------ guard

_FAILED = "failed"


class Guard:
    """Compares the calls of one group. ``ranks`` are the global ranks of its members, used in messages.

    The store is only polled, never waited on: a blocking wait would hold the store's one connection, and two
    groups used from two threads could then block each other.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta, group: str = "") -> None:
        self._store, self._rank, self._ranks, self._group = store, rank, list(ranks), group
        self.timeout = timeout
        self._count = 0
        self._lock = threading.Lock()

    def compare(self, call: Call) -> None:
        """Raise :class:`CollectiveMismatch` unless every rank's next call is this one."""
        if call.op in POINT_TO_POINT:
            return
        mine = fingerprint(call, self._rank, len(self._ranks))
        with self._lock:
            self._count += 1
            prints = self._exchange(mine)
        if lines := differences(prints, self._ranks):
            self._mismatch(lines, prints)

    def _key(self, rank: int, count: int) -> str:
        return f"{count}/{rank}"

    def _exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """All ranks' fingerprints of this call, in rank order."""
        self._store.set(self._key(self._rank, self._count), json.dumps(mine))
        keys = [self._key(r, self._count) for r in range(len(self._ranks))]
        self._until(lambda: self._store.check(keys), mine, keys)
        prints = [json.loads(self._store.get(key)) for key in keys]
        # Every rank has written this call's key, so every rank has done reading the previous one's.
        self._store.delete_key(self._key(self._rank, self._count - 1))
        return prints

    def _until(self, arrived: Callable[[], bool], mine: dict[str, Any], keys: list[str]) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        pause = 0.0002
        while not arrived():
            if self._store.check([_FAILED]):
                break
            if time.monotonic() > deadline:
                self._store.set(_FAILED, self._absence(mine, keys))
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        if self._store.check([_FAILED]):  # asked here too: a late rank finds all keys, and nobody waiting
            raise CollectiveMismatch(self._store.get(_FAILED).decode())

    def _title(self) -> str:
        members = f"of {_ranks(self._ranks)}"
        return f'collective {self._count} of group "{self._group}" ({members})'

    def _absence(self, mine: dict[str, Any], keys: list[str]) -> str:
        here = [r for r, key in zip(self._ranks, keys, strict=True) if self._store.check([key])]
        absent = [r for r in self._ranks if r not in here]
        return (
            f"asked: {self._title()}, {_describe(mine)}\n"
            f"found: after {self.timeout.total_seconds():g} s {_ranks(here)} called it, "
            f"{_ranks(absent)} made no call\n"
            f"do: see what {_ranks(absent)} did instead; this group takes no more calls"
        )

    def _mismatch(self, lines: list[str], prints: Sequence[dict[str, Any]]) -> None:
        calls = [f"  rank {r}: {_describe(p)}" for r, p in zip(self._ranks, prints, strict=True)]
        raise CollectiveMismatch(
            f"asked: {self._title()}, the same on all of them\nfound: "
            + "; ".join(lines)
            + "\n"
            + "\n".join(calls)
            + "\ndo: let every rank of the group make the same calls in the same order"
        )
