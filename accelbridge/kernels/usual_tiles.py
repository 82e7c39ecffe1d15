"""Tiles that suit every chip the kernels were compiled for so far, for backends to take into theirs. No triton, torch.

These kernels move bytes and do little else: loads of 16 bytes a thread and enough programs are what counts on any chip.
"""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.kernels.tiles import Tile

QUANTIZE: Mapping[str, Tile] = {
    "amax": Tile({"BLOCK": 8192}, warps=8),
    "quantize_tensor": Tile({"BLOCK_ROWS": 4, "BLOCK_COLUMNS": 1024}, warps=8),
    "quantize_rows": Tile({"BLOCK_ROWS": 1, "BLOCK_COLUMNS": 16384}, warps=16),
    "quantize_rows.long": Tile({"BLOCK_ROWS": 1, "BLOCK_COLUMNS": 4096}, warps=8),
    "quantize_rows.transposed": Tile({"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 128}, warps=4),
    "quantize_blocks.1x128": Tile({"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 128}, warps=4),
    "quantize_blocks.128x128": Tile({"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128}, warps=8),
    "quantize_blocks.1x32": Tile({"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 128}, warps=4),
}
"""Of quantizing to 8-bit floats."""

WIDTHS = tuple(2**power for power in range(7, 15))
"""Longest rows of rms_norm that each of its variants takes."""


def layers(processors: int) -> dict[str, Tile]:
    """Of rms_norm, rope, swiglu and the losses, on a chip with so many multiprocessors (compute units)."""
    found = {
        "softmax_parts": Tile({"BLOCK": 4096}, warps=8),
        "softmax_gradient": Tile({"BLOCK": 4096}, warps=8),
        "swiglu_forward": Tile({"BLOCK": 2048}, warps=8),
        "swiglu_backward": Tile({"BLOCK": 2048}, warps=8),
    }
    for width in WIDTHS:
        found |= _rms_norm(width, processors)
    return found | {f"rope.{pairs}": Tile({"HEADS": 1024 // pairs, "BLOCK": pairs}) for pairs in (16, 32, 64, 128, 256)}


def _rms_norm(width: int, processors: int) -> dict[str, Tile]:
    """Backward, the programs are two for each processor, so that partial sums stay few."""
    backward = {"ROWS": max(1, 1024 // width), "BLOCK": width, "PROGRAMS": 2 * processors}
    return {
        f"rms_norm_forward.{width}": Tile(
            {"ROWS": max(1, 2048 // width), "BLOCK": width}, warps=max(4, min(16, width // 512))
        ),
        f"rms_norm_backward.{width}": Tile(backward, warps=max(4, width // 1024), stages=1),
    }
