"""Seeded defects: what proves that the tests can fail.

A mutant is a function that breaks this process (a rank of the suite, before the backend is made), by replacing a
method of the CPU backend, of the portable pieces below it or of the trainer. It names the tests that it must turn red
and the assertion that must do it: a crash, or another assertion, is no kill. Benign variants break nothing that the
suite asks for, and every test must stay green on them.

    @mutant("G2", "drops the last element of K", {"MM-001": "EXACT", "MM-002": "BOUND"})
    def drops_last_k(patch: Patch) -> None:
        def matmul(inner, self, a, b, out_dtype=None):
            return inner(self, a[..., :-1], b[..., :-1, :], out_dtype)

        patch(PortableMatmul, "matmul", matmul)
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from accelbridge.errors import ConfigError, did_you_mean


def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``replacement(inner, *args, **kwargs)``, where ``inner`` is what was there."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def broken(*args: Any, **kwargs: Any) -> Any:
        return replacement(inner, *args, **kwargs)

    setattr(owner, name, broken)


Patch = Callable[[Any, str, Callable[..., Any]], None]


@dataclass(frozen=True)
class Mutant:
    """One seeded defect or, without ``kills``, a benign variant."""

    id: str
    what: str
    kills: Mapping[str, tuple[str, ...]]
    """Test id -> the codes of which one must be its failure's. Empty: benign."""
    green: tuple[str, ...]
    """Families of ids ("MM", "ATT-001") that a benign variant must leave green."""
    break_it: Callable[[Patch], None]


_MUTANTS: dict[str, Mutant] = {}


def mutant(id: str, what: str, kills: Mapping[str, str | tuple[str, ...]]) -> Callable[[Callable[[Patch], None]], Any]:
    """Register a defect; ``kills`` gives the code of the assertion, or several that are as good."""
    plain = {test: (codes,) if isinstance(codes, str) else codes for test, codes in kills.items()}
    assert plain, f"mutant {id} kills nothing"
    return _register(id, what, plain, ())


def benign(id: str, what: str, green: tuple[str, ...]) -> Callable[[Callable[[Patch], None]], Any]:
    """Register a variant that is right, though different."""
    return _register(id, what, {}, green)


def _register(id: str, what: str, kills: Mapping[str, tuple[str, ...]], green: tuple[str, ...]) -> Callable[..., Any]:
    def register(break_it: Callable[[Patch], None]) -> Callable[[Patch], None]:
        assert id not in _MUTANTS, f"mutant {id} is registered twice"
        _MUTANTS[id] = Mutant(id, what, kills, green, break_it)
        return break_it

    return register


@cache
def mutants() -> Mapping[str, Mutant]:
    """All of them by id. Imports torch."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_MUTANTS.items()))


def apply(id: str) -> None:
    """Break this process as mutant ``id`` says."""
    known = mutants()
    if id not in known:
        raise ConfigError(f'mutant "{id}" asked; no such mutant{did_you_mean(id, list(known))}')
    known[id].break_it(patch)
