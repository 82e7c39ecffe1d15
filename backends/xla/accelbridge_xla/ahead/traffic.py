"""Collectives of an optimised program.

Three things make counting more than searching:

- the compiler spreads one collective over several fusions that overlap with computing; all carry its channel id, so a
  channel counts once;
- what it calls ``all-reduce-scatter`` is a fusion around an all-reduce, of which each device keeps its part;
- a collective in the body of a loop runs as often as the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from accelbridge.backend import Traffic
from accelbridge_xla.ahead.hlo import Computation, Instruction, Program, itemsize, shapes

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


def traffic(program: Program) -> tuple[Traffic, ...]:
    """What one device does in one run of the program, by kind."""
    most: dict[tuple[str, str], tuple[int, int]] = {}
    for name, times in program.runs.items():
        for op, size, channel in _collectives(name, program.computations[name]):
            before = most.get((op, channel), (0, 0))
            most[op, channel] = (max(before[0], times), max(before[1], size))
    sums: dict[str, tuple[int, int]] = {}
    for (op, _), (times, size) in most.items():
        count, total = sums.get(op, (0, 0))
        sums[op] = (count + times, total + times * size)
    return tuple(Traffic(op, *sums[op]) for op in NAMES.values() if op in sums)


def _collectives(name: str, computation: Computation) -> Iterator[tuple[str, int, str]]:
    """(our name, bytes, channel id or a name of its own) of each."""
    for own, instruction in computation.instructions.items():
        kind = instruction.opcode.removesuffix("-start")
        if kind in NAMES:
            scattered = kind == "all-reduce" and name.startswith("%all-reduce-scatter")
            channel = instruction.attribute("channel_id") or f"{name}{own}"
            yield "reduce_scatter" if scattered else NAMES[kind], _larger(instruction, computation), channel


def _larger(instruction: Instruction, computation: Computation) -> int:
    """Bytes that go in or come out, without the padding of their layouts."""
    incoming = sum(sum(_sizes(computation.result(each))) for each in instruction.operands)
    outgoing = list(_sizes(instruction.result))
    # The result of a -start holds operands, results and context: take the largest.
    return max(incoming, max(outgoing, default=0) if instruction.opcode.endswith("-start") else sum(outgoing))


def _sizes(text: str) -> Iterator[int]:
    return (itemsize(kind) * prod(dims) for kind, dims in shapes(text))
