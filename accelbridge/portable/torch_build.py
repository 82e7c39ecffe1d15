"""Which torch is installed and what it was built for, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    """What ``torch/version.py`` says. ``built_for`` holds every vendor's version that it names, None where torch has
    nothing of that vendor."""

    version: str
    built_for: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, str]:
        """The vendors' stacks that it was built for."""
        return {name: version for name, version in self.built_for.items() if version}


def read_torch_build(path: Sequence[str] | None = None) -> TorchBuild | None:
    """The torch that ``import torch`` would find on ``path`` (absent: ``sys.path``); None where there is none, or its
    ``version.py`` can't be read. Nothing of it is run."""
    try:
        spec = find_spec("torch") if path is None else PathFinder.find_spec("torch", path)
    except ValueError:  # a module of that name without a spec
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            return parse((Path(folder) / "version.py").read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
    return None


def parse(text: str) -> TorchBuild | None:
    """``version.py`` as torch's build writes it: assignments of texts or None. Raises SyntaxError."""
    found: dict[str, str | None] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign):
            target, value = node.target, node.value
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        else:
            continue
        if not (isinstance(target, ast.Name) and isinstance(value, ast.Constant)):
            continue
        if value.value is None or isinstance(value.value, str):
            found[target.id] = value.value
    version = found.pop("__version__", None)
    if version is None:
        return None
    return TorchBuild(version, {name: value for name, value in found.items() if name not in ("git_version", "debug")})


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "535.104.05" -> (535, 104, 5); "2.13.0+cpu" -> (2, 13, 0)."""
    found: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)
