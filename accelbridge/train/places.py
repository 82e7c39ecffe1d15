"""Where the settings of a recipe were written, so that an error about one of them can say so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from accelbridge.errors import AccelbridgeError

Keys = tuple[str, ...]
"""Path of a setting: ``("train", "steps")``."""

_DOTTED = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)+")


@dataclass(frozen=True)
class Place:
    """A line of a file, or a text such as ``--set train.steps=20``."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Places:
    """The place of every setting that was given. Takes no part in comparisons: it is no part of their values."""

    of: Mapping[Keys, Place] = field(default_factory=dict, compare=False)
    source: str = field(default="the recipe", compare=False)

    def nearest(self, keys: Keys) -> Place:
        """The place of ``keys``, else of the innermost section around it, else the file."""
        inner = (keys[:length] for length in range(len(keys), 0, -1))
        return next((self.of[part] for part in inner if part in self.of), Place(self.source))

    def named_in(self, text: str) -> Place | None:
        """The place of the first setting that ``text`` names and somebody gave, alone or with those around it
        (``memory.recompute={budget: 1GiB}``); else of that setting's section."""
        names = [tuple(name.split(".")) for name in _DOTTED.findall(text)]
        inner = [name[:length] for name in names for length in range(len(name), 1, -1)]
        given = [self.of[name] for name in inner if name in self.of]
        sections = [self.of[name[:1]] for name in names if name[:1] in self.of]
        return next(iter([*given, *sections]), None)

    @contextmanager
    def pointing(self) -> Iterator[None]:
        """Put file and line in front of an error that names a setting, whoever raises it."""
        try:
            yield
        except AccelbridgeError as error:
            place = self.named_in(str(error))
            if place is not None and not str(error).startswith(f"{place}: "):
                error.args = (f"{place}: {error}",)
            raise
