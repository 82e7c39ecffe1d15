"""What ``precision.fp8`` means on one chip: formats, the scaling of each operand, what pads. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Literal

from accelbridge.backend import FULL, Capabilities, Support
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.precision.config import Fp8Config

Role = Literal["input", "weight", "gradient"]
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")
"""The tensors of a linear layer that are quantized; rows of its state, in this order."""

VARIANTS: Mapping[str, tuple[str, str]] = {
    "fn": ("float8_e4m3fn", "float8_e5m2"),
    "fnuz": ("float8_e4m3fnuz", "float8_e5m2fnuz"),
    "ieee": ("float8_e4m3", "float8_e5m2"),
}
"""(E4M3, E5M2) of each."""
_GRANULARITY: Mapping[str, tuple[str, str]] = {
    "tensor": ("tensor", "tensor"),
    "delayed": ("tensor", "tensor"),
    "row": ("row", "row"),
    "block": ("block1x128", "block128x128"),
    "mx": ("mx_pow2", "mx_pow2"),
}
"""Scaling of the operand that is an activation or a gradient, and of a weight."""


@dataclass(frozen=True)
class Fp8Recipe:
    """Resolved: every name is one that ``Matmul.quantize`` takes."""

    config: Fp8Config
    forward: str
    """Format of activations and weights."""
    backward: str
    """Format of gradients."""
    moving: str
    """Scaling of activations and gradients."""
    weight: str
    """Scaling of weights."""
    multiple: int = 1
    """Sizes of products are padded with zeros to multiples of this."""
    support: Support = FULL

    @property
    def delayed(self) -> bool:
        return self.config.scaling == "delayed"

    @property
    def symmetric(self) -> bool:
        """Whether a matrix and its transpose are quantized alike, so that one serves both products it is in."""
        return self.moving.startswith("tensor")

    @property
    def products(self) -> tuple[tuple[str, str, str], ...]:
        """(name, formats, scalings) of the three products, as cells of the capability table name them."""
        mixed = self.moving if self.moving == self.weight else f"{self.moving} x {self.weight}"
        formats = self.forward if self.forward == self.backward else f"{self.backward} x {self.forward}"
        return (
            ("forward", self.forward, mixed),
            ("input gradient", formats, mixed),
            ("weight gradient", formats, self.moving),
        )

    def format_of(self, role: Role) -> str:
        return self.backward if role == "gradient" else self.forward


def resolve(config: Fp8Config, capabilities: Capabilities, backend: str) -> Fp8Recipe:
    """The recipe on this chip. Raises Unsupported, with the reason and what to set, where it cannot be had."""
    forward, backward = _formats(config, capabilities, backend)
    moving, weight = _GRANULARITY[config.scaling]
    if config.scaling != "mx" and (config.power_of_two or capabilities.facts.get("fp8.scales") == "power_of_two"):
        moving, weight = f"{moving}_pow2", f"{weight}_pow2"
    recipe = Fp8Recipe(config, forward, backward, moving, weight)
    supports = list(_supports(recipe, capabilities))
    for what, support in supports:
        if not support:
            raise Unsupported(
                f'precision "fp8" asked with {config.scaling} scaling; backend "{backend}" on '
                f"{capabilities.chip.name} has no {what}: {support.reason}; choose another precision.fp8.scaling, set "
                "precision.compute: bfloat16, or see 'accelbridge explain'"
            )
    if config.gather and config.scaling not in ("tensor", "delayed"):
        raise ConfigError(
            f"precision.fp8.gather asked with {config.scaling} scaling; the backward pass needs weights scaled along "
            "their other dimension, which gathered codes no longer are; set gather: false, or scaling tensor or delayed"
        )
    multiple = lcm(*(limit.multiple for _, support in supports for limit in support.limits))
    emulated = next((support for _, support in supports if support.level == "emulated"), None)
    return Fp8Recipe(config, forward, backward, moving, weight, multiple, emulated or FULL)


def _formats(config: Fp8Config, capabilities: Capabilities, backend: str) -> tuple[str, str]:
    known = str(capabilities.facts.get("fp8.variant", "")).split()
    where = f'backend "{backend}" on {capabilities.chip.name}'
    if not known:
        stated = (cell.reason for (op, *_), cell in capabilities.table.items() if op == "scaled_mm" and not cell)
        why = next((f": {reason}" for reason in stated if reason), "")
        raise Unsupported(
            f'precision "fp8" asked; {where} has no fp8 matmul{why}; set precision.compute: bfloat16, or see '
            "'accelbridge explain'"
        )
    variant = known[0] if config.variant == "auto" else config.variant
    if variant not in known:
        raise Unsupported(
            f"precision.fp8.variant {variant} asked; {where} has {', '.join(known)}: the same bits are other numbers "
            "there; set variant: auto"
        )
    e4m3, e5m2 = VARIANTS[variant]
    return e4m3, e5m2 if config.format == "hybrid" else e4m3


def _supports(recipe: Fp8Recipe, capabilities: Capabilities) -> Iterable[tuple[str, Support]]:
    for format in dict.fromkeys((recipe.forward, recipe.backward)):
        yield f"quantize to {format} ({recipe.moving})", capabilities.support("quantize", format, recipe.moving)
    yield (
        f"quantize to {recipe.forward} ({recipe.weight})",
        capabilities.support("quantize", recipe.forward, recipe.weight),
    )
    for name, formats, scalings in recipe.products:
        what = f"product for the {name}" if name != "forward" else "product for the forward pass"
        yield f"{what}, {formats} ({scalings})", capabilities.support("scaled_mm", formats, scalings)


def check_sizes(recipe: Fp8Recipe, linears: Mapping[str, tuple[int, int]], tokens: int) -> None:
    """Raise ConfigError where a product would need padding, which the recipe forbids.

    ``linears``: (out, in) as far as one device holds them, by name. ``tokens``: of a microbatch; the gradient of a
    weight is a sum over them."""
    if recipe.config.pad or recipe.multiple == 1:
        return
    for name, sizes in {"a microbatch": (tokens,), **linears}.items():
        for size in sizes:
            if size % recipe.multiple:
                raise ConfigError(
                    f"precision.fp8.pad false asked; {name} has a size of {size}, and products here take multiples "
                    f"of {recipe.multiple}; set pad: true, change the size, or exclude it"
                )
