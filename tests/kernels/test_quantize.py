"""Quantizing kernels, interpreted: bit for bit the portable reference, in all formats and scalings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from accelbridge.kernels import quantize as kernels
from accelbridge.kernels import tiles
from accelbridge.kernels.tiles import Tile
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.quantized import QuantizedTensor
from accelbridge.precision.scalings import SCALINGS

REFERENCE = EmulatedFp8("test")
TILES = {
    "amax": Tile({"BLOCK": 1024}),
    "quantize_tensor": Tile({"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 128}),
    "quantize_rows": Tile({"BLOCK_ROWS": 16, "BLOCK_COLUMNS": 256}),
    "quantize_rows.transposed": Tile({"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 128}),
    "quantize_blocks.1x128": Tile({"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 256}),
    "quantize_blocks.128x128": Tile({"BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128}),
    "quantize_blocks.1x32": Tile({"BLOCK_ROWS": 32, "BLOCK_COLUMNS": 128}),
}


@pytest.fixture(autouse=True)
def bound(no_tiles):
    tiles.bind(TILES)


def same(found: QuantizedTensor, wanted: QuantizedTensor) -> None:
    assert (found.format, found.block) == (wanted.format, wanted.block)
    torch.testing.assert_close(found.scale, wanted.scale, rtol=0, atol=0, equal_nan=True)
    differ = (found.codes(found.format.name) != wanted.codes(wanted.format.name)).nonzero()
    assert differ.numel() == 0, f"{differ.shape[0]} codes, first at {differ[0].tolist()}"


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Over 20 binades, with zeros of both signs, and one block of nothing else."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(
        torch.randint(-12, 8, (rows, columns), generator=generator).float()
    )
    x[::7, ::5] = 0.0
    x[::11, ::3] = -0.0
    x[: rows // 4, : columns // 3] = 0.0
    return x.to(dtype)


NAMES = list(kernels.TYPES)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_those_of_the_reference(name: str, scaling: str) -> None:
    for x in (numbers(40, 300), numbers(300, 40).t(), numbers(130, 256, torch.float32)):
        same(kernels.quantize(x, FORMATS[name], scaling), REFERENCE.quantize(x, FORMATS[name], scaling))
