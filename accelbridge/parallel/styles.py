"""A sharding spec applied to a model: the style of each of its modules, checked before anything is split."""

from __future__ import annotations

from torch import Tensor, nn

from accelbridge.errors import ConfigError
from accelbridge.models.dropout import Dropout
from accelbridge.parallel.spec import ShardingSpec, split_dim


def module_styles(model: nn.Module, spec: ShardingSpec, degree: int, sequence_parallel: bool) -> dict[str, str]:
    """Style by module name, for tp of ``degree``. Raises ConfigError, which says what to write."""
    if not spec.tensor_parallel:
        raise ConfigError(_without_spec(model, spec, degree))
    styles: dict[str, str] = {}
    owners: dict[int, tuple[str, int | None]] = {}
    for name, module in model.named_modules():
        _check_dropout(name, module, spec.style(name), degree)
        parameters = dict(module.named_parameters(recurse=False))
        style = spec.style(name)
        if style is None and parameters:
            raise ConfigError(
                f"parallel.tp {degree} asked; the sharding spec gives no style to {_called(name, module)}, which "
                f"holds {', '.join(parameters)}; add it to "
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
    for attribute, parameter in module.named_parameters(recurse=False):
        _check_divides(f"{name}.{attribute}", parameter, split_dim(style, attribute), degree)
    if style == "vocab_embedding":
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option, None):
                raise ConfigError(
                    f'parallel.tp {degree} asked; embedding "{name}" has {option}, which needs the whole embedding '
                    f"and all its tokens in one place; remove {option}"
                )


def _check_divides(name: str, parameter: Tensor, dim: int | None, degree: int) -> None:
    if dim is None:
        return
    shape = tuple(parameter.shape)
    if len(shape) <= dim or shape[dim] % degree:
        found = f"{shape[dim]} is not a multiple of {degree}" if len(shape) > dim else "it has no such dimension"
        raise ConfigError(
            f"parallel.tp {degree} asked; {name} {shape} is split along dimension {dim}, and {found}; "
            "set parallel.tp to one of its divisors, or give the module another style"
        )


def _check_dropout(name: str, module: nn.Module, style: str | None, degree: int) -> None:
    """Dropout has no parameters, so that nothing else would miss its style."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        raise ConfigError(
            f"parallel.tp {degree} asked; {_called(name, module)} draws from each device's own generator, so that "
            "devices that hold the same activations would drop others; use accelbridge.models.Dropout"
        )
    if isinstance(module, Dropout) and module.p > 0 and style not in ("hidden", "replicated"):
        raise ConfigError(
            f"parallel.tp {degree} asked; {_called(name, module)} has {f'the style {style}' if style else 'no style'}; "
            'its masks are known for whole features alone: give it "hidden" on the residual stream, "replicated" on '
            "other whole activations, or remove it between a column and a row"
        )


def _called(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f'module "{name}" ({kind})' if name else f'the model itself ({kind}; its name is "")'


def _pattern(model: nn.Module, name: str) -> str:
    """``name`` with a star for numbers in a ModuleList; those in a Sequential stand for modules of different kinds."""
    parts = name.split(".")
    owners = [".".join(parts[:i]) for i in range(len(parts))]
    return ".".join(
        "*" if isinstance(model.get_submodule(owner), nn.ModuleList) else part
        for owner, part in zip(owners, parts, strict=True)
    )


def _without_spec(model: nn.Module, spec: ShardingSpec, degree: int) -> str:
    """What to write, with the model's own names. It is right as it stands, and splits what is certain: which
    projections begin and end a region only the model's author knows."""
    holders = {
        _pattern(model, name): module
        for name, module in model.named_modules()
        if list(module.parameters(recurse=False))
    }
    vocabulary = {m.num_embeddings for m in holders.values() if isinstance(m, nn.Embedding)}
    last = list(holders)[-1]
    lines = []
    for name, module in holders.items():
        style, hint = "replicated", ""
        if isinstance(module, nn.Embedding) and module.num_embeddings % degree == 0:
            style = "vocab_embedding"
        elif isinstance(module, nn.Linear) and name == last and module.out_features in vocabulary:
            style = "vocab_head"
        elif isinstance(module, nn.Linear):
            hint = "  # column where it begins a region that is split, row where it ends one"
        lines.append(f'            "{name}": "{style}",{hint}')
    return "\n".join(
        [
            f"parallel.tp {degree} asked; {type(model).__name__} does not say how it may be split; set parallel.tp: 1, "
            "or define on it, with from accelbridge.parallel.spec import ShardingSpec:",
            "    def sharding_spec(self):",
            f"        return ShardingSpec(units={spec.units!r}, tensor_parallel={{",
            *lines,
            "        })",
        ]
    )
