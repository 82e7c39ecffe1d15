"""Tiles of quantizing to 8-bit floats, and of their products."""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.kernels.tiles import Tile

_QUANTIZE: Mapping[str, Tile] = {
    "amax": Tile({"BLOCK": 8192}, warps=8),
    "quantize_tensor": Tile({"BLOCK_ROWS": 4, "BLOCK_COLUMNS": 1024}, warps=8),
    "quantize_rows": Tile({"BLOCK_ROWS": 1, "BLOCK_COLUMNS": 16384}, warps=16),
    "quantize_rows.transposed": Tile({"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 128}, warps=4),
    "quantize_blocks.1x128": Tile({"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 128}, warps=4),
    "quantize_blocks.128x128": Tile({"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128}, warps=8),
    "quantize_blocks.1x32": Tile({"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 128}, warps=4),
}

_NO_FP8 = dict.fromkeys(_QUANTIZE, "it has no 8-bit floats")

TILES: Mapping[str, Mapping[str, Tile]] = dict.fromkeys(("sm89", "sm90", "sm100", "sm103", "sm120"), _QUANTIZE)
LACKING: Mapping[str, Mapping[str, str]] = dict.fromkeys(("sm80", "sm86"), _NO_FP8)
