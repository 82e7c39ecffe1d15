"""YAML 1.2 with its core schema, as plain data: the line of every key, and nothing that could run code.

ruamel.yaml parses; what a scalar means is decided here, by the tables of the specification (YAML 1.2.2, 10.3),
whatever version a ``%YAML`` line asks for. PyYAML, and YAML 1.1, read ``3e-4`` as text, ``no`` as False and
``1:30`` as 90.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from accelbridge.errors import ConfigError
from accelbridge.train.places import Keys, Place

MOST_NODES = 10_000
"""Aliases may repeat a part of a document; a few lines of them could otherwise stand for billions of values."""
DEEPEST = 50

_WORDS: dict[str, Any] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)
_WORDS |= {sign + dot: value for dot in (".inf", ".Inf", ".INF") for sign, value in (("", math.inf), ("+", math.inf))}
_WORDS |= {f"-{dot}": -math.inf for dot in (".inf", ".Inf", ".INF")}
_WORDS |= dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan)
# At most 100 digits: int() refuses thousands of them, and no setting has so many.
_DECIMAL = re.compile(r"[-+]?[0-9]{1,100}")
_OCTAL = re.compile(r"0o[0-7]{1,100}")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]{1,100}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


def scalar(text: str) -> Any:
    """What an unquoted scalar means."""
    if text in _WORDS:
        return _WORDS[text]
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


@dataclass
class Document:
    """A YAML document as plain data."""

    source: str
    value: Any = None
    places: dict[Keys, Place] = field(default_factory=dict)
    problems: list[tuple[Place, str]] = field(default_factory=list)
    """What is wrong beyond syntax; the rest of the document was read nevertheless."""


def read(text: str, source: str) -> Document:
    """Parse ``text``. Raises ConfigError with ``source`` and line where it is not YAML."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    document = Document(source)
    try:
        _Reader(document, YAML(typ="safe", pure=True).parse(text)).read()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(source, mark.line + 1 if mark else None)
        what = error.problem or error.context or "cannot be parsed"
        raise ConfigError(f"{place}: not valid YAML: {what}{_advice(what)}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"character {ord(text[error.position]):#04x} is not allowed; remove it"
        raise ConfigError(f"{Place(source, line)}: not valid YAML: {what}") from None
    except YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    return document


def _advice(problem: str) -> str:
    advice = {
        "\\t": "; indent with spaces, not tabs",
        "mapping values are not allowed": '; begin a new line after "key:", and quote text that has ": " in it',
        "undefined alias": "; define it with & before it is used",
        "stream end": "; close the bracket or quote that was opened",
    }
    return next((text for part, text in advice.items() if part in problem), "")


class _Reader:
    """Turns ruamel's events into ``document``."""

    def __init__(self, document: Document, events: Iterator[Any]) -> None:
        self._document = document
        self._events = events
        self._anchors: dict[str, Any] = {}
        self._nodes = 0

    def read(self) -> None:
        self._next()  # the stream's start
        if self._kind(self._next()) == "StreamEnd":
            return
        self._document.value = self._node(self._next(), ())
        self._next()  # the document's end
        event = self._next()
        if self._kind(event) == "DocumentStart":
            self._problem(event, "a second document begins here; a recipe is one; delete the line ---")

    def _next(self) -> Any:
        return next(self._events)

    @staticmethod
    def _kind(event: Any) -> str:
        return type(event).__name__.removesuffix("Event")

    def _place(self, event: Any) -> Place:
        return Place(self._document.source, event.start_mark.line + 1)

    def _problem(self, event: Any, what: str) -> None:
        self._document.problems.append((self._place(event), what))

    def _count(self, event: Any, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MOST_NODES:
            raise ConfigError(f"{self._place(event)}: more than {MOST_NODES:,} values; a recipe has a few dozen")

    def _node(self, event: Any, keys: Keys) -> Any:
        """The value that begins with ``event``; ``keys`` lead to it."""
        self._count(event, 1)
        if len(keys) > DEEPEST:
            raise ConfigError(f"{self._place(event)}: nested more than {DEEPEST} deep; a recipe is not")
        kind = self._kind(event)
        if kind == "Alias":
            return self._aliased(event)
        if event.tag is not None:
            self._problem(event, f"tag {event.tag}; a recipe holds plain values; remove it, and quote what is text")
        if kind == "Scalar":
            value = scalar(event.value) if event.implicit[0] else event.value
        elif kind == "SequenceStart":
            value = self._list(keys)
        else:
            value = self._mapping(keys)
        if event.anchor is not None:
            self._anchors[event.anchor] = value
        return value

    def _aliased(self, event: Any) -> Any:
        if event.anchor not in self._anchors:  # also within the anchored value itself
            raise ConfigError(
                f"{self._place(event)}: alias *{event.anchor} is used, and no value before it has the anchor "
                f"&{event.anchor}; define it first"
            )
        value = self._anchors[event.anchor]
        self._count(event, _size(value))
        return copy.deepcopy(value)  # --set may change one of the two

    def _list(self, keys: Keys) -> list[Any]:
        items: list[Any] = []
        while self._kind(event := self._next()) != "SequenceEnd":
            here = (*keys, str(len(items)))
            self._document.places[here] = self._place(event)
            items.append(self._node(event, here))
        return items

    def _mapping(self, keys: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while self._kind(event := self._next()) != "MappingEnd":
            key = self._key(event, keys, values)
            if key is None:
                self._node(self._next(), (*keys, "?"))
                continue
            here = (*keys, key)
            self._document.places[here] = self._place(event)
            values[key] = self._node(self._next(), here)
        return values

    def _key(self, event: Any, keys: Keys, values: dict[str, Any]) -> str | None:
        """The key that ``event`` is; None, and a problem, if it cannot be one."""
        section = ".".join(keys) or "the recipe"
        if self._kind(event) != "Scalar":
            self._node(event, keys)
            self._problem(event, f"a key in {section} is no text; write one name before the colon")
            return None
        key = scalar(event.value) if event.implicit[0] else event.value
        if not isinstance(key, str):
            self._problem(event, f"key {event.value or 'null'} in {section} is no text; a setting has a name")
        elif key == "<<" and event.implicit[0]:
            self._problem(event, f'"<<" in {section}: YAML 1.2 has no merge key; write the settings out')
        elif key in values:
            first = self._document.places[(*keys, key)]
            self._problem(
                event,
                f'key "{key}" in {section} appears twice, first on line {first.line}; delete one of the two',
            )
        else:
            return key
        return None


def _size(value: Any) -> int:
    """Number of values in ``value``."""
    if isinstance(value, dict):
        return 1 + sum(_size(item) for item in value.values())
    return 1 + sum(_size(item) for item in value) if isinstance(value, list) else 1
