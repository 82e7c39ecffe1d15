"""Tiles of rms_norm, rope, swiglu and the losses. They move bytes and do little else, so that one table serves every
architecture: loads of 16 bytes a thread and enough programs are what counts."""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.kernels.tiles import Tile

PROCESSORS: Mapping[str, int] = {
    "sm80": 108,
    "sm86": 82,
    "sm89": 142,
    "sm90": 132,
    "sm100": 148,
    "sm103": 148,
    "sm120": 188,
}
"""Multiprocessors of A100, RTX 3090, L40S, H100 SXM, B200, B300 and RTX PRO 6000, by their data sheets."""

WIDTHS = tuple(2**power for power in range(7, 15))
"""Longest rows of rms_norm that each of its variants takes."""


def _rms_norm(width: int, processors: int) -> dict[str, Tile]:
    """Backward, the programs are two for each processor, so that partial sums stay few."""
    warps = max(4, min(16, width // 512))
    backward = {"ROWS": max(1, 1024 // width), "BLOCK": width, "PROGRAMS": 2 * processors}
    return {
        f"rms_norm_forward.{width}": Tile({"ROWS": max(1, 2048 // width), "BLOCK": width}, warps),
        f"rms_norm_backward.{width}": Tile(backward, warps, stages=1),
    }


def _tiles(processors: int) -> dict[str, Tile]:
    found = {
        "softmax_parts": Tile({"BLOCK": 4096}, warps=8),
        "softmax_gradient": Tile({"BLOCK": 4096}, warps=8),
        "swiglu_forward": Tile({"BLOCK": 2048}, warps=8),
        "swiglu_backward": Tile({"BLOCK": 2048}, warps=8),
    }
    for width in WIDTHS:
        found |= _rms_norm(width, processors)
    return found | {f"rope.{pairs}": Tile({"HEADS": 1024 // pairs, "BLOCK": pairs}) for pairs in (16, 32, 64, 128, 256)}


TILES: Mapping[str, Mapping[str, Tile]] = {name: _tiles(count) for name, count in PROCESSORS.items()}
LACKING: Mapping[str, Mapping[str, str]] = {}
