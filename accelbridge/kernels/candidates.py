"""The kernels of layers and losses as candidates of a plan. No torch and no triton until one is bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from accelbridge.backend import Implementation, Request, Support, unsupported
from accelbridge.kernels import available, tiles
from accelbridge.kernels.limits import serves
from accelbridge.kernels.tiles import Tile

LAYERS: Mapping[str, tuple[str, str]] = {
    "rms_norm": ("rms_norm", "accelbridge::rms_norm"),
    "rope": ("rope", "accelbridge::rope"),
    "swiglu": ("swiglu", "accelbridge::swiglu"),
    "cross_entropy": ("cross_entropy", "accelbridge::cross_entropy"),
    "vocab_parallel_cross_entropy": ("cross_entropy", "accelbridge::softmax_parts"),
    "linear_cross_entropy": ("cross_entropy", "accelbridge::softmax_parts"),
    "vocab_parallel_linear_cross_entropy": ("cross_entropy", "accelbridge::softmax_parts"),
}
"""By op: the module that has a function of its name, and the custom op that each call runs."""


def layers(architecture: str, table: Mapping[str, Tile], software: Mapping[str, str]) -> Sequence[Implementation]:
    """A candidate "triton" for each op of :data:`LAYERS`, on a chip of ``architecture`` whose tiles are ``table``."""

    def candidate(op: str, module: str, launches: str) -> Implementation:
        def supports(request: Request) -> Support:
            if not table:
                return unsupported(f"has no tiles for {architecture or 'an unknown architecture'}")
            found = available(software)
            return serves(request) if found else found

        def load() -> Callable[..., Any]:
            tiles.bind(table)
            return getattr(import_module(f"accelbridge.kernels.{module}"), op)

        return Implementation(op, "triton", supports, load, launches=(launches,))

    return [candidate(op, *of) for op, of in LAYERS.items()]
