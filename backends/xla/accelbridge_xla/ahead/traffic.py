"""Collectives of an optimised program, read off its HLO text.

Three things make counting more than searching:

- the compiler spreads one collective over several fusions that overlap with computing; all carry its channel id, so a
  channel counts once;
- what it calls ``all-reduce-scatter`` is a fusion around an all-reduce, of which each device keeps its part;
- a collective in the body of a loop runs as often as the loop, whose count the compiler has noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from accelbridge.backend import Traffic

NAMES = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
"""HLO's opcodes and ours."""

_BITS = re.compile(r"[a-z]+(\d+)")
_SHAPE = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_HEAD = re.compile(r"(ENTRY )?(%[\w.\-]+) \(.*\{$")
_LINE = re.compile(r"\s*(?:ROOT )?(%[\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"[\s)}]([a-z][a-z\-]*)\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|called_computations|branch_computations)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")


@dataclass
class _Computation:
    entry: bool
    types: dict[str, str] = field(default_factory=dict)
    collectives: list[tuple[str, int, str]] = field(default_factory=list)
    """(our name, bytes, channel id or a name of its own)."""
    calls: list[tuple[str, int]] = field(default_factory=list)
    """(computation, how often)."""
    unknown_loops: int = 0


def traffic(hlo: str) -> tuple[tuple[Traffic, ...], tuple[str, ...]]:
    """What one device does in one run of the program, by kind; and notes on what could not be told."""
    found = _computations(hlo)
    most: dict[tuple[str, str], tuple[int, int]] = {}
    unknown = 0
    for name, times in _runs(found).items():
        unknown += found[name].unknown_loops
        for op, size, channel in found[name].collectives:
            before = most.get((op, channel), (0, 0))
            most[op, channel] = (max(before[0], times), max(before[1], size))
    sums: dict[str, tuple[int, int]] = {}
    for (op, _), (times, size) in most.items():
        count, total = sums.get(op, (0, 0))
        sums[op] = (count + times, total + times * size)
    notes = (f"{unknown} loops of unknown length: what is in them counts once",) if unknown else ()
    return tuple(Traffic(op, *sums[op]) for op in NAMES.values() if op in sums), notes


def _computations(hlo: str) -> dict[str, _Computation]:
    found: dict[str, _Computation] = {}
    current = _Computation(False)
    name = ""
    for line in hlo.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            found[name] = current = _Computation(bool(head[1]))
        elif instruction := _LINE.match(line):
            _read(current, name, instruction[1], instruction[2])
    return found


def _read(current: _Computation, computation: str, name: str, rest: str) -> None:
    opcode = _OPCODE.search(rest)
    if opcode is None:
        return
    result = current.types[name] = rest[: opcode.start(1)]
    kind = opcode[1].removesuffix("-start")
    if kind in NAMES:
        operands = re.findall(r"%[\w.\-]+", rest[opcode.end() :].split("),")[0])
        incoming = sum(_bytes(current.types.get(each, "")) for each in operands)
        asynchronous = opcode[1].endswith("-start")  # its result holds operands, results and context: take the largest
        outgoing = max(map(_bytes, _parts(result)), default=0) if asynchronous else _bytes(result)
        scattered = kind == "all-reduce" and computation.startswith("%all-reduce-scatter")
        channel = _CHANNEL.search(rest)
        own = "reduce_scatter" if scattered else NAMES[kind]
        current.collectives.append((own, max(incoming, outgoing), channel[1] if channel else f"{computation}{name}"))
    trips = _TRIPS.search(rest)
    loops = opcode[1] == "while"
    current.unknown_loops += loops and trips is None
    for names in _CALLED.findall(rest):
        for called in re.findall(r"%[\w.\-]+", names):
            current.calls.append((called, int(trips[1]) if loops and trips else 1))


def _runs(found: dict[str, _Computation]) -> dict[str, int]:
    """How often each computation runs."""
    runs: dict[str, int] = {}

    def walk(name: str, times: int) -> None:
        runs[name] = runs.get(name, 0) + times
        for called, each in found[name].calls:
            if called in found:
                walk(called, times * each)

    for name, computation in found.items():
        if computation.entry:
            walk(name, 1)
    return runs


def _parts(text: str) -> Iterator[str]:
    return (match[0] for match in _SHAPE.finditer(text))


def _bytes(text: str) -> int:
    """Bytes of a shape, or of all in a tuple, without the padding of its layout."""
    total = 0
    for kind, dims in _SHAPE.findall(re.sub(r"\{[^{}]*\}", "", text)):
        count = 1
        for dim in filter(None, dims.split(",")):
            count *= int(dim)
        bits = _BITS.match(kind)
        total += count * (1 if bits is None else max(1, int(bits[1]) // 8))
    return total
