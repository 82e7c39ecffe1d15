"""The model of a run, its sharding spec, and how its parameters get their first values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelbridge.errors import ConfigError
from accelbridge.models.decoder import Decoder
from accelbridge.models.huggingface import check_heads, tensor_parallel_of
from accelbridge.models.init import Init, default_init, initial_values
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import ShardingSpec
from accelbridge.parallel.styles import module_styles
from accelbridge.train.check import check_tensor_parallel
from accelbridge.train.config import TrainConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def build_model(config: TrainConfig) -> nn.Module:
    """The recipe's decoder, on the meta device: no rank ever holds it whole."""
    assert config.model is not None, "prepare() checked it"
    with torch.device("meta"):
        return Decoder(config.model)


def initialiser(model: nn.Module, seed: int) -> Callable[[str, tuple[int, ...], range], Tensor]:
    """A function that makes rows of any of the model's meta parameters.

    A model may define ``initialiser(name) -> Init``; without it, torch's own modules get torch's own distributions.
    """
    own: Callable[[str], Init] | None = getattr(model, "initialiser", None)
    rules = {name: own(name) if own else _rule(model, name) for name, p in model.named_parameters() if p.is_meta}

    def initialise(name: str, shape: tuple[int, ...], rows: range) -> Tensor:
        return initial_values(seed, name, shape, rows, rules[name])

    return initialise


def sharding_spec(model: nn.Module, layout: Layout) -> ShardingSpec:
    """How ``model`` is split: what its own ``sharding_spec()`` says, else one unit per child of a ``ModuleList`` and,
    for Hugging Face models, tensor parallelism by their ``_tp_plan``.

    Raises ConfigError for a model that ``layout`` cannot split.
    """
    own: Callable[[], ShardingSpec] | None = getattr(model, "sharding_spec", None)
    if own is not None:
        spec = own()
    else:
        units = tuple(f"{name}.*" for name, m in model.named_modules() if isinstance(m, nn.ModuleList))
        spec = ShardingSpec(units, (tensor_parallel_of(model) if layout.tp > 1 else None) or {})
    if layout.tp > 1:
        if isinstance(model, Decoder):
            check_tensor_parallel(layout, model.config)
        check_heads(model, layout.tp)
        module_styles(model, spec, layout.tp, layout.sequence_parallel)
    return spec


def _rule(model: nn.Module, name: str) -> Init:
    owner, _, attribute = name.rpartition(".")
    init = default_init(model.get_submodule(owner), attribute)
    if init is None:
        raise ConfigError(
            f"parameter {name} of a {type(model.get_submodule(owner)).__name__} is on the meta device and has no rule "
            "to be initialised; build the model on the CPU, or define initialiser(name) -> Init on it"
        )
    return init


def check_equal(model: nn.Module, group: ProcessGroup | None) -> None:
    """Raise ConfigError on every rank unless a materialised model has the same values on all of them."""
    import torch.distributed as dist

    if group is None or dist.get_world_size(group) == 1:
        return
    mine = {name: _digest(tensor) for name, tensor in model.state_dict().items()}
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    for rank, theirs in enumerate(gathered):
        differ = sorted(n for n in gathered[0].keys() | theirs.keys() if gathered[0].get(n) != theirs.get(n))
        if differ:
            raise ConfigError(
                f"the model's values differ between rank 0 and rank {rank}: {differ[0]} and {len(differ) - 1} more; "
                "seed every rank equally before building it, or build it on the meta device"
            )


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()
