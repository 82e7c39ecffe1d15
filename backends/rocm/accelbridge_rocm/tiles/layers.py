"""Tiles of rms_norm, rope, swiglu and the losses: those that suit every chip."""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.kernels import usual_tiles
from accelbridge.kernels.tiles import Tile

PROCESSORS: Mapping[str, int] = {"gfx90a": 110, "gfx942": 304, "gfx950": 256}
"""Compute units of one device of MI250X (of its two), MI300X and MI355X, by their data sheets."""

TILES: Mapping[str, Mapping[str, Tile]] = {name: usual_tiles.layers(count) for name, count in PROCESSORS.items()}
LACKING: Mapping[str, Mapping[str, str]] = {}
