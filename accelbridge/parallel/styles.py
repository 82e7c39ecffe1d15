"""A sharding spec applied to a model: the style of each of its modules, checked before anything is split."""

from __future__ import annotations

import re

from torch import Tensor, nn

from accelbridge.errors import ConfigError
from accelbridge.parallel.spec import ShardingSpec, split_dim


def module_styles(model: nn.Module, spec: ShardingSpec, degree: int, sequence_parallel: bool) -> dict[str, str]:
    """Style by module name, for tp of ``degree``. Raises ConfigError, which says what to write."""
    if not spec.tensor_parallel:
        raise ConfigError(_without_spec(model, spec, degree))
    styles: dict[str, str] = {}
    owners: dict[int, tuple[str, int | None]] = {}
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        style = spec.style(name)
        if style is None and parameters:
            raise ConfigError(
                f'parallel.tp {degree} asked; the sharding spec gives no style to module "{name}" '
                f"({type(module).__name__}), which holds {', '.join(parameters)}; add it to "
                'ShardingSpec(tensor_parallel={...}), "replicated" where it is to stay whole'
            )
        if style is None:
            continue
        styles[name] = style
        _check_module(name, module, style, degree, sequence_parallel)
        for attribute, parameter in parameters.items():
            dim = split_dim(style, attribute)
            other, their_dim = owners.setdefault(id(parameter), (f"{name}.{attribute}", dim))
            if their_dim != dim:
                raise ConfigError(
                    f"parallel.tp {degree} asked; {name}.{attribute} and {other} are one parameter, and the sharding "
                    "spec splits them differently; give both modules styles that split the same dimension"
                )
    if sequence_parallel and "vocab_head" not in styles.values():
        raise ConfigError(
            "parallel.sequence_parallel asked; the sharding spec has no vocab_head, so nothing would gather the "
            "sequence again; set parallel.sequence_parallel: false, or give the output projection that style"
        )
    return styles


def _check_module(name: str, module: nn.Module, style: str, degree: int, sequence_parallel: bool) -> None:
    if sequence_parallel and style == "replicated":
        raise ConfigError(
            f'parallel.sequence_parallel asked; module "{name}" has the style replicated, for whole activations, and '
            'the residual stream is split; give it the style "hidden" if it works on each token by itself, or set '
            "parallel.sequence_parallel: false"
        )
    dim = split_dim(style, "weight")
    if dim is None:
        return
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ConfigError(
            f'parallel.tp {degree} asked; module "{name}" has the style {style}, which splits a weight of two '
            "dimensions, and it has none; correct its sharding spec"
        )
    if weight.shape[dim] % degree:
        raise ConfigError(
            f"parallel.tp {degree} asked; {name}.weight {tuple(weight.shape)} is split along dimension {dim}, "
            f"and {weight.shape[dim]} is not a multiple of {degree}; set parallel.tp to one of its divisors"
        )
    if getattr(module, "max_norm", None) is not None:
        raise ConfigError(
            f'parallel.tp {degree} asked; embedding "{name}" has max_norm, which needs whole rows of every device; '
            "remove max_norm"
        )


_GUESSES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Embedding, "vocab_embedding"),
    (nn.Linear, "column"),
    (nn.Module, "replicated"),
)


def _without_spec(model: nn.Module, spec: ShardingSpec, degree: int) -> str:
    """What to write, with the model's own names; which projections end a region only its author knows."""
    holders = {
        re.sub(r"\.\d+(?=\.|$)", ".*", n): m for n, m in model.named_modules() if list(m.parameters(recurse=False))
    }
    guesses = {n: next(style for kind, style in _GUESSES if isinstance(m, kind)) for n, m in holders.items()}
    lines = [f'            "{name}": "{style}",' for name, style in guesses.items()]
    return "\n".join(
        [
            f"parallel.tp {degree} asked; {type(model).__name__} does not say how it may be split; set parallel.tp: 1, "
            "or define on it (a projection that ends a region is a row; the output projection a vocab_head):",
            "    def sharding_spec(self):",
            f"        return ShardingSpec(units={spec.units!r}, tensor_parallel={{",
            *lines,
            "        })",
        ]
    )
