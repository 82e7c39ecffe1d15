"""The text of an optimised program: its computations, and how often each runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_SHAPE = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")
_HEAD = re.compile(r"(ENTRY )?(%[\w.\-]+) \(.*\{$")
_LINE = re.compile(r"\s*(ROOT )?(%[\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"[\s)}]([a-z][a-z\-]*)\(")
_NAME = re.compile(r"%[\w.\-]+")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|called_computations|branch_computations)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_SAME = ("copy", "bitcast", "reshape", "convert")
"""Opcodes that leave a number what it is."""


@dataclass(frozen=True)
class Instruction:
    """One line: ``result`` is the text of its shape, ``inside`` that between its parentheses, ``rest`` what follows."""

    opcode: str
    result: str
    inside: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.inside)

    def attribute(self, name: str) -> str | None:
        """The value of ``name=value``, without braces."""
        found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|([^\s,]+))", self.rest)
        return None if found is None else found[1] if found[1] is not None else found[2]


@dataclass
class Computation:
    """Instructions by name, in the order of the text."""

    entry: bool
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def result(self, name: str) -> str:
        found = self.instructions.get(name)
        return "" if found is None else found.result


@dataclass(frozen=True)
class Program:
    computations: dict[str, Computation]
    runs: dict[str, int]
    """By computation that is reached: how often it runs in one run of the program."""
    unknown_loops: int
    """Loops whose length the text does not tell: what is in them counts as if it ran once."""


def read(hlo: str) -> Program:
    found: dict[str, Computation] = {}
    current = Computation(False)
    for line in hlo.splitlines():
        if head := _HEAD.match(line):
            found[head[2]] = current = Computation(bool(head[1]))
        elif (match := _LINE.match(line)) and (instruction := _instruction(match[3])):
            current.instructions[match[2]] = instruction
            if match[1]:
                current.root = match[2]
    return Program(found, *_runs(found))


def _instruction(text: str) -> Instruction | None:
    opcode = _OPCODE.search(text)
    if opcode is None:
        return None
    depth, end = 1, opcode.end()
    while depth and end < len(text):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    return Instruction(opcode[1], text[: opcode.start(1)], text[opcode.end() : end - 1], text[end:])


def _runs(found: dict[str, Computation]) -> tuple[dict[str, int], int]:
    runs: dict[str, int] = {}
    unknown: set[str] = set()

    def walk(name: str, times: int) -> None:
        runs[name] = runs.get(name, 0) + times
        for own, instruction in found[name].instructions.items():
            length: int | None = 1
            if instruction.opcode == "while" and (length := _length(instruction, found[name], found)) is None:
                unknown.add(own)
            for names in _CALLED.findall(instruction.rest):
                for called in _NAME.findall(names):
                    if called in found:
                        walk(called, times * (1 if length is None else length))

    for name, computation in found.items():
        if computation.entry:
            walk(name, 1)
    return runs, len(unknown)


# ------------------------------------------------------------------------------------------------------ loops


def _length(loop: Instruction, outside: Computation, found: dict[str, Computation]) -> int | None:
    """As the compiler noted it; else that of a loop which counts from a constant to a constant in constant steps."""
    if known := _TRIPS.search(loop.rest):
        return int(known[1])
    condition, body = (found.get(loop.attribute(role) or "") for role in ("condition", "body"))
    if condition is None or body is None:
        return None
    test = condition.instructions[condition.root]
    if test.opcode != "compare" or test.attribute("direction") != "LT":
        return None
    counter = _element(condition, test.operands[0])
    limit = _number(condition, test.operands[1])
    start = None if counter is None else _number(outside, _part(outside, loop.operands[0], counter))
    step = None if counter is None else _step(body, counter)
    if limit is None or start is None or not step:
        return None
    return max(0, -((start - limit) // step))


def _step(body: Computation, counter: int) -> int | None:
    """What a run of ``body`` adds to element ``counter`` of its state."""
    following = body.instructions.get(_source(body, _part(body, body.root, counter)))
    if following is None or following.opcode != "add":
        return None
    first, second = following.operands
    if _element(body, first) == counter:
        return _number(body, second)
    return _number(body, first) if _element(body, second) == counter else None


def _source(computation: Computation, name: str) -> str:
    while (found := computation.instructions.get(name)) and found.opcode in _SAME:
        name = found.operands[0]
    return name


def _part(computation: Computation, name: str, index: int) -> str:
    """Element ``index`` of a tuple that ``computation`` makes, by name."""
    made = computation.instructions.get(name)
    return made.operands[index] if made is not None and made.opcode == "tuple" else ""


def _element(computation: Computation, name: str) -> int | None:
    """Which element of the computation's own state ``name`` is."""
    found = computation.instructions.get(_source(computation, name))
    if found is None or found.opcode != "get-tuple-element":
        return None
    state = computation.instructions.get(found.operands[0])
    return int(found.attribute("index") or 0) if state is not None and state.opcode == "parameter" else None


def _number(computation: Computation, name: str) -> int | None:
    found = computation.instructions.get(_source(computation, name))
    if found is None or found.opcode != "constant" or not re.fullmatch(r"-?\d+", found.inside):
        return None
    return int(found.inside)


# ------------------------------------------------------------------------------------------------------ shapes


def shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Element types and dimensions in the text of a shape, or of a tuple of them; layouts are not read."""
    found = _SHAPE.findall(re.sub(r"\{[^{}]*\}", "", text))
    return [(kind, tuple(int(dim) for dim in dims.split(",") if dim)) for kind, dims in found]


def itemsize(kind: str) -> int:
    """Bytes of one element, at least one."""
    bits = _BITS.match(kind)
    return 1 if bits is None else max(1, int(bits[1]) // 8)
