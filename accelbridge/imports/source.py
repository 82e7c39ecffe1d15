"""Another trainer's file while it is mapped: each key is judged once, and what nobody judged is found at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from accelbridge.errors import ConfigError
from accelbridge.train.places import Keys, Place
from accelbridge.train.yaml_core import Document, read

Verdict = Literal["honoured", "ignored", "refused", "open", "default"]
"""``honoured``: it is in the recipe. ``ignored``: it changes no number of the run. ``refused``: it would, and there
is no such setting. ``open``: the file leaves it to somebody else. ``default``: the file doesn't have it, and what its
trainer then does is written out."""

MOST_BYTES = 1 << 18
_KINDS: dict[str, tuple[type, ...]] = {
    "an integer": (int,),
    "a number": (int, float),
    "text": (str,),
    "true or false": (bool,),
    "a section": (dict,),
}
Kind = Literal["an integer", "a number", "text", "true or false", "a section"]


@dataclass(frozen=True)
class Finding:
    """What became of one key."""

    verdict: Verdict
    key: str
    reason: str
    line: int = 0


@dataclass
class Source:
    """A file of nested mappings, the recipe that it becomes, and what was found on the way."""

    document: Document
    recipe: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    spelled: dict[str, str] = field(default_factory=dict)
    """The file's own name of a key that has another one here."""
    _judged: set[Keys] = field(default_factory=set)

    @classmethod
    def load(cls, path: Path) -> Source:
        """Read JSON or YAML. Raises ConfigError with file and line where it is neither, or no mapping."""
        text = _text(path)
        # JSON is YAML, but for tabs: those in JSON are white space between values, as its texts cannot hold one.
        document = read(text.expandtabs(1) if path.suffix == ".json" else text, str(path))
        if document.problems:
            raise ConfigError("\n".join(f"{place}: {what}" for place, what in document.problems))
        if not isinstance(document.value, dict):
            raise ConfigError(f"{path}: a mapping of settings asked; found none; give a DeepSpeed config")
        return cls(document)

    # ---- reading

    def has(self, dotted: str) -> bool:
        """Whether the file says anything there; ``null`` says nothing."""
        return self._at(dotted) is not None

    def take(self, dotted: str, kind: Kind, default: Any = None) -> Any:
        """The value at ``dotted``, which the caller judges; ``default`` where it is absent, null, "auto" or, after a
        finding that says so, of another kind. Floats without a fraction serve as integers, as in DeepSpeed."""
        value = self._at(dotted)
        if value is None or value == "auto":
            return default
        if kind == "an integer" and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "true or false"):
            self.refuse(dotted, f"it takes {kind}; correct it")
            return default
        return value

    def is_auto(self, dotted: str) -> bool:
        """Whether the file leaves it to Hugging Face's Trainer."""
        return self._at(dotted) == "auto"

    def _at(self, dotted: str) -> Any:
        node: Any = self.document.value
        for key in dotted.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        return node

    def remove(self, dotted: str) -> None:
        """Treat ``dotted`` as absent from here on, and all that it holds."""
        parent, _, name = dotted.rpartition(".")
        (self._at(parent) if parent else self.document.value).pop(name)

    # ---- judging

    def honour(self, dotted: str, setting: str, value: Any, note: str = "") -> None:
        """``dotted`` becomes ``setting: value``."""
        self.put(setting, value)
        self.judge("honoured", dotted, f"{setting}: {_spell(value)}{note and f'; {note}'}")

    def ignore(self, dotted: str, reason: str) -> None:
        self.judge("ignored", dotted, reason)

    def refuse(self, dotted: str, reason: str) -> None:
        self.judge("refused", dotted, reason)

    def leave_open(self, dotted: str, reason: str) -> None:
        self.judge("open", dotted, reason)

    def assume(self, dotted: str, setting: str, value: Any, reason: str) -> None:
        """The file lacks ``dotted``, and its trainer would take ``value``."""
        self.put(setting, value)
        self.judge("default", dotted, f"{setting}: {_spell(value)}; {reason}")

    def judge(self, verdict: Verdict, dotted: str, reason: str) -> None:
        """State what became of ``dotted``, and of all it holds. The first verdict on a key stays."""
        keys = tuple(dotted.split("."))
        if keys in self._judged:
            return
        self._judged.add(keys)
        value = self._at(dotted)
        name = self.spelled.get(dotted, dotted)
        shown = name if value is None or isinstance(value, dict) else f"{name} {_spell(value)}"
        self.findings.append(Finding(verdict, shown, reason, self._place(keys).line or 0))

    def put(self, setting: str, value: Any) -> None:
        """Set ``section.name`` of the recipe."""
        section, name = setting.split(".")
        self.recipe.setdefault(section, {})[name] = value

    def unjudged(self) -> Iterator[tuple[str, Any]]:
        """Keys that nobody judged, and their values; of a section some of whose keys are judged, only the others."""
        yield from self._unjudged(self.document.value, ())

    def _unjudged(self, node: Mapping[str, Any], keys: Keys) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            here = (*keys, key)
            if here in self._judged:
                continue
            if isinstance(value, Mapping) and any(known[: len(here)] == here for known in self._judged):
                yield from self._unjudged(value, here)
            else:
                yield ".".join(here), value

    def _place(self, keys: Keys) -> Place:
        inner = (keys[:length] for length in range(len(keys), 0, -1))
        return next((self.document.places[part] for part in inner if part in self.document.places), Place(""))

    # ---- the result

    def refused(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "refused"]

    def report(self) -> str:
        """One line per key, in the order of the file; what it lacks comes last."""
        ordered = sorted(self.findings, key=lambda finding: (finding.line == 0, finding.line))
        source = self.document.source
        return "\n".join(
            f"{f.verdict:8}  {f'{source}:{f.line}: ' if f.line else ''}{f.key}: {f.reason}" for f in ordered
        )


def _text(path: Path) -> str:
    asked = f'"{path}" asked'
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{asked}; it cannot be read: {why}; give the path of a JSON or YAML file") from None
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{asked}; it has more than {MOST_BYTES // 1024} KiB; give a configuration file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{asked}; it is not UTF-8 text; save it as UTF-8, or give another file") from None


def _spell(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
