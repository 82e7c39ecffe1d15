"""Annotations: where each tensor lies on the mesh (dp_replicate, dp_shard, tp), and what the partitioner is told.

A parameter has four places, as ZeRO and tensor parallelism ask:

    stored     between steps                 over tp, and over dp_shard from stage 3 on
    gathered   while a module computes       over tp alone
    gradient   what the optimizer reads      over tp, and over dp_shard from stage 2 on
    state      moments of the optimizer      over tp and dp_shard

Modules read the gathered form through a property on a class of their own, whose backward pass places the gradient:
so the partitioner reduce-scatters it instead of finding its own way. Annotations change where values lie, never what
they are; a dimension that does not divide is padded by XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import ShardingSpec, split_dim
from accelbridge_xla.vendor import sdk

AXES = ("dp_replicate", "dp_shard", "tp")
DATA = ("dp_replicate", "dp_shard")
SEQUENCE_DIM = 1
"""Of the residual stream [B, S, ...]."""

Place = tuple[Any, ...]
"""Per dimension of a tensor: a mesh axis, a tuple of them, or None."""


@dataclass(frozen=True)
class Places:
    """Where one parameter, its gradient and its optimizer state lie."""

    stored: Place
    gathered: Place
    gradient: Place
    state: Place


def places(shape: tuple[int, ...], attribute: str, style: str | None, layout: Layout) -> Places:
    """The places of parameter ``attribute`` of a module with this tensor-parallel style."""
    split = _split_dim(attribute, style, len(shape)) if layout.tp > 1 else None
    gathered: Place = tuple("tp" if dim == split else None for dim in range(len(shape)))
    sharded = _over_dp(shape, split, layout.dp_shard)
    return Places(
        stored=sharded if layout.zero >= 3 else gathered,
        gathered=gathered,
        gradient=sharded if layout.zero >= 2 else gathered,
        state=sharded,
    )


def _split_dim(attribute: str, style: str | None, dims: int) -> int | None:
    """The dimension over tp; a vector of a style that splits columns stays whole."""
    dim = split_dim(style, attribute) if style is not None else None
    return dim if dim is not None and dim < dims else None


def _over_dp(shape: tuple[int, ...], split: int | None, degree: int) -> Place:
    """dp_shard on the first dimension that tp leaves whole and the degree divides; else on one that XLA pads."""
    free = [dim for dim in range(len(shape)) if dim != split]
    even = [dim for dim in free if shape[dim] % degree == 0]
    chosen = (even or free or [split])[0] if shape else None
    place: list[Any] = ["tp" if dim == split else None for dim in range(len(shape))]
    if chosen is not None:
        place[chosen] = ("tp", "dp_shard") if chosen == split else "dp_shard"
    return tuple(place)


class Annotator:
    """Annotates tensors of one mesh."""

    def __init__(self, layout: Layout) -> None:
        self._spmd = sdk("distributed.spmd")
        shape = tuple(getattr(layout, axis) for axis in AXES)
        self._mesh = self._spmd.Mesh(np.arange(layout.size), shape, AXES)

    def place(self, x: Tensor, where: Place) -> None:
        """Make ``x`` lie there: data is moved, a pending result will be computed there."""
        self._spmd.mark_sharding(x, self._mesh, where)

    def constrain(self, x: Tensor, forward: Place, backward: Place) -> Tensor:
        """``x``, constrained to lie at ``forward``, and its gradient at ``backward``."""
        return _Constrain.apply(x, self._alias, forward, backward)  # type: ignore[return-value]

    def _alias(self, x: Tensor, where: Place) -> Tensor:
        alias = x.clone()  # no copy: XLA tensors are values
        self._spmd.annotate_custom_sharding(alias, self._mesh, where)
        return alias


class _Constrain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, alias: Callable[[Tensor, Place], Tensor], forward: Place, backward: Place
    ) -> Tensor:
        ctx.alias, ctx.place = alias, backward
        return alias(x, forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.alias(gradient, ctx.place), None, None, None


# ------------------------------------------------------------------------------------------------ parameters


def read_gathered(module: nn.Module, found: dict[int, Places], annotator: Annotator) -> None:
    """Let ``module`` read its parameters gathered, through properties of a class of its own; names and the state dict
    stay, and whoever handles parameters sees the stored ones. ``found`` is by id of the parameter."""
    readers = {
        name: property(_reader(name, found[id(parameter)], annotator))
        for name, parameter in module.named_parameters(recurse=False)
    }
    if readers:
        kind = type(module)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        module.__class__ = type(kind.__name__, (kind,), {**names, **readers})


def _reader(name: str, where: Places, annotator: Annotator) -> Callable[[nn.Module], Any]:
    def read(module: nn.Module) -> Any:
        return annotator.constrain(module._parameters[name], where.gathered, where.gradient)  # type: ignore[arg-type]

    return read


# ----------------------------------------------------------------------------------------------- activations


def constrain_activations(model: nn.Module, spec: ShardingSpec, annotator: Annotator, sequence_parallel: bool) -> None:
    """Place what goes in and out of the modules to which ``spec`` gives a style. A module without one is left to
    the partitioner, which carries the batch's place on."""

    def whole(x: Tensor) -> Place:
        return (DATA, *[None] * (x.dim() - 1))

    def hidden(x: Tensor) -> Place:
        if not sequence_parallel or x.dim() <= SEQUENCE_DIM + 1:
            return whole(x)
        return (DATA, "tp", *[None] * (x.dim() - 2))

    def split(x: Tensor) -> Place:
        return (DATA, *[None] * (x.dim() - 2), "tp")

    leaves = {"column": split, "vocab_head": split, "row": hidden, "vocab_embedding": hidden, "hidden": hidden}
    for name, module in model.named_modules():
        style = spec.style(name)
        if style == "enter":
            module.register_forward_pre_hook(_enters(annotator, whole))
        elif style in leaves:
            module.register_forward_hook(_leaves(annotator, leaves[style]))


def _enters(annotator: Annotator, rule: Callable[[Tensor], Place]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
        first, *rest = args
        return (annotator.constrain(first, rule(first), rule(first)), *rest)

    return hook


def _leaves(annotator: Annotator, rule: Callable[[Tensor], Place]) -> Callable[..., Any]:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and output.dim() >= 2:
            return annotator.constrain(output, rule(output), rule(output))
        return output

    return hook
