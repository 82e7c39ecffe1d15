"""All ranks agree on one plan before the first collective, or every rank fails at once with the difference.

Each rank states its contract in the CPU store; rank 0 compares and publishes one verdict: the cost is O(N).
Where somebody is absent, the rank whose time runs out first publishes it, which may be another rank. This is
before ``init_process_group``: eager initialisation already communicates, and some vendors allow no device use
before it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accelbridge.backend import World
from accelbridge.errors import AgreementError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_GRACE_SECONDS = 3.0
"""How long a rank waits beyond the limit for a verdict that rank 0 publishes at the limit."""
_POLL_SECONDS = 0.02
_ABSENT = object()


def agree(store: Store, world: World, contract: Mapping[str, Any], timeout_s: float) -> None:
    """Raise AgreementError on every rank unless all ``world.size`` ranks bring an equal ``contract``.

    A mismatch raises within seconds of the last arrival, an absent rank after ``timeout_s`` seconds. Runs
    that share a store do not collide: keys carry run id, restart count and how often a rank has agreed.
    """
    text = json.dumps(contract, sort_keys=True)
    try:
        verdict = _meet(store, world, text, timeout_s)
    except RuntimeError as error:  # what torch raises for a store that is gone, by whatever class
        raise AgreementError(
            f"rank {world.rank}: the store through which the ranks agree was lost; the process that hosts it "
            f"(rank 0, or the launcher) has ended; look at its log ({_first_line(error)})"
        ) from error
    if verdict["problem"]:
        raise AgreementError(verdict["problem"])
    if verdict["contract"] != text:  # a rank that rank 0 did not expect, such as one of a larger world
        raise AgreementError(
            f"rank {world.rank} does not belong to this run, which has gone on without it:\n"
            + "\n".join(_differences(json.loads(verdict["contract"]), {world.rank: contract}))
        )


def _meet(store: Store, world: World, text: str, timeout_s: float) -> dict[str, str]:
    """State our contract and return the verdict that all ranks share."""
    from torch.distributed.distributed_c10d import PrefixStore

    run = PrefixStore(f"accelbridge/{world.run_id}/{world.restart}", store)
    # A process may train twice in one run; a rank that died half way joins the agreement it had begun.
    done = f"agreements/{world.rank}"
    meeting = _Meeting(PrefixStore(str(run.add(done, 0)), run), world)
    meeting.state(text)
    verdict = meeting.preside(timeout_s) if world.rank == 0 else meeting.attend(timeout_s)
    _try(lambda: run.add(done, 1))
    if world.rank == 0:
        _try(meeting.wait_for_readers)
    return verdict


def _try(action: Callable[[], object]) -> None:
    """Run what only serves others, once we have our verdict: a store that is gone no longer matters."""
    try:
        action()
    except RuntimeError:
        return


@dataclass
class _Meeting:
    """One agreement in the store: a numbered list of arrivals, and one verdict that is never overwritten."""

    shared: Store
    world: World
    stated: dict[int, str] = field(default_factory=dict)
    """Contracts by rank, as far as this process has read them."""
    read: set[int] = field(default_factory=set)
    """Numbers of the arrivals that this process has read."""

    def state(self, text: str) -> None:
        self.stated[self.world.rank] = text
        number = self.shared.add("arrivals", 1)
        self.shared.set(f"arrival/{number}", json.dumps([self.world.rank, text]))

    def look(self) -> list[int]:
        """Read the arrivals that are new; returns the ranks that are still missing."""
        arrivals = self.shared.add("arrivals", 0)
        for number in sorted(set(range(1, arrivals + 1)) - self.read):
            if self.shared.check([f"arrival/{number}"]):
                rank, text = json.loads(self.shared.get(f"arrival/{number}"))
                self.stated[rank] = text
                self.read.add(number)
        return sorted(set(range(self.world.size)) - self.stated.keys())

    def preside(self, timeout_s: float) -> dict[str, str]:
        """Wait for all ranks and publish the verdict, unless another rank's time ran out before."""
        deadline = time.monotonic() + timeout_s
        while self.look() and time.monotonic() < deadline and not self.shared.check(["verdict"]):
            time.sleep(_POLL_SECONDS)
        return self.publish()

    def attend(self, timeout_s: float) -> dict[str, str]:
        """Wait for the verdict; where none comes in time, publish who is missing."""
        try:
            self.shared.wait(["verdict"], timedelta(seconds=timeout_s + _GRACE_SECONDS))
            verdict = json.loads(self.shared.get("verdict"))
        except RuntimeError:  # out of time, its class depends on torch's version; a lost store raises again
            self.look()
            verdict = self.publish()
        _try(lambda: self.shared.add("readers", 1))
        return verdict

    def publish(self) -> dict[str, str]:
        """Put up our verdict, and return the one that stands: the first."""
        ours = _compare(self.stated, self.world)
        if self.world.rank != 0 and not ours["problem"]:
            ours["problem"] = "rank 0 stated its plan but published no verdict in time; look at its log"
        return json.loads(self.shared.compare_set("verdict", "", json.dumps(ours)))

    def wait_for_readers(self) -> None:
        """Rank 0 may host the store: it stays until those that arrived have read, but not for long."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while self.shared.add("readers", 0) < len(self.read) - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _compare(stated: Mapping[int, str], world: World) -> dict[str, str]:
    """The verdict on what the ranks stated: an empty problem means that all are there and equal."""
    lines: list[str] = []
    missing = sorted(set(range(world.size)) - stated.keys())
    if missing:
        lines.append(
            f"rank{'s' * (len(missing) > 1)} {_ranks(missing)} did not state a plan in time "
            f"(present: {_ranks(sorted(stated))}); look at the log of the absent, or raise "
            "parallel.agreement_timeout"
        )
    first = min(stated)
    others = {rank: json.loads(text) for rank, text in sorted(stated.items()) if text != stated[first]}
    if others:
        lines.append("ranks resolved different plans; make these equal on all ranks:")
        lines += _differences(json.loads(stated[first]), others, first)
    elif max(stated) >= world.size:
        lines.append(
            f"ranks {_ranks(sorted(stated))} are there; the world has {world.size} rank"
            f"{'s' * (world.size > 1)}; make RANK and WORLD_SIZE fit each other"
        )
    return {"problem": "\n".join(lines), "contract": stated[first]}


def _differences(reference: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]], first: int = 0) -> list[str]:
    """One line per differing entry: the value of rank ``first``, then each other value and its ranks."""
    base = flatten(reference)
    flat = {rank: flatten(contract) for rank, contract in others.items()}
    lines = []
    for key in sorted(set(base).union(*flat.values())):
        ours = _show(base.get(key, _ABSENT))
        holders: dict[str, list[int]] = {}
        for rank, entries in flat.items():
            theirs = _show(entries.get(key, _ABSENT))
            if theirs != ours:
                holders.setdefault(theirs, []).append(rank)
        if holders:
            values = "; ".join(f"{value} on rank {_ranks(ranks)}" for value, ranks in holders.items())
            lines.append(f"  {key}: {ours} on rank {first}; {values}")
    return lines or [f"  the contract of rank {_ranks(sorted(others))} has other empty sections"]


def _show(value: Any) -> str:
    """A value as a recipe spells it; text is quoted where it could be taken for something else."""
    if value is _ABSENT:
        return "absent"
    if not isinstance(value, str):
        return json.dumps(value, sort_keys=True)
    try:
        json.loads(value)
    except ValueError:
        return json.dumps(value) if value in ("", "absent") else value
    return json.dumps(value)


def _ranks(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` (ascending) -> ``"0-2, 5"``; two neighbours stay apart: ``"0, 1"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


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
