"""The portable attention kernel as a candidate for the plan: what it serves, without triton and without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from accelbridge.backend import FULL, Implementation, Request, Support, unsupported
from accelbridge.kernels.tiles import Tile, bind

DTYPES = ("bfloat16", "float16", "float32")
BLOCKS_D = (64, 128, 256)
"""Head dimensions that have tiles; one between them takes the tile, and the time, of the next."""
LONGEST = 2**30
"""Positions are counted in int32, with room for a tile and a window."""
KERNELS = ("flash_forward", "flash_backward_dq", "flash_backward_dkdv")
_NEEDS = frozenset({"causal", "window", "segments", "gqa", "softcap", "lse"})


def variant(head_dim: int, dtype: str) -> str:
    """Of the tiles: ``"128"``, and ``"128.float32"`` where products of float32 take other ones."""
    block = next(block for block in BLOCKS_D if head_dim <= block)
    return f"{block}.float32" if dtype == "float32" else str(block)


def tile_name(kernel: str, kind: str, masked: bool, capped: bool, shipped: Collection[str]) -> str:
    """The tile of ``kernel`` for heads of ``kind``, a :func:`variant`. Windows or segments, and caps, take registers: a
    chip may ship tiles of their own for them, ``"<kernel>.<kind>.masked"`` and ``".softcap"``."""
    plain = f"{kernel}.{kind}"
    own = [f"{plain}.softcap"] if capped else []
    own += [f"{plain}.masked"] if masked else []
    return next((name for name in own if name in shipped), plain)


def flash_attention(
    tiles: Mapping[str, Tile], refused: Mapping[str, str], usable: Support, refuse: Callable[[Request], Support | None]
) -> Implementation:
    """The candidate "triton" of the op ``attention`` on a chip with ``tiles``.

    ``refused``: variants (:func:`variant`) that the chip cannot do, and why; ``usable``: whether the host can compile
    kernels at all; ``refuse``: what the backend has against a request besides."""

    def supports(request: Request) -> Support:
        own = usable and _serves(tiles, refused, request)
        against = refuse(request) if own else None
        return own if against is None else against

    def load() -> Callable[..., Any]:
        from accelbridge.kernels.flash import attention

        bind(tiles)
        return attention

    return Implementation("attention", "triton", supports, load, launches=("accelbridge::flash_forward",))


def _serves(tiles: Mapping[str, Tile], refused: Mapping[str, str], request: Request) -> Support:
    if unknown := sorted(request.needs - _NEEDS):
        return unsupported(f'the portable kernel knows no "{unknown[0]}"')
    if request.dtype not in DTYPES:
        return unsupported(f"takes {', '.join(DTYPES)}, not {request.dtype}")
    head_dim, length = request.shape.get("head_dim", BLOCKS_D[0]), request.shape.get("sequence", 1)
    if head_dim > BLOCKS_D[-1]:
        return unsupported(f"takes heads up to {BLOCKS_D[-1]}, not {head_dim}")
    if head_dim % 8:  # rows that do not begin at 16 bytes would be loaded element by element
        return unsupported(f"takes heads of a multiple of 8, not {head_dim}")
    if length > LONGEST:
        return unsupported(f"takes sequences up to {LONGEST}, which it counts in int32, not {length}")
    kind = variant(head_dim, request.dtype)
    if kind in refused:
        return unsupported(refused[kind])
    missing = [name for name in KERNELS if f"{name}.{kind}" not in tiles]
    return unsupported(f"has no tiles for heads of {head_dim} in {request.dtype} on this chip") if missing else FULL
