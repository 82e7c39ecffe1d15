"""Scaled products, interpreted, against float64 of the dequantized operands."""

from __future__ import annotations

import pytest
import torch

from accelbridge.kernels import scaled_mm as kernels
from accelbridge.kernels import tiles
from accelbridge.kernels.tiles import Tile
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.precision.formats import FORMATS

REFERENCE = EmulatedFp8("test")
BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP": 2}
TILES = {
    "scaled_mm.whole": Tile({**BLOCKS, "PROMOTE": 1, "DESCRIPTORS": 0}),
    "scaled_mm.blocks": Tile({**BLOCKS, "PROMOTE": 1, "DESCRIPTORS": 1}),
    "scaled_mm.mx": Tile({**BLOCKS, "DESCRIPTORS": 0}),
}


@pytest.fixture(autouse=True)
def bound(no_tiles):
    tiles.bind(TILES)


@pytest.mark.parametrize(
    "scalings",
    [
        ("tensor", "tensor"),
        ("row", "row"),
        ("block1x128", "block128x128"),
        ("block1x128", "block1x128"),
        ("block128x128", "block128x128"),
        ("mx_pow2", "mx_pow2"),
    ],
    ids=str,
)
def test_basic(scalings) -> None:
    x, w = torch.randn(100, 400), torch.randn(144, 400)
    a = REFERENCE.quantize(x, FORMATS["float8_e4m3fn"], scalings[0])
    b = REFERENCE.quantize(w, FORMATS["float8_e4m3fn"], scalings[1]).t()
    bias = torch.randn(144)
    found = kernels.scaled_mm(a, b, torch.float32, bias)
    exact = a.dequantize().double() @ b.dequantize().double() + bias.double()
    print((found.double() - exact).norm() / exact.norm())
    assert (found.double() - exact).norm() / exact.norm() < 1e-6
