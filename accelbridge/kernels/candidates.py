"""The kernels of layers and losses as candidates of a plan. No torch and no triton until one is bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from accelbridge.backend import Implementation, Request, Support, unsupported
from accelbridge.kernels import available, tiles
from accelbridge.kernels.limits import serves
from accelbridge.kernels.tiles import Tile

_LOSS = ("cross_entropy", "softmax_parts", "accelbridge::softmax_parts")
LAYERS: Mapping[str, tuple[str, str, str]] = {
    "rms_norm": ("rms_norm", "rms_norm_forward.128", "accelbridge::rms_norm"),
    "rope": ("rope", "rope.64", "accelbridge::rope"),
    "swiglu": ("swiglu", "swiglu_forward", "accelbridge::swiglu"),
    "cross_entropy": ("cross_entropy", "softmax_parts", "accelbridge::cross_entropy"),
    "vocab_parallel_cross_entropy": _LOSS,
    "linear_cross_entropy": _LOSS,
    "vocab_parallel_linear_cross_entropy": _LOSS,
}
"""By op: the module that has a function of its name, a tile that is shipped where it is, and the custom op that each
call runs."""


def layers(table: Mapping[str, Tile], software: Mapping[str, str]) -> Sequence[Implementation]:
    """A candidate "triton" for each op of :data:`LAYERS`, on a chip whose tiles are ``table``."""

    def candidate(op: str, module: str, tile: str, launches: str) -> Implementation:
        def supports(request: Request) -> Support:
            if tile not in table:
                return unsupported("no tile is shipped for this chip")
            found = available(software)
            return serves(request) if found else found

        def load() -> Callable[..., Any]:
            tiles.bind(table)
            return getattr(import_module(f"accelbridge.kernels.{module}"), op)

        return Implementation(op, "triton", supports, load, launches=(launches,))

    return [candidate(op, *of) for op, of in LAYERS.items()]
