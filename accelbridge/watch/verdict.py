"""Why a run cannot go on, in words: from what the ranks say of themselves to one text that all of them fail with.

Pure functions on data, free of torch. :mod:`accelbridge.watch.watch` collects the data and spreads the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from accelbridge.errors import CollectiveTimeout, RankFailed, RunFailed

RUNNING, FAILED, DONE = "running", "failed", "done"
MAY_DIFFER = frozenset({"all_to_all_single", "alltoall", "gather", "scatter", "allgather"})
"""Calls whose tensors need not be equal on all ranks."""


@dataclass(frozen=True)
class Beat:
    """What one rank says of itself, about twice a second. ``call`` and ``ring`` are entries of
    :meth:`accelbridge.portable.ring.Entry.describe`."""

    rank: int
    host: str
    pid: int
    count: int = 0
    """Goes up with every beat."""
    state: str = RUNNING
    step: int = 0
    """Number of the step being done; 0: none yet."""
    where: str | None = None
    """``file:line in function()`` of the main thread, libraries left out; None: nobody has looked."""
    threads: Mapping[str, str] = field(default_factory=dict)
    """The same of other threads of ours that are at work, by name."""
    call: Mapping[str, Any] | None = None
    """The oldest collective that is not done, or else the newest one."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Collectives so far by group."""
    failed: str | None = None
    """What a collective, or the connection to another rank, failed with."""
    ring: Sequence[Mapping[str, Any]] = ()
    """The last collectives, oldest first; only when they were asked for."""
    interval: int = 0
    """The step at which ``busy`` was taken."""
    busy: float = 0.0
    """Seconds of host time per step, without waiting for collectives, since the interval before."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Beat:
        return cls(**json.loads(text))

    @property
    def waits(self) -> float | None:
        """Seconds that its oldest collective has been pending; None where none is."""
        return self.call["age"] if self.call is not None and self.call["state"] == "pending" else None


@dataclass(frozen=True)
class Verdict:
    """The one reason for which all ranks end."""

    kind: str
    """"timeout" or "failed": which error it becomes."""
    text: str
    last_seen: Mapping[str, str] = field(default_factory=dict)
    """Where ranks that say nothing any more were, by rank."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Verdict:
        return cls(**json.loads(text))

    def error(self) -> RunFailed:
        """As an exception."""
        return (CollectiveTimeout if self.kind == "timeout" else RankFailed)(self.text, self.last_seen)


def failure(beat: Beat, error: BaseException) -> Verdict:
    """The verdict of a rank that ends with an error of its own, for the others."""
    text = str(error).partition("\n")[0]
    return Verdict(
        "failed",
        f"asked: {_step(beat.step)} on every rank\nfound: rank {beat.rank} ({_home(beat)}) failed with "
        f"{type(error).__name__}{f': {text}' if text else ''}\ndo: see the log of rank {beat.rank}; this rank was well",
    )


def conclude(beats: Mapping[int, Beat], silent: Mapping[int, float], timeout_s: float, silence_s: float) -> Verdict:
    """The verdict on a run in which a collective is overdue, has failed, or keeps others waiting for a lost rank.

    ``silent`` are the seconds since the last sign of life of ranks that are not known to have ended.
    """
    stuck = _stuck(beats, silent)
    if silent:
        return _lost(beats, silent, stuck, silence_s)
    if stuck is None:
        return _broken(beats)
    return _overdue(beats, stuck, timeout_s)


def _stuck(beats: Mapping[int, Beat], silent: Mapping[int, float]) -> Mapping[str, Any] | None:
    """The collective that has been pending longest, or else the first that failed."""
    heard = [beat for rank, beat in beats.items() if rank not in silent]
    calls = [beat.call for beat in heard if beat.call is not None and beat.call["state"] == "pending"]
    calls += [entry for beat in heard for entry in beat.ring if entry["state"] != "finished"]
    # A message keeps one rank; the collective that the others wait for it in says more.
    return max(calls, key=lambda call: (call["number"] > 0, call["age"]), default=None)


def _lost(
    beats: Mapping[int, Beat], silent: Mapping[int, float], stuck: Mapping[str, Any] | None, silence_s: float
) -> Verdict:
    lost = sorted(silent)
    asked = _call(stuck) if stuck is not None else _step(max(beat.step for beat in beats.values()))
    seen = {str(rank): _doing(beats[rank]) for rank in lost}
    them = f"{_ranks(lost)} gave no sign of life for {max(silent.values()):.1f} s: dead, stopped or cut off"
    lines = [f"  rank {rank} ({_home(beats[rank])}): last seen {seen[str(rank)]}" for rank in lost]
    lines += _others(beats, lost)
    advice = f"see the log and the host of {_ranks(lost)}" + (
        "" if len(lost) > 1 else "; where the calls of the ranks did not fit, parallel.check_collectives names them"
    )
    if max(silent.values()) >= silence_s:
        advice += f"; pauses longer than {silence_s:g} s need a greater parallel.heartbeat_timeout"
    return Verdict("failed", "\n".join([f"asked: {asked}", f"found: {them}", *lines, f"do: {advice}"]), seen)


def _broken(beats: Mapping[int, Beat]) -> Verdict:
    failed = [beat for beat in beats.values() if beat.failed is not None]
    first = failed[0] if failed else next(iter(beats.values()))
    lines = _others(beats, [])
    return Verdict(
        "failed",
        "\n".join(
            [
                f"asked: {_step(first.step)} on every rank",
                f"found: the connection between ranks failed on {_ranks([b.rank for b in failed])}: {first.failed}",
                *lines,
                "do: see the logs of the ranks that did something else, and the network between the hosts",
            ]
        ),
    )


