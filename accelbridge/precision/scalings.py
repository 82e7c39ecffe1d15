"""How scales are made, by name. Imports no torch: capability tables are keyed by these names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from accelbridge.errors import ConfigError, did_you_mean

WHOLE = -1
"""As a block's size: the whole dimension."""


@dataclass(frozen=True)
class Scaling:
    """How scales are made from the tensor itself: in each block, its largest magnitude over the format's.

    With a ``scale_format`` of exponents alone (e8m0), by the rule of OCP Microscaling Formats (MX) 1.0, section 6.3,
    instead: 2^(floor(log2(largest magnitude)) - exponent of the format's largest number). That is up to a binade less,
    so the largest elements may saturate; ``power_of_two`` rounds up instead, as is better for training (Mishra et al.,
    arXiv:2506.08027).
    """

    name: str
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    power_of_two: bool = False
    """Whether scales are rounded up to powers of two, so that scaling rounds nothing."""
    unit: bool = False
    """Whether scales are 1 whatever the tensor holds: a plain cast."""
    scale_format: Literal["float32", "float8_e8m0fnu"] = "float32"
    """What a scale can be kept in; a :class:`QuantizedTensor` holds float32 all the same."""


_BLOCKS = {"tensor": (WHOLE, WHOLE), "row": (1, WHOLE), "block1x128": (1, 128), "block128x128": (128, 128)}
SCALINGS: Mapping[str, Scaling] = {
    "unit": Scaling("unit", (WHOLE, WHOLE), unit=True),
    **{name: Scaling(name, block) for name, block in _BLOCKS.items()},
    "mx": Scaling("mx", (1, 32), scale_format="float8_e8m0fnu"),
    "mx_pow2": Scaling("mx_pow2", (1, 32), power_of_two=True, scale_format="float8_e8m0fnu"),
    **{f"{name}_pow2": Scaling(f"{name}_pow2", block, power_of_two=True) for name, block in _BLOCKS.items()},
}
"""By name, as ``Matmul.quantize`` takes them."""


def scaling_of(name: str) -> Scaling:
    """The scaling called ``name``."""
    if name not in SCALINGS:
        raise ConfigError(f'scaling "{name}" asked; no such scaling{did_you_mean(name, list(SCALINGS))}')
    return SCALINGS[name]
