"""Tiles of attention, for heads of 64, 128 and 256. Products of float32 are made without matrix units, in smaller
tiles.

A second stage, where it fits, is as good against spills as a smaller tile: loads then go to shared memory directly.
"""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.kernels.tiles import Tile


def _tile(queries: int, keys: int, stages: int, warps: int = 8) -> Tile:
    return Tile({"QUERIES": queries, "KEYS": keys}, warps, stages)


def _dkdv(queries: int, keys: int, stages: int, last: int = 0) -> Tile:
    return Tile({"QUERIES": queries, "KEYS": keys, "DV_LAST": last}, 8, stages)


_ROWS: Mapping[str, Tile] = {
    "flash_delta": Tile({"QUERIES": 32}, warps=8),
    "document_spans": Tile({"CHUNK": 2048}, warps=8),
}
_FLOAT32: Mapping[str, Tile] = {
    "flash_forward.64.float32": _tile(64, 32, 1),
    "flash_forward.128.float32": _tile(32, 32, 1),
    "flash_forward.256.float32": _tile(16, 32, 1),
    "flash_backward_dq.64.float32": _tile(32, 32, 1),
    "flash_backward_dq.128.float32": _tile(32, 32, 1),
    "flash_backward_dq.256.float32": _tile(16, 32, 1),
    "flash_backward_dkdv.64.float32": _dkdv(32, 32, 1),
    "flash_backward_dkdv.128.float32": _dkdv(32, 32, 1),
    "flash_backward_dkdv.256.float32": _dkdv(16, 16, 1),
}
_SM80: Mapping[str, Tile] = {
    **_ROWS,
    **_FLOAT32,
    "flash_forward.64": _tile(128, 64, 3),
    "flash_forward.128": _tile(128, 64, 2),
    "flash_forward.256": _tile(64, 64, 1),
    "flash_backward_dq.64": _tile(64, 64, 2),
    "flash_backward_dq.128": _tile(64, 64, 2),
    "flash_backward_dq.256": _tile(64, 32, 1),
    "flash_backward_dkdv.64": _dkdv(64, 64, 2),
    "flash_backward_dkdv.128": _dkdv(32, 64, 2),
    "flash_backward_dkdv.256": _dkdv(32, 32, 1),
}
_SM90: Mapping[str, Tile] = {
    **_ROWS,
    **_FLOAT32,
    "flash_forward.64": _tile(128, 128, 2),
    "flash_forward.128": _tile(128, 128, 2),
    "flash_forward.256": _tile(128, 64, 2),
    "flash_backward_dq.64": _tile(128, 64, 3),
    "flash_backward_dq.128": _tile(128, 64, 2),
    "flash_backward_dq.256": _tile(128, 32, 2),
    "flash_backward_dkdv.64": _dkdv(64, 128, 2),
    "flash_backward_dkdv.128": _dkdv(64, 128, 4, last=1),
    "flash_backward_dkdv.128.softcap": _dkdv(32, 128, 2),
    "flash_backward_dkdv.256": _dkdv(32, 64, 3, last=1),
    "flash_backward_dkdv.256.masked": _dkdv(16, 64, 2, last=1),
}
_SM100: Mapping[str, Tile] = {
    **_ROWS,
    **_FLOAT32,
    "flash_forward.64": _tile(128, 128, 2),
    "flash_forward.64.masked": _tile(64, 64, 3, warps=4),
    "flash_forward.128": _tile(128, 128, 2),
    "flash_forward.128.masked": _tile(128, 64, 3),
    "flash_forward.256": _tile(128, 32, 2),
    "flash_backward_dq.64": _tile(128, 64, 2),
    "flash_backward_dq.128": _tile(128, 64, 2),
    "flash_backward_dq.256": _tile(128, 32, 2),
    "flash_backward_dkdv.64": _dkdv(64, 128, 2),
    "flash_backward_dkdv.128": _dkdv(64, 128, 2),
    "flash_backward_dkdv.256": _dkdv(64, 64, 1),
    "flash_backward_dkdv.256.softcap": _dkdv(32, 64, 2),
}
_SM120: Mapping[str, Tile] = {  # without the shared memory of the others
    **_ROWS,
    **_FLOAT32,
    "flash_forward.64": _tile(128, 64, 2),
    "flash_forward.128": _tile(128, 32, 2),
    "flash_forward.256": _tile(64, 32, 1),
    "flash_backward_dq.64": _tile(64, 64, 2),
    "flash_backward_dq.128": _tile(64, 32, 2),
    "flash_backward_dq.256": _tile(32, 32, 1),
    "flash_backward_dkdv.64": _dkdv(64, 64, 1),
    "flash_backward_dkdv.128": _dkdv(32, 64, 1),
    "flash_backward_dkdv.256": _dkdv(32, 32, 1),
}
TILES: Mapping[str, Mapping[str, Tile]] = {
    "sm80": _SM80,
    "sm86": _SM120,
    "sm89": _SM120,
    "sm90": _SM90,
    "sm100": _SM100,
    "sm103": _SM100,
    "sm120": _SM120,
}
LACKING: Mapping[str, Mapping[str, str]] = {}
