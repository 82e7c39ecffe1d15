"""Tiles of attention, for heads of 64, 128 and 256. Four wavefronts, so that each lane may have 512 registers, and one
stage: what the second would hold in registers is spilled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from accelbridge.kernels.tiles import Tile


def _tile(queries: int, keys: int, rows: int = 32) -> Tile:
    """``rows``: of a matrix instruction."""
    options = {} if rows == 32 else {"matrix_instr_nonkdim": rows}
    return Tile({"QUERIES": queries, "KEYS": keys}, 4, 1, options)


def _dkdv(queries: int, keys: int, rows: int = 32) -> Tile:
    tile = _tile(queries, keys, rows)
    return replace(tile, blocks={**tile.blocks, "DV_LAST": 0})


_CDNA: Mapping[str, Tile] = {
    "flash_delta": Tile({"QUERIES": 32}, warps=4),
    "document_spans": Tile({"CHUNK": 2048}, warps=4),
    "flash_forward.64": _tile(128, 64),
    "flash_forward.128": _tile(128, 64),
    "flash_forward.256": _tile(64, 32, rows=16),
    "flash_backward_dq.64": _tile(128, 64),
    "flash_backward_dq.128": _tile(128, 32),
    "flash_backward_dq.256": _tile(64, 32, rows=16),
    "flash_backward_dkdv.64": _dkdv(64, 128),
    "flash_backward_dkdv.128": _dkdv(32, 128),
    "flash_backward_dkdv.256": _dkdv(32, 64, rows=16),
    "flash_forward.64.float32": _tile(64, 32, rows=16),
    "flash_forward.128.float32": _tile(64, 32, rows=16),
    "flash_forward.256.float32": _tile(32, 32, rows=16),
    "flash_backward_dq.64.float32": _tile(32, 32, rows=16),
    "flash_backward_dq.128.float32": _tile(32, 32, rows=16),
    "flash_backward_dq.256.float32": _tile(32, 32, rows=16),
    "flash_backward_dkdv.64.float32": _dkdv(32, 32, rows=16),
    "flash_backward_dkdv.128.float32": _dkdv(32, 32, rows=16),
    "flash_backward_dkdv.256.float32": _dkdv(16, 32, rows=16),
}
TILES: Mapping[str, Mapping[str, Tile]] = dict.fromkeys(("gfx90a", "gfx942", "gfx950"), _CDNA)
LACKING: Mapping[str, Mapping[str, str]] = {}
