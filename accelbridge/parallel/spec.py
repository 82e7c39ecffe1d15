"""Sharding spec: a model's vendor-neutral statement of how it may be split. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from accelbridge.errors import ConfigError
from accelbridge.parallel.layout import Layout

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


def data_parallel_dim(part: Sequence[int], degree: int) -> int | None:
    """The dimension along which data parallel splits a part of what tp has split along dimension 0.

    FSDP2 splits it evenly or not at all, so that is the first one that ``degree`` divides; None: there is none.
    """
    return next((dim for dim, length in enumerate(part) if length % degree == 0), None)


def check_data_parallel(layout: Layout, spec: ShardingSpec, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ConfigError for a parameter (full name -> full shape) of which ``layout`` cannot split the parts."""
    if layout.tp == 1:
        return
    for name, shape in shapes.items():
        owner, _, attribute = name.rpartition(".")
        style = spec.style(owner)
        if style is None or split_dim(style, attribute) != 0:
            continue
        part = (shape[0] // layout.tp, *shape[1:])
        if data_parallel_dim(part, layout.dp_shard) is None:
            raise ConfigError(
                f"parallel.dp_shard {layout.dp_shard} asked; {name} {tuple(shape)} is split over tp {layout.tp} along "
                f"dimension 0, and no dimension of a part {part} is a multiple of {layout.dp_shard}; set another "
                "parallel.dp_shard (the rest may be parallel.dp_replicate), or another parallel.tp"
            )


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")
