"""Quantizing kernels, interpreted: bit for bit the portable reference, in all formats and scalings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from accelbridge.errors import BackendError, ConfigError, Unsupported
from accelbridge.kernels import quantize as kernels
from accelbridge.kernels import tiles
from accelbridge.kernels.tiles import Tile
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.quantized import QuantizedTensor, block_counts
from accelbridge.precision.scalings import SCALINGS
from tests.kernels.mutants import mutant, suppress_outside

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
    """Rests of every block, rows longer than one pass takes, and a matrix that lies the other way."""
    for x in (numbers(37, 300), *([numbers(140, 36).t()] if name == NAMES[0] else [])):
        same(kernels.quantize(x, FORMATS[name], scaling), REFERENCE.quantize(x, FORMATS[name], scaling))


@pytest.mark.parametrize("name", NAMES)
def test_every_bfloat16_is_rounded_as_the_reference_does(name: str) -> None:
    """By scales that are given, of which one is no power of two: what is too large saturates, what is tiny underflows,
    ties go to even, NaN stays NaN."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)
    for scale in (1.0, 2.0**-9, 1 / 3, 448 / 1e30):
        given = torch.full((1, 1), scale)
        same(
            kernels.quantize(x, FORMATS[name], "tensor", given),
            REFERENCE.quantize(x, FORMATS[name], "tensor", given),
        )


@pytest.mark.parametrize("scaling", ["row", "block1x128_pow2", "block128x128", "mx", "mx_pow2"])
def test_scales_that_are_given(scaling: str) -> None:
    x = numbers(37, 300)
    counts = block_counts(x.shape, SCALINGS[scaling].block)
    given = torch.exp2(torch.arange(counts[0] * counts[1]).view(counts) % 9 - 4.0)
    for scale in (given, given.t().contiguous().t()):
        same(
            kernels.quantize(x, FORMATS[NAMES[0]], scaling, scale),
            REFERENCE.quantize(x, FORMATS[NAMES[0]], scaling, scale),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scaling", ["tensor", "row", "block1x128", "mx_pow2"])
def test_other_dtypes(dtype: torch.dtype, scaling: str) -> None:
    x = numbers(20, 260, dtype)
    same(kernels.quantize(x, FORMATS[NAMES[0]], scaling), REFERENCE.quantize(x, FORMATS[NAMES[0]], scaling))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38, 1e-40])
@pytest.mark.parametrize(
    "scaling", ["unit", "tensor", "tensor_pow2", "row", "block1x128", "block128x128_pow2", "mx", "mx_pow2"]
)
def test_what_is_not_finite(scaling: str, value: float) -> None:
    x = numbers(33, 200, torch.float32)
    x[3, 150] = value
    same(kernels.quantize(x, FORMATS[NAMES[0]], scaling), REFERENCE.quantize(x, FORMATS[NAMES[0]], scaling))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (1, 1), (1, 300), (200, 1)])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block1x128", "block128x128", "mx_pow2"])
def test_empty_and_thin_matrices(scaling: str, shape: tuple[int, int]) -> None:
    x = numbers(*shape)
    same(kernels.quantize(x, FORMATS[NAMES[0]], scaling), REFERENCE.quantize(x, FORMATS[NAMES[0]], scaling))


def test_bad_input_is_refused() -> None:
    x, format = numbers(8, 64), FORMATS[NAMES[0]]
    for asked in (replace(format, overflow="nan"), replace(format, max=240.0), FORMATS["float8_e4m3"]):
        with pytest.raises(Unsupported, match="bind the portable implementation"):
            kernels.quantize(x, asked, "tensor")
    with pytest.raises(ConfigError, match="float32 or less"):
        kernels.quantize(x.double(), format, "tensor")
    with pytest.raises(ConfigError, match="hand over a matrix"):
        kernels.quantize(x[0], format, "tensor")
    with pytest.raises(ConfigError, match=r"use \(8, 1\) torch.float32"):
        kernels.quantize(x, format, "row", torch.ones(8))
    with pytest.raises(ConfigError, match="which it would not use"):
        kernels.quantize(x, format, "unit", torch.ones(1, 1))


def test_the_ops_are_well_formed() -> None:
    x, format = numbers(20, 256), FORMATS[NAMES[0]]
    for scaling in ("tensor", "row", "block1x128", "block128x128", "mx_pow2"):
        torch.library.opcheck(torch.ops.accelbridge.quantize, (x, format.name, format.max, scaling))
    given = torch.ones(20, 1)
    torch.library.opcheck(torch.ops.accelbridge.quantize_by, (x, given, format.name, format.max, [1, -1]))


def test_a_kernel_without_a_tile_says_so() -> None:
    tiles.reset()
    with pytest.raises(BackendError, match='kernel "quantize_rows" asked to run; no tile is bound'):
        kernels.quantize(numbers(4, 64), FORMATS[NAMES[0]], "row")


# -------------------------------------------------------------------------------------------------------- mutants

LOOP = """range(0, columns, BLOCK_COLUMNS):
                step = tl.cast(start, tl.int64)
                mask = here[:, None] & (c < columns - start)
                largest"""
GIVEN = 2.0**-9
MUTANTS = {
    "nothing saturates before the cast": ("tl.clamp(quotient, -LIMIT, LIMIT)", "quotient", "float8_e4m3fn", GIVEN),
    "fnuz is read as fn": ("tl.float8e4b8", "tl.float8e4nv", "float8_e4m3fnuz", GIVEN),
    "a zero keeps its sign where that is NaN": ("codes == 0x80, 0", "codes == 0x81, 0", "float8_e4m3fnuz", GIVEN),
    "NaN is lost": ("tl.where(quotient == quotient, codes, NAN)", "codes", "float8_e4m3fn", GIVEN),
    "zeros are scaled": ("tl.where(largest == 0, 1.0, scale)", "scale", "float8_e4m3fn", "mx_pow2"),
    "the last block is left out": ("tl.cdiv(columns, BLOCK_COLUMNS)", "columns // BLOCK_COLUMNS", "float8_e5m2", "mx"),
    "scales are rounded down": ("+ 0x7FFFFF) &", "+ 0) &", "float8_e4m3fn", "mx_pow2"),
    "the end of a row does not count": (LOOP, LOOP.replace("columns, B", "1, B", 1), "float8_e4m3fn", "row"),
    "programs overwrite each other's maximum": (
        'tl.atomic_max(largest, tl.max(found, 0), sem="relaxed")', "tl.store(largest, tl.max(found, 0))",
        "float8_e4m3fn", "tensor",
    ),
    "a quotient is taken by the reciprocal": ("    if EXACT:", "    if True:", "float8_e4m3fn", "row"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, tmp_path: Path) -> None:
    """A kernel with one fault gives other bits than the reference, or leaves its tensors."""
    old, new, format, asked = MUTANTS[name]
    x = numbers(37, 300)
    x[5, 299], x[20, 7], x[36, 280:] = 300.0, -0.0, 0.0
    if asked == GIVEN:
        x[0, 0] = float("nan")
    scaling, scale = (asked, None) if isinstance(asked, str) else ("tensor", torch.full((1, 1), asked))
    wanted = REFERENCE.quantize(x, FORMATS[format], scaling, scale)
    same(kernels.quantize(x, FORMATS[format], scaling, scale), wanted)
    changed, alike = mutant(kernels, old, new, tmp_path), False
    with suppress_outside():
        found = changed.quantize(x, FORMATS[format], scaling, scale)
        alike = torch.equal(found.codes(format), wanted.codes(format)) and torch.equal(found.scale, wanted.scale)
    assert not alike