def _overdue(beats: Mapping[int, Beat], stuck: Mapping[str, Any], timeout_s: float) -> Verdict:
    members = [rank for rank in stuck["ranks"] if rank in beats]
    calls = {rank: call for rank in members if (call := _matching(beats[rank], stuck)) is not None}
    here = [rank for rank in members if rank in calls or beats[rank].counts.get(stuck["group"], 0) > stuck["number"]]
    absent = [rank for rank in members if rank not in here and stuck["number"]]
    unequal = differences(calls)
    if absent:
        found = f"{_ranks(here)} called it, {_ranks(absent)} did not"
    elif not stuck["number"]:
        found = "it did not finish"
    elif unequal:
        found = "the ranks called different things: " + "; ".join(unequal)
    else:
        found = "all its ranks called it, and it did not finish"
    lines = [f"  rank {rank} ({_home(beats[rank])}): {_arrival(beats[rank], calls.get(rank))}" for rank in members]
    lines += [
        f"  rank {rank} ({_home(beat)}): {_doing(beat)}" for rank, beat in sorted(beats.items()) if rank not in members
    ]
    if absent:
        do = f"see what {_ranks(absent)} did instead; if merely slow there, raise parallel.timeout ({timeout_s:g} s)"
    elif unequal:
        do = "let every rank of the group make the same calls; parallel.check_collectives stops before the first other"
    else:
        do = "see whether the peer makes the call that fits; " if not stuck["number"] else ""
        do += f"see the network between the hosts; if it is merely slow, raise parallel.timeout ({timeout_s:g} s)"
    found = f"found: after {max(stuck['age'], 0):.1f} s {found}"
    return Verdict("timeout", "\n".join([f"asked: {_call(stuck)}", found, *lines, f"do: {do}"]))


def _matching(beat: Beat, stuck: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What this rank called where others called ``stuck``."""
    entries = [*beat.ring, *([beat.call] if beat.call is not None else [])]
    same = (e for e in entries if e["group"] == stuck["group"] and e["number"] == stuck["number"] > 0)
    return next(same, None)


def differences(calls: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """How calls that should be the same on all ranks differ, one text per field."""
    fields = ["op", "reduce_op", "root"]
    if not any(call["op"] in MAY_DIFFER for call in calls.values()):
        fields.append("tensors")
    lines = []
    for name in fields:
        holders: dict[str, list[int]] = {}
        for rank, call in calls.items():
            value = ", ".join(call[name]) if name == "tensors" else str(call[name])
            holders.setdefault(value, []).append(rank)
        if len(holders) > 1:
            found = "; ".join(f"{value or 'none'} on {_ranks(ranks)}" for value, ranks in holders.items())
            lines.append(f"{name.replace('_', ' ')}: {found}")
            if name == "op":
                return lines
    return lines


# ---------------------------------------------------------------------------------------------------- phrases


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) != 1 else ''} {', '.join(map(str, listed))}"


def _home(beat: Beat) -> str:
    return f"{beat.host}, process {beat.pid}"


def _step(step: int) -> str:
    return f"step {step}" if step else "the set-up"


def _tensors(call: Mapping[str, Any]) -> str:
    parts = [call["op"], call["reduce_op"], ", ".join(call["tensors"])]
    parts += [f"{name} {call[name]}" for name in ("root", "peer") if call[name] is not None]
    return " ".join(part for part in parts if part)


def _call(call: Mapping[str, Any]) -> str:
    number = f"collective {call['number']} of" if call["number"] else "in"
    label = call["label"] if call["label"] not in ("", "undefined") else call["group"]
    return (
        f"{_tensors(call)}, {number} group {label!r} ({_ranks(call['ranks'])}), in {_step(call['step'])}, "
        f"at {call['site']}"
    )


def _doing(beat: Beat) -> str:
    """What a rank is at."""
    if beat.state != RUNNING and beat.failed is None:
        return f"had ended its run at {_step(beat.step)}" if beat.state == DONE else f"failed in {_step(beat.step)}"
    if beat.waits is not None and beat.call is not None:
        return f"in {_step(beat.step)}, for {beat.waits:.1f} s in {_call(beat.call)}"
    threads = "".join(f"; its thread {name} at {place}" for name, place in beat.threads.items())
    if beat.failed is not None:
        call = beat.call if beat.call is not None and beat.call["state"] == "failed" else None
        place = f"in {_tensors(call)} at {call['site']}: " if call is not None else ""
        return f"in {_step(beat.step)}, {place}{beat.failed}{threads}"
    place = f", at {beat.where}" if beat.where else ""
    return f"in {_step(beat.step)}, in no collective{place}{threads}"


def _arrival(beat: Beat, call: Mapping[str, Any] | None) -> str:
    if call is None or not call["number"]:
        return _doing(beat)
    state = "waited" if call["state"] != "finished" else "had finished it"
    return f"{state}: {_tensors(call)} at {call['site']}"


def _others(beats: Mapping[int, Beat], lost: Sequence[int]) -> list[str]:
    heard = [beat for rank, beat in sorted(beats.items()) if rank not in lost]
    return [f"  rank {beat.rank} ({_home(beat)}): {_doing(beat)}" for beat in heard]
