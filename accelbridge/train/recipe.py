"""Reading recipes: every problem of one is reported, each with its line, what is accepted and a way out."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from accelbridge.errors import ConfigError
from accelbridge.train.places import Keys, Place, Places
from accelbridge.train.yaml_core import Document, read, scalar

if TYPE_CHECKING:
    from accelbridge.train.config import TrainConfig

MOST_BYTES = 1 << 18
"""A recipe has a page or two; anything longer is another file given by mistake."""
_SHOWN = 60
"""Characters of a wrong value that a message repeats."""

Problem = tuple[Place, str]
Schema = Mapping[str, Any]


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read ``path``, apply ``overrides`` (``a.b=c``) and validate. Raises ConfigError with every problem."""
    document = read(_text(path), str(path))
    tree = {} if document.value is None else document.value
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}:1: a recipe is a mapping of sections; found {_kind(tree)}; write for example model:")
    for override in overrides:
        _apply_override(tree, document, override)
    return validate(tree, Places(document.places, str(path)), document.problems)


def _text(path: Path) -> str:
    """What the file says. Never reads more than a recipe has, whatever ``path`` is."""
    asked = f'recipe "{path}" asked'
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except IsADirectoryError:
        raise ConfigError(f"{asked}; it is a folder; give the path of a YAML recipe") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{asked}; it cannot be read: {why}; give the path of a YAML recipe") from None
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{asked}; it has more than {MOST_BYTES // 1024} KiB; give a YAML recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the recipe as UTF-8, or give another file") from None


def _apply_override(tree: dict[str, Any], document: Document, override: str) -> None:
    """Put ``a.b=c`` into ``tree``."""
    asked = f'--set "{override}" asked'
    dotted, equals, text = override.partition("=")
    keys = tuple(key.strip() for key in dotted.split("."))
    if not equals or not all(keys):
        raise ConfigError(f"{asked}; it has no form a.b=c; write for example --set train.steps=20")
    node = tree
    for depth, key in enumerate(keys[:-1], start=1):
        child = node.get(key)
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{asked}; {_dotted(keys[:depth])} is {_kind(child)}, no section; leave out what follows")
        node = child
    node[keys[-1]] = _override_value(text.strip(), asked)
    for known in [known for known in document.places if known[: len(keys)] == keys]:
        del document.places[known]  # what the file said of it is replaced
    for depth in range(1, len(keys) + 1):
        document.places.setdefault(keys[:depth], Place(f"--set {override}"))


def _override_value(text: str, asked: str) -> Any:
    """A YAML list, mapping or quoted text where ``text`` begins as one; else a scalar, ``: `` and ``#`` included."""
    if not text.startswith(("[", "{", '"', "'")):
        return scalar(text)
    document = read(text, asked)
    if document.problems:
        raise ConfigError(f"{asked}; {document.problems[0][1]}")
    return document.value


def validate(tree: Mapping[str, Any], places: Places | None = None, problems: Sequence[Problem] = ()) -> TrainConfig:
    """Turn a nested mapping into a TrainConfig; ``problems`` are reported together with those found here."""
    from accelbridge.train.config import TrainConfig

    places = places or Places(source="config")
    try:
        config = TrainConfig.model_validate(dict(tree))
    except ValidationError as error:
        judge = _Judge(tree, places)
        found = [*problems, *(judge.explain(problem) for problem in error.errors(include_url=False))]
    else:
        if not problems:
            return config.placed(places)
        found = list(problems)
    raise ConfigError("\n".join(_sorted(found)))


def _sorted(problems: Sequence[Problem]) -> list[str]:
    """One text per problem, in the order of the file; of a place's equal ones (members of a union) just one."""
    ordered = sorted(problems, key=lambda problem: (problem[0].line is None, problem[0].line or 0))
    return list(dict.fromkeys(f"{place}: {text}" for place, text in ordered))


class _Judge:
    """Says what is wrong with a recipe, from pydantic's problems and the schema."""

    def __init__(self, tree: Mapping[str, Any], places: Places) -> None:
        from accelbridge.train.config import TrainConfig

        self._tree = tree
        self._places = places
        self._schema = TrainConfig.model_json_schema()

    def explain(self, problem: Any) -> Problem:
        """Place and text of one pydantic problem."""
        keys = self._keys(problem["loc"])
        kind, message = problem["type"], problem["msg"].removeprefix("Value error, ")
        name = _dotted(keys)
        if kind == "missing":
            missing = (*keys, str(problem["loc"][-1]))
            return self._places.nearest(keys), f"{_dotted(missing)} is missing; {self._takes(missing)}; add it"
        if kind == "value_error":
            return self._combination(keys, message)
        if kind == "extra_forbidden":
            return self._places.nearest(keys), self._unknown(keys)
        found = problem["input"]
        limit = f" below {_spell(problem['ctx']['lt'])}" if kind == "less_than" else ""
        text = f"{name} asked as {_show(found)}; {self._takes(keys)}{limit}{self._hint(keys, found)}"
        default = self._at(keys).get("default")
        if kind in _OUT_OF_BOUNDS and isinstance(default, int | float) and math.isfinite(found):
            text += f"; set one that fits, such as the default {_spell(default)}"
        return self._places.nearest(keys), text

    def _keys(self, loc: Sequence[int | str]) -> Keys:
        """The part of a pydantic location that is in the recipe; it also names members of unions, and validators."""
        node: Any = self._tree
        keys: list[str] = []
        for part in loc:
            inner: Any = dict(enumerate(node)) if isinstance(node, list) else node
            if isinstance(inner, Mapping) and part in inner:
                node = inner[part]
                keys.append(str(part))
        return tuple(keys)

    def _combination(self, keys: Keys, message: str) -> Problem:
        """A validator of ours: of one setting, or of several that a section holds."""
        if keys and message.startswith(f"{keys[-1]} "):
            return self._places.nearest(keys), f"{'.'.join([*keys[:-1], ''])}{message}"
        words = {word.strip(",;:=").partition("=")[0] for word in message.split()}
        given = [self._places.of[here] for word in words if (here := (*keys, word)) in self._places.of]
        # The last of the settings is where the contradiction becomes visible.
        last = max(given, key=lambda place: place.line or 0, default=None)
        text = f"{_dotted(keys)}: {message}" if keys else message
        return last or self._places.named_in(message) or self._places.nearest(keys), text

    def _unknown(self, keys: Keys) -> str:
        word, section = keys[-1], keys[:-1]
        known = list(self._properties(section))
        text = f'unknown key "{word}" in {_dotted(section) or "the recipe"}; '
        if close := difflib.get_close_matches(word, known, n=1, cutoff=0.5):
            return f'{text}did you mean "{close[0]}"?'
        elsewhere = [name for name in self._names() if name.rpartition(".")[2] == word]
        if elsewhere:
            return f"{text}did you mean {' or '.join(elsewhere)}?"
        return f"{text}known: {', '.join(known)}"

    # ------------------------------------------------------------------------------------------- the schema

    def _takes(self, keys: Keys) -> str:
        accepted = [self._describe(option) for option in self._options(self._at(keys))]
        return f"it takes {' or '.join(dict.fromkeys(accepted))}"

    def _options(self, schema: Schema) -> list[Schema]:
        """Members of a union, references followed."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return self._options(self._schema["$defs"][name])
        members = schema.get("anyOf") or schema.get("oneOf")
        return [option for member in members for option in self._options(member)] if members else [schema]

    def _at(self, keys: Keys) -> Schema:
        """The schema of the setting at ``keys``."""
        node: Schema = self._schema
        for key in keys:
            options = self._options(node)
            named = [option["properties"][key] for option in options if key in option.get("properties", {})]
            others = [o["additionalProperties"] for o in options if isinstance(o.get("additionalProperties"), dict)]
            members = [option["items"] for option in options if key.isdigit() and "items" in option]
            node = next(iter([*named, *others, *members]), {})
        return node

    def _required(self, keys: Keys) -> bool:
        return any(keys[-1] in option.get("required", ()) for option in self._options(self._at(keys[:-1])))

    def _properties(self, keys: Keys) -> Mapping[str, Schema]:
        return next((o["properties"] for o in self._options(self._at(keys)) if "properties" in o), {})

    def _names(self, section: Keys = ()) -> Iterator[str]:
        """Dotted names of all settings and sections."""
        for key in self._properties(section):
            yield _dotted((*section, key))
            yield from self._names((*section, key))

    def _describe(self, schema: Schema) -> str:
        if "enum" in schema or "const" in schema:
            *most, last = [_spell(value) for value in schema.get("enum", [schema.get("const")])]
            return f"{', '.join(most)} or {last}" if most else last
        kind = schema.get("type")
        if kind == "object":
            known = schema.get("properties")
            return f"a section with keys of its own ({', '.join(known)})" if known else "a section of names and values"
        words = {
            "integer": "an integer",
            "number": "a number",
            "string": "text",
            "boolean": "true or false",
            "null": "null",
            "array": "a list",
        }
        return words.get(str(kind), "another value") + _bounds(schema)

    # -------------------------------------------------------------------------------------------- ways out

    def _hint(self, keys: Keys, found: Any) -> str:
        """What was probably meant."""
        options = self._options(self._at(keys))
        kinds = {option.get("type") for option in options}
        choices = [str(value) for option in options for value in option.get("enum", [option.get("const")]) if value]
        if found is None:
            return "" if self._required(keys) else "; leave the key out for its default"
        if isinstance(found, float) and not math.isfinite(found):
            return "; it is finite"
        if isinstance(found, float) and "integer" in kinds and found.is_integer():
            return f"; write {int(found)}"
        if not isinstance(found, str):
            return f'; write "{_spell(found)}"' if kinds == {"string"} and isinstance(found, bool | int | float) else ""
        if "boolean" in kinds and found.lower() in _YES | _NO:
            return f"; write {_spell(found.lower() in _YES)}"
        if "null" in kinds and found.lower() in ("none", "off", "no"):
            return "; write null"
        if kinds & {"integer", "number"} and isinstance(scalar(found.replace("_", "")), int | float):
            return f"; write {found.replace('_', '')} without {'_' if '_' in found else 'quotes'}"
        if keys[0] == "precision" and len(keys) == 2:
            return _about_dtype(found)
        close = difflib.get_close_matches(found, choices, n=1, cutoff=0.6)
        return f'; did you mean "{close[0]}"?' if close else ""


_OUT_OF_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_YES, _NO = {"yes", "on", "y", "true"}, {"no", "off", "n", "false"}


def _about_dtype(name: str) -> str:
    if name.lower().startswith(("fp8", "float8", "e4m3", "e5m2", "mxfp", "fp4", "nvfp")):
        return "; for products in 8 bits set precision.compute: fp8, and formats under precision.fp8"
    if name.lower().startswith(("int", "uint")):
        return f"; {name} holds no fractions, so nothing can be trained in it: use bfloat16"
    return "; float16 serves as precision.compute only: use bfloat16" if name == "float16" else ""


def _bounds(schema: Schema) -> str:
    """Limits that tell something; upper ones that are only the machine's are named where they are hit."""
    texts = []
    if "exclusiveMinimum" in schema:
        texts.append(f"above {_spell(schema['exclusiveMinimum'])}")
    if "minimum" in schema:
        texts.append(f"of at least {_spell(schema['minimum'])}")
    if "maximum" in schema:
        texts.append(f"at most {_spell(schema['maximum'])}")
    return f" {' and '.join(texts)}" if texts else ""


def _spell(value: Any) -> str:
    """A plain value as a recipe writes it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)


def _dotted(keys: Sequence[str]) -> str:
    return ".".join(keys)


def _show(value: Any) -> str:
    """A wrong value, cut to a readable length, and its kind."""
    if value is None:
        return "null (nothing)"
    if isinstance(value, dict | list):
        return f"{_kind(value)} of {len(value)}"
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{text if len(text) <= _SHOWN else text[:_SHOWN] + '...'} ({_kind(value)})"


def _kind(value: Any) -> str:
    kinds = {bool: "true/false", int: "integer", float: "number", str: "text", list: "a list", dict: "a mapping"}
    return "nothing" if value is None else next((n for t, n in kinds.items() if isinstance(value, t)), "value")
