"""Hugging Face models: how one may be split, from what it says itself. Imports nothing of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from accelbridge.errors import ConfigError
from accelbridge.parallel.spec import ShardingSpec

# Names of transformers 4.50 to 5.24, integrations/tensor_parallel.py; "colwise_rep" became "colwise_gather_output".
_STYLES: dict[str, str] = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocab_embedding",
    "replicated_with_grad_allreduce": "heads",
}
_GATHERED = ("colwise_rep", "colwise_gather_output")


def tensor_parallel_of(model: nn.Module) -> Mapping[str, str] | None:
    """Styles by pattern from the model's ``_tp_plan``; None where it has none.

    What the plan leaves out stays whole. Raises ConfigError for a style that has no counterpart here, and for what
    is left out right beside modules that are split.
    """
    plan: Mapping[str, str] | None = getattr(model, "_tp_plan", None)
    if not plan:
        return None
    head = _named(model, "get_output_embeddings")
    styles: dict[str, str] = {}
    for pattern, theirs in plan.items():
        style = "vocab_head" if theirs in _GATHERED and pattern == head else _STYLES.get(theirs)
        if style is None:
            raise ConfigError(
                f'parallel.tp asked; the _tp_plan of {type(model).__name__} gives "{theirs}" to {pattern}, which '
                f"accelbridge does not split (it knows {', '.join(_STYLES)}); set parallel.tp: 1, or define "
                "sharding_spec() on the model"
            )
        styles[pattern] = style
    _check_left_out(model, styles)
    return {**styles, **_vocabulary(model, head, styles), **_whole(model, styles)}


def _check_left_out(model: nn.Module, styles: Mapping[str, str]) -> None:
    """Beside a column, a module may work on its share of the features, as norms of queries and keys do (plans of
    transformers 4 leave them out): whole parameters would then get a share of their gradient, without an error."""
    spec = ShardingSpec(tensor_parallel=styles)
    owners = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(False))}
    regions = {name.rpartition(".")[0]: name for name in owners if spec.style(name) in ("column", "row")}
    for name, module in owners.items():
        region = name if name in regions else name.rpartition(".")[0]
        if region in regions and spec.style(name) is None:
            raise ConfigError(
                f'parallel.tp asked; the _tp_plan of {type(model).__name__} says nothing of "{name}" '
                f"({type(module).__name__}), beside {regions[region]}, which it splits; set parallel.tp: 1, or define "
                'sharding_spec() on the model, which gives it a style: "heads" if it works on each head by itself, '
                '"replicated" on whole activations'
            )


def check_heads(model: nn.Module, tp: int) -> None:
    """Raise ConfigError where a Hugging Face config has heads that ``tp`` does not divide."""
    config: Any = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % tp:
            raise ConfigError(
                f"parallel.tp {tp} asked; it splits {name} {heads} of {type(model).__name__}, which is not a multiple "
                f"of {tp}; set parallel.tp to one of its divisors"
            )


def _vocabulary(model: nn.Module, head: str | None, styles: Mapping[str, str]) -> dict[str, str]:
    """Both ends, where one is split and they share their weight: one parameter has one split."""
    embed = _named(model, "get_input_embeddings")
    if (
        head is None
        or embed is None
        or model.get_parameter(f"{head}.weight") is not model.get_parameter(f"{embed}.weight")
    ):
        return {}
    return {head: "vocab_head", embed: "vocab_embedding"} if {head, embed} & styles.keys() else {}


def _whole(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Everything else, by its full name; a pattern that matches comes first in any case."""
    return {
        name: "replicated"
        for name, module in model.named_modules()
        if name and name not in styles and any(True for _ in module.parameters(recurse=False))
    }


def _named(model: nn.Module, getter: str) -> str | None:
    """Name of the module that a getter of the model returns."""
    get = getattr(model, getter, None)
    wanted = get() if callable(get) else None
    return next((name for name, module in model.named_modules() if module is wanted), None) if wanted else None
