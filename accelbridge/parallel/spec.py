"""Sharding spec: a model's vendor-neutral statement of how it may be split. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class ShardingSpec:
    """How a model may be split; execution models realise it, each in its own way.

    ``units`` are patterns (``fnmatch``) of module names, for example ``layers.*``: the parameters of a matching
    module are gathered together just before it runs. What no unit claims belongs to the root.
    """

    units: tuple[str, ...] = ()

    def is_unit(self, name: str) -> bool:
        """Whether the module ``name`` is a shard unit; ``layers.*`` means ``layers.0``, not ``layers.0.norm``."""
        return any(fnmatchcase(name, unit) and name.count(".") == unit.count(".") for unit in self.units)
