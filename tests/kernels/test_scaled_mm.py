"""Scaled products, interpreted, against float64 of the dequantized operands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from accelbridge.errors import ConfigError, Unsupported
from accelbridge.kernels import scaled_mm as kernels
from accelbridge.kernels import tiles
from accelbridge.kernels.launch import check_reach
from accelbridge.kernels.tiles import Tile
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.quantized import QuantizedTensor
from tests.kernels.mutants import mutant, suppress_outside
from tests.kernels.oracle import sqnr_db, worst

REFERENCE = EmulatedFp8("test")
BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "GROUP": 2}
TILES = {
    "scaled_mm.whole": Tile({**BLOCKS, "PROMOTE": 1, "DESCRIPTORS": 0}),
    "scaled_mm.blocks": Tile({**BLOCKS, "PROMOTE": 0, "DESCRIPTORS": 1}),
    "scaled_mm.mx": Tile({**BLOCKS, "DESCRIPTORS": 1}),
}
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SCALINGS = {
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "block": ("block1x128", "block128x128"),
    "block, of activations alone": ("block1x128", "block1x128"),
    "square": ("block128x128", "block128x128"),
    "mx": ("mx_pow2", "mx_pow2"),
}


@pytest.fixture(autouse=True)
def bound(no_tiles):
    tiles.bind(TILES)


def operands(
    m: int, k: int, n: int, scalings: tuple[str, str], formats: tuple[str, str] = (E4M3, E4M3), data: str = "normal"
) -> tuple[QuantizedTensor, QuantizedTensor]:
    generator = torch.Generator().manual_seed(11)
    x, w = (make(rows, k, data, generator) for rows in (m, n))
    a = REFERENCE.quantize(x, FORMATS[formats[0]], scalings[0])
    return a, REFERENCE.quantize(w, FORMATS[formats[1]], scalings[1]).t()


def make(rows: int, columns: int, data: str, generator: torch.Generator) -> Tensor:
    if data == "positive":
        return torch.rand(rows, columns, generator=generator)
    x = torch.randn(rows, columns, generator=generator)
    # Rows and stretches of K of magnitudes of their own, so that a scale that is another's is seen.
    x = x * torch.exp2(torch.arange(rows) % 5 - 2.0)[:, None]
    return x * torch.exp2(torch.arange(columns) // 32 % 7 - 3.0)


def error(found: Tensor, a: QuantizedTensor, b: QuantizedTensor, bias: Tensor | None = None) -> float:
    # Roundings besides those of sums: of a product with two scales, and of dequantizing for the oracle.
    return worst(found, exact(a), exact(b.t()).t(), bias, extra=3)


def exact(x: QuantizedTensor) -> Tensor:
    """float64 [rows, K], scales applied in float64."""
    from accelbridge.precision.formats import decode
    from accelbridge.precision.quantized import spread

    return decode(x.codes(x.format.name), x.format).double() * spread(x.scale, x.block, x.shape).double()


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("data", ["normal", "positive"])
def test_it_keeps_its_bound(kind: str, data: str) -> None:
    a, b = operands(100, 400, 144, SCALINGS[kind], data=data)
    bias = torch.linspace(-3, 3, 144)
    assert error(kernels.scaled_mm(a, b, torch.float32, bias), a, b, bias) <= 1
    found = kernels.scaled_mm(a, b, torch.bfloat16)
    assert error(found, a, b) <= 1
    assert sqnr_db(found, exact(a) @ exact(b.t()).t()).min() >= 50


@pytest.mark.parametrize("kind", SCALINGS)
def test_small_integers_are_exact(kind: str) -> None:
    """With scales that are powers of two, another one in each block."""
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randint(-2, 3, (rows, 384), generator=generator).float() for rows in (70, 200))
    scalings = [each if each.startswith("mx") else f"{each}_pow2" for each in SCALINGS[kind]]
    a, b = (REFERENCE.quantize(each, FORMATS[E4M3], scaling) for each, scaling in zip((x, w), scalings, strict=True))
    for q in (a, b):
        i, j = torch.arange(q.scale.shape[0])[:, None], torch.arange(q.scale.shape[1])[None, :]
        q.scale.mul_(torch.exp2((i + 2 * j) % 4))
    found = kernels.scaled_mm(a, b.t(), torch.float32)
    assert torch.equal(found.double(), a.dequantize().double() @ b.dequantize().double().t())


@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
@pytest.mark.parametrize("kind", ["row", "block", "mx"])
def test_mixed_formats(kind: str, formats: tuple[str, str]) -> None:
    a, b = operands(40, 256, 64, SCALINGS[kind], formats)
    assert error(kernels.scaled_mm(a, b, torch.float32), a, b) <= 1


@pytest.mark.parametrize("kind", ["row", "block"])
def test_fnuz(kind: str) -> None:
    for formats in (("float8_e4m3fnuz", "float8_e4m3fnuz"), ("float8_e5m2fnuz", "float8_e4m3fnuz")):
        a, b = operands(40, 256, 64, SCALINGS[kind], formats)
        assert error(kernels.scaled_mm(a, b, torch.float32), a, b) <= 1


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
@pytest.mark.parametrize("shape", [(1, 128, 16), (1, 16, 1), (65, 208, 63), (0, 128, 16), (16, 128, 0), (3, 0, 5)])
def test_edges(kind: str, shape: tuple[int, int, int]) -> None:
    """One row, one column, rests of every block, and nothing."""
    a, b = operands(*shape, SCALINGS[kind])
    bias = torch.linspace(-1, 1, shape[2])
    found = kernels.scaled_mm(a, b, torch.float32, bias)
    assert found.shape == (shape[0], shape[2])
    assert error(found, a, b, bias) <= 1


def test_an_operand_that_lies_the_other_way_is_copied() -> None:
    a, b = operands(48, 64, 32, SCALINGS["tensor"])
    other = QuantizedTensor(a.payload.t().contiguous().t(), a.scale, a.format, a.block)
    assert torch.equal(kernels.scaled_mm(other, b, torch.float32), kernels.scaled_mm(a, b, torch.float32))


@pytest.mark.parametrize("kind", ["tensor", "mx"])
def test_nan_poisons_its_row_and_column_alone(kind: str) -> None:
    a, b = operands(40, 128, 48, SCALINGS[kind])
    a.payload.view(torch.uint8)[7, 3] = 0x7F
    b.payload.view(torch.uint8)[5, 9] = 0xFF
    found = kernels.scaled_mm(a, b, torch.float32).isnan()
    wanted = torch.zeros(40, 48, dtype=torch.bool)
    wanted[7], wanted[:, 9] = True, True
    assert torch.equal(found, wanted)


def test_what_no_kernel_knows_is_refused() -> None:
    a, b = operands(16, 64, 16, SCALINGS["row"])
    with pytest.raises(ConfigError, match="K must be equal"):
        kernels.scaled_mm(a, operands(16, 32, 16, SCALINGS["row"])[1], torch.float32)
    with pytest.raises(Unsupported, match=r"none gives torch\.float64"):
        kernels.scaled_mm(a, b, torch.float64)
    mx = operands(16, 64, 16, SCALINGS["mx"])[1]
    with pytest.raises(Unsupported, match="MX scales meet MX scales only"):
        kernels.scaled_mm(a, mx, torch.float32)
    fnuz = operands(16, 64, 16, SCALINGS["mx"], ("float8_e4m3fnuz", "float8_e4m3fnuz"))
    with pytest.raises(Unsupported, match="MX is defined for float8_e4m3fn and float8_e5m2"):
        kernels.scaled_mm(*fnuz, torch.float32)
    along_rows = REFERENCE.quantize(torch.ones(64, 16), FORMATS[E4M3], "row")
    with pytest.raises(Unsupported, match="scales of"):
        kernels.scaled_mm(a, along_rows, torch.float32)


def test_strides_beyond_an_int32_are_refused() -> None:
    far = torch.empty(2**25 + 16, dtype=torch.uint8).as_strided((2, 16), (2**25, 1))
    with pytest.raises(Unsupported, match="strides and columns at 16777216"):
        check_reach("a scaled product", far)
    with pytest.raises(Unsupported, match="strides and columns at 16777216"):
        check_reach("quantizing", torch.empty(1, 2**24 + 1, dtype=torch.uint8))
    a, b = operands(1, 1, 1, SCALINGS["tensor"])
    wide = QuantizedTensor(torch.zeros(1, 1, dtype=torch.uint8).expand(1, 2**24 + 1), b.scale, b.format, b.block)
    with pytest.raises(Unsupported, match="N ends at 16777216"):
        kernels.scaled_mm(a, wide, torch.float32)


def test_the_op_is_well_formed() -> None:
    a, b = operands(16, 128, 32, SCALINGS["block"])
    right = b.t()
    arguments = (a.codes(E4M3), right.codes(E4M3), a.scale, right.scale, None, E4M3, E4M3)
    torch.library.opcheck(
        torch.ops.accelbridge.scaled_mm, (*arguments, list(a.block), list(right.block), torch.bfloat16)
    )


# -------------------------------------------------------------------------------------------------------- mutants

MUTANTS = {
    "the last stretch of K is left out": (
        "for start in range(0, k, BLOCK_K):",
        "for start in range(0, k - 16, BLOCK_K):",
    ),
    "a row reads its neighbour's scale": ("r = first + tl.arange(0, BLOCK)\n", "r = first + tl.arange(0, BLOCK) ^ 1\n"),
    "scales of the first stretch serve all": ("step = 0 if STEP == 0 else start // STEP", "step = 0"),
    "blocks of 128 rows are taken for rows": ("r // SHARED", "r"),
    "the second scale is left out": (" * right[None, :]", ""),
    "the bias is left out": ("    if BIAS:", "    if BIAS and BLOCK_M == 1:"),
    "what is beyond K is not masked": ("mask=c < k - start, other=0.0", "mask=c < k, other=0.0"),
    "a block gets the first one's bias": ("tl.load(bias + first_n + c", "tl.load(bias + c"),
    "sums go on from the block before": (
        "        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n",
        "        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) if number == tl.program_id(0) else sums\n",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str, tmp_path: Path) -> None:
    """A kernel with one fault leaves the bound, or its tensors."""
    changed = mutant(kernels, *MUTANTS[name], tmp_path)
    bias = torch.linspace(-3, 3, 144)

    def error_of(kind: str) -> float:
        a, b = operands(100, 272, 144, SCALINGS[kind])
        with suppress_outside():
            return error(changed.scaled_mm(a, b, torch.float32, bias), a, b, bias)
        return float("inf")

    assert not all(error_of(kind) <= 1 for kind in ("row", "block"))
