"""Sharding spec: a model's vendor-neutral statement of how it may be split. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

STYLES: dict[str, str] = {
    "enter": "a container whose first input is gathered once for all columns in it",
    "column": "weight [out, in] and bias split along out; takes the whole features, leaves its share of out",
    "row": "weight [out, in] split along in, bias whole; takes its share of the features, leaves the sum",
    "heads": "whole parameters, applied to this device's share of the heads",
    "hidden": "whole parameters, on the residual stream",
    "vocab_embedding": "weight [vocabulary, dim] split along the vocabulary; leaves the residual stream",
    "vocab_head": "a column whose output, the logits, stays split along the vocabulary for the loss",
    "replicated": "whole parameters on whole activations",
}
"""How a module may lie on the axis tp. The residual stream ("hidden") is [B, S, ...]: whole on every device, or,
under sequence parallel, its share of S. Between "enter" or "column" and "row" activations hold the whole sequence
and a share of the features."""

_SPLIT_DIM = {"column": 0, "row": 1, "vocab_embedding": 0, "vocab_head": 0}


def split_dim(style: str, parameter: str) -> int | None:
    """The dimension along which a style splits a module's parameter of this name; None: it stays whole."""
    return None if style == "row" and parameter != "weight" else _SPLIT_DIM.get(style)


@dataclass(frozen=True)
class ShardingSpec:
    """How a model may be split; execution models realise it, each in its own way.

    Patterns (``fnmatch``) are of module names: ``layers.*`` means ``layers.0``, not ``layers.0.norm``.
    """

    units: tuple[str, ...] = ()
    """The parameters of a matching module are gathered together just before it runs. What no unit claims belongs
    to the root."""
    tensor_parallel: Mapping[str, str] = field(default_factory=dict)
    """Pattern -> one of :data:`STYLES`. With tp above 1 every module that holds parameters needs one."""

    def __post_init__(self) -> None:
        for pattern, style in self.tensor_parallel.items():
            if style not in STYLES:
                raise ValueError(f'tensor_parallel["{pattern}"] is "{style}"; styles are {", ".join(STYLES)}')

    def is_unit(self, name: str) -> bool:
        """Whether the module ``name`` is a shard unit."""
        return any(_matches(name, unit) for unit in self.units)

    def style(self, name: str) -> str | None:
        """How the module ``name`` lies on tp, by the first pattern that matches; None if nothing is said."""
        return next((style for pattern, style in self.tensor_parallel.items() if _matches(name, pattern)), None)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")
