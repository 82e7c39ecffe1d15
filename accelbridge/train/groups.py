"""Which settings of the optimizer a parameter gets, decided by its full name. Free of torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from accelbridge.errors import ConfigError
from accelbridge.train.config import OptimizerConfig, ParameterGroup

Shapes = Mapping[str, Sequence[int]]
"""Full parameter name -> full shape."""


@dataclass(frozen=True)
class Rule:
    """How one parameter is updated."""

    lr_scale: float
    weight_decay: float
    frozen: bool = False


def rules(shapes: Shapes, config: OptimizerConfig) -> dict[str, Rule]:
    """The rule of every parameter. Raises ConfigError for a pattern without effect, and where all are frozen."""
    chosen = _members(shapes, config.groups)
    found = {name: _rule(len(shape), chosen.get(name), config) for name, shape in shapes.items()}
    if found and all(rule.frozen for rule in found.values()):
        raise ConfigError("optimizer.groups asked; they freeze every parameter of the model; leave some to be trained")
    return found


def group_notes(shapes: Shapes, config: OptimizerConfig) -> list[str]:
    """One line per group for the plan, the rest of the parameters last; nothing without groups."""
    chosen = _members(shapes, config.groups)
    labels = [(group, f"{', '.join(group.patterns)}: {_settings(group)}") for group in config.groups]
    lines = []
    for group, label in [*labels, (None, "all others: weight decay of matrices only")]:
        sizes = [prod(shape) for name, shape in shapes.items() if chosen.get(name) is group]
        lines.append(f"optimizer group {label}; {sum(sizes)} parameters in {_tensors(len(sizes))}")
    return lines if config.groups else []


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' * (count != 1)}"


def _members(shapes: Shapes, groups: Sequence[ParameterGroup]) -> dict[str, ParameterGroup]:
    """The first group that matches each parameter, by name."""
    chosen: dict[str, ParameterGroup] = {}
    for index, group in enumerate(groups):
        for pattern in group.patterns:
            matching = [name for name in shapes if fnmatchcase(name, pattern)]
            new = [name for name in matching if name not in chosen]
            if not new:
                raise ConfigError(_without_effect(f"optimizer.groups.{index}.pattern", pattern, matching, shapes))
            chosen |= dict.fromkeys(new, group)
    return chosen


def _without_effect(setting: str, pattern: str, matching: Sequence[str], shapes: Shapes) -> str:
    if matching:
        return (
            f'{setting} "{pattern}" asked; all that it matches ({matching[0]} and {len(matching) - 1} more) belongs to '
            "patterns before it, and the first one wins; put the narrower pattern first"
        )
    close = difflib.get_close_matches(pattern.replace("*", ""), list(shapes), n=1, cutoff=0.0)
    return f'{setting} "{pattern}" asked; no parameter has such a name; the closest is {"".join(close)}; correct it'


def _rule(dimensions: int, group: ParameterGroup | None, config: OptimizerConfig) -> Rule:
    default = config.weight_decay if dimensions >= 2 else 0.0
    if group is None:
        return Rule(1.0, default)
    decay = default if group.weight_decay is None else group.weight_decay
    return Rule(1.0 if group.lr_scale is None else group.lr_scale, decay, group.frozen)


def _settings(group: ParameterGroup) -> str:
    if group.frozen:
        return "frozen"
    texts = [f"lr x {group.lr_scale:g}"] if group.lr_scale is not None else []
    texts += [f"weight decay {group.weight_decay:g}"] if group.weight_decay is not None else []
    return ", ".join(texts)
