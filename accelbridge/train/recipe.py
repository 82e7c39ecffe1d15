"""Reading recipes: YAML 1.2 core schema, no duplicate keys, and file and line in every error.

PyYAML's default loader reads ``3e-4`` as text, ``no`` as False and ``1:30`` as 90, and lets a duplicate key win;
ruamel.yaml implements YAML 1.2 and keeps line numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from accelbridge.errors import ConfigError

if TYPE_CHECKING:
    from accelbridge.train.config import TrainConfig

Where = dict[tuple[str, ...], str]
"""Key path -> "file:line" (or "--set")."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read ``path``, apply ``overrides`` (``a.b=c``) and validate."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f'recipe "{path}" asked; {error.strerror or error}; give the path of a YAML recipe'
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f'recipe "{path}" asked; it is not UTF-8 text; give a YAML recipe') from error
    tree, where = parse(text, str(path))
    for override in overrides:
        _apply_override(tree, where, override)
    return validate(tree, where, str(path))


def parse(text: str, source: str) -> tuple[dict[str, Any], Where]:
    """YAML text -> plain nested dict, and the line of every key."""
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        document = YAML(typ="rt").load(text)
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        what = (error.problem or "").partition(" with value")[0]
        raise ConfigError(f"{source}:{line}: {what}; a key may appear once; delete one of the two") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else "?"
        raise ConfigError(f"{source}:{line}: not valid YAML: {error.problem or error.context}") from error
    except YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    if document is None:
        document = {}
    if not isinstance(document, Mapping):
        raise ConfigError(f"{source}:1: a recipe is a mapping of sections; found a {_kind(document)}")
    where: Where = {}
    return _plain(document, (), source, where), where


def _plain(node: Any, path: tuple[str, ...], source: str, where: Where) -> Any:
    """Strip ruamel's types, noting the line of each key on the way."""
    if isinstance(node, Mapping):
        out: dict[str, Any] = {}
        for key, value in node.items():
            if not isinstance(key, str):
                raise ConfigError(f"{source}: key {key!r} under {_dotted(path)} is not text; quote it")
            here = (*path, key)
            where[here] = f"{source}:{node.lc.key(key)[0] + 1}"  # type: ignore[attr-defined]
            out[key] = _plain(value, here, source, where)
        return out
    if isinstance(node, list):
        return [_plain(item, (*path, str(i)), source, where) for i, item in enumerate(node)]
    for plain in (bool, int, float, str):
        if isinstance(node, plain):
            return plain(node)
    if node is None:
        return None
    if type(node).__name__ == "ScalarBoolean":  # ruamel: an int that stands for a bool
        return bool(node)
    raise ConfigError(
        f"{where.get(path, source)}: {_dotted(path)} has a value of kind {type(node).__name__}; "
        "use numbers, text, true or false, lists and mappings"
    )


def _apply_override(tree: dict[str, Any], where: Where, override: str) -> None:
    """Put ``a.b=c`` into ``tree``; the value is read as a YAML scalar, list or mapping."""
    dotted, equals, value = override.partition("=")
    keys = tuple(dotted.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f'--set "{override}" asked; it has no form a.b=c; write for example --set train.steps=20')
    node = tree
    for depth, key in enumerate(keys[:-1]):
        child = node.get(key)
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(f'--set "{override}" asked; {_dotted(keys[: depth + 1])} is not a section')
        node = child
        where.setdefault(keys[: depth + 1], "--set")
    parsed, _ = parse(f"value: {value}" if value.strip() else "value: ''", "--set")
    node[keys[-1]] = parsed["value"]
    where[keys] = f"--set {override}"


def validate(tree: Mapping[str, Any], where: Where | None = None, source: str = "config") -> TrainConfig:
    """Turn a nested mapping into a TrainConfig; every problem is reported, each with its place."""
    from accelbridge.train.config import TrainConfig

    try:
        return TrainConfig.model_validate(dict(tree))
    except ValidationError as error:
        problems = _one_per_place(error)
        lines = [_explain(problem, TrainConfig, where or {}, source) for problem in problems]
        raise ConfigError("\n".join(lines)) from None


def _one_per_place(error: ValidationError) -> list[Any]:
    """pydantic reports one problem per member of a union; keep the first for each place."""
    seen: dict[tuple[str, ...], Any] = {}
    for problem in error.errors(include_url=False):
        seen.setdefault(_keys(problem["loc"]), problem)
    return list(seen.values())


def _keys(loc: Sequence[int | str]) -> tuple[str, ...]:
    """Key path of a pydantic location; union members ("constrained-int", "literal[...]") are not keys."""
    parts = [str(part) for part in loc]
    return tuple(part for part in parts if "[" not in part and not part.startswith(("constrained-", "function-")))


def _explain(problem: Any, root: type[BaseModel], where: Where, source: str) -> str:
    keys = _keys(problem["loc"])
    if keys and keys[-1] in ("int", "float", "str", "none") and keys not in where:
        keys = keys[:-1]
    place = next((where[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in where), source)
    found = problem.get("input")
    kind = problem["type"]
    name = _dotted(keys)
    if kind == "extra_forbidden":
        known = _fields(root, keys[:-1])
        close = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
        hint = f'did you mean "{close[0]}"?' if close else f"known: {', '.join(known)}"
        return f'{place}: unknown key "{keys[-1]}" in {_dotted(keys[:-1]) or "the recipe"}; {hint}'
    if kind == "missing":
        return f"{place}: {name} is missing; add it"
    if kind == "value_error":
        return f"{place}: {_strip(problem['msg'])}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{place}: {name} asked as {_show(found)}; it is a section; write its keys below it"
    return f"{place}: {name} asked as {_show(found)}; {_strip(problem['msg'])}"


def _fields(model: type[BaseModel], keys: Sequence[str]) -> list[str]:
    """Field names of the section at ``keys``."""
    for key in keys:
        field = model.model_fields.get(key)
        candidates = getattr(field and field.annotation, "__args__", (field and field.annotation,))
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    return list(model.model_fields)


def _strip(message: str) -> str:
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return message[:1].lower() + message[1:] if message.startswith("Input") else message


def _dotted(keys: Sequence[str]) -> str:
    return ".".join(keys)


def _show(value: Any) -> str:
    return f'"{value}" ({_kind(value)})' if isinstance(value, str) else f"{value!r} ({_kind(value)})"


def _kind(value: Any) -> str:
    names = {bool: "true/false", int: "integer", float: "number", str: "text", list: "list", dict: "mapping"}
    return "nothing" if value is None else next((n for t, n in names.items() if isinstance(value, t)), "value")
