"""The semantic ops: what models and trainers call, and what a plan binds to one implementation each.

    from accelbridge import ops
    y = ops.rms_norm(x, weight, 1e-5)

Call them through the module, as above: :func:`bind` replaces the module's attributes once, when the plan is
bound, so that a call is a plain function call (nothing is looked up or decided per call, and compilers see
through it). ``from accelbridge.ops import rms_norm`` would keep whatever was bound at that moment.

Each op has a portable reference in plain PyTorch, which defines its meaning and gives its gradient. A
vendor's implementation takes the same arguments and returns the same shapes and dtypes.

Shape suffixes: B batch, S sequence, H query heads, G key/value heads, D head dimension, P = D / 2, N tokens,
V vocabulary. Shapes that don't fit raise ``ValueError`` at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accelbridge.errors import ConfigError, did_you_mean
from accelbridge.ops.chunked_losses import linear_cross_entropy, vocab_parallel_linear_cross_entropy
from accelbridge.ops.dot_product import attention
from accelbridge.ops.keyed_dropout import dropout, dropout_keys, dropout_stream
from accelbridge.ops.layers import embedding, linear, rms_norm, rope, rope_table, swiglu
from accelbridge.ops.losses import cross_entropy, vocab_parallel_cross_entropy
from accelbridge.ops.masks import visible_keys
from accelbridge.precision.linear import fp8_linear

_REFERENCE: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "cross_entropy": cross_entropy,
    "dropout": dropout,
    "embedding": embedding,
    "fp8_linear": fp8_linear,
    "linear": linear,
    "linear_cross_entropy": linear_cross_entropy,
    "rms_norm": rms_norm,
    "rope": rope,
    "swiglu": swiglu,
    "vocab_parallel_cross_entropy": vocab_parallel_cross_entropy,
    "vocab_parallel_linear_cross_entropy": vocab_parallel_linear_cross_entropy,
}

NAMES: tuple[str, ...] = tuple(_REFERENCE)
"""The ops that a plan binds."""


def _check_names(names: Mapping[str, object] | list[str]) -> None:
    for name in names:
        if name not in _REFERENCE:
            raise ConfigError(f'there is no op "{name}"{did_you_mean(name, list(NAMES))} (ops: {", ".join(NAMES)})')


def reference(name: str) -> Callable[..., Any]:
    """Return the portable implementation of op ``name``, whatever is bound. Raises ``ConfigError``."""
    _check_names([name])
    return _REFERENCE[name]


def bind(table: Mapping[str, Callable[..., Any]]) -> None:
    """Make ``ops.<name>`` each callable of ``table``; ops it doesn't name stay as they are.

    Binds all or, if a name or value is wrong (``ConfigError``), nothing. Bind before compiling: a compiled
    function that has seen another binding is compiled again.
    """
    _check_names(table)
    for name, implementation in table.items():
        if not callable(implementation):
            raise ConfigError(f"op {name} was given {implementation!r}, which can't be called")
    globals().update(table)


def bound() -> dict[str, Callable[..., Any]]:
    """What each op is bound to now."""
    return {name: globals()[name] for name in NAMES}


def reset() -> None:
    """Bind every op to its portable reference."""
    bind(_REFERENCE)


__all__ = [
    "NAMES",
    "attention",
    "bind",
    "bound",
    "cross_entropy",
    "dropout",
    "dropout_keys",
    "dropout_stream",
    "embedding",
    "fp8_linear",
    "linear",
    "linear_cross_entropy",
    "reference",
    "reset",
    "rms_norm",
    "rope",
    "rope_table",
    "swiglu",
    "visible_keys",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
