"""Products by torch's scaled_mm: what is handed over passes torch's own checks for the device, and means the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accelbridge.backend import FULL, Limit, Support
from accelbridge.errors import Unsupported
from accelbridge.portable import scaled_mm
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.portable.fp8_cells import cells
from accelbridge.portable.scaled_mm import Conventions, TorchScaledMm
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.quantized import QuantizedTensor, block_counts
from accelbridge.precision.scalings import SCALINGS

PUBLIC = pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="torch.nn.functional.scaled_mm came with torch 2.10")
MAKERS = [pytest.param(scaled_mm.public_product, marks=PUBLIC), scaled_mm.private_product]

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
EMULATED = EmulatedFp8("test")


def fake(shape: tuple[int, int], format: str, scaling: str) -> QuantizedTensor:
    """A quantized matrix without numbers: of such, torch checks shapes and strides as for the device."""
    chosen = SCALINGS[scaling]
    codes = torch.empty(shape, dtype=getattr(torch, format), device="meta")
    scale = torch.empty(block_counts(torch.Size(shape), chosen.block), device="meta")
    return QuantizedTensor(codes, scale, FORMATS[format], chosen.block)


Operands = tuple[QuantizedTensor, QuantizedTensor]


def products(scaling_a: str, scaling_b: str, m: int, k: int, n: int, format_a: str = E4M3) -> list[Operands]:
    """Operands of a product as the fp8 layers hand them over: row-major ones, and transposed views."""
    return [
        (fake((m, k), format_a, scaling_a), fake((n, k), E4M3, scaling_b).t()),
        *(
            [(fake((k, m), format_a, scaling_a).t(), fake((k, n), E4M3, scaling_b))]
            if SCALINGS[scaling_a].block[0] == SCALINGS[scaling_a].block[1]
            else []
        ),
    ]


SIZES = [(1, 512, 128), (16, 512, 256), (384, 1024, 640)]
PAIRS = [("tensor", "tensor"), ("row", "row"), pytest.param(("block1x128", "block128x128"), marks=PUBLIC),
         pytest.param(("block1x128", "block1x128"), marks=PUBLIC), ("mx_pow2", "mx_pow2")]  # fmt: skip
"""Scalings of the two operands. In torch 2.9 even the private call's own check knows no blocks of 128."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("make", MAKERS)
def test_torch_takes_what_is_handed_over(make, pair: tuple[str, str], size: tuple[int, int, int]) -> None:
    """Shapes, strides and sizes of scales, by torch's own checks for the device."""
    m, k, n = size
    for a, b in products(*pair, m, k, n):
        out = make(a, b, torch.bfloat16, None, True)
        assert (tuple(out.shape), out.dtype, out.device.type) == ((m, n), torch.bfloat16, "meta")


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_private_call_takes_a_mixed_pair(pair: tuple[str, str]) -> None:
    for a, b in products(*pair, 256, 512, 128, E5M2):
        assert scaled_mm.private_product(a, b, torch.bfloat16, None, True).shape == (256, 128)


def _wrong_rows(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    left = a.payload.t().contiguous().t()
    return F.scaled_mm(left, b.payload, a.scale, F.ScalingType.TensorWise, b.scale, F.ScalingType.TensorWise)


def _row_major_second(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    right = b.payload.contiguous()
    return F.scaled_mm(a.payload, right, a.scale, F.ScalingType.TensorWise, b.scale, F.ScalingType.TensorWise)


@PUBLIC
@pytest.mark.parametrize("call", [_wrong_rows, _row_major_second])
def test_torch_refuses_another_layout_of_codes(call) -> None:
    with pytest.raises((RuntimeError, ValueError), match="major"):
        call(fake((256, 512), E4M3, "tensor"), fake((128, 512), E4M3, "tensor").t())


@PUBLIC
def test_torch_refuses_scales_along_the_wrong_dimension() -> None:
    types = F.ScalingType
    a, b = fake((256, 512), E4M3, "block1x128"), fake((128, 512), E4M3, "block128x128").t()
    left, right = a.payload, b.payload
    with pytest.raises((RuntimeError, ValueError), match="1x128"):
        F.scaled_mm(left, right, a.scale, types.BlockWise1x128, b.scale, types.BlockWise128x128)


@PUBLIC
def test_torch_refuses_scales_that_are_not_in_tiles() -> None:
    a, b = products("mx", "mx", 256, 512, 128)[0]
    with pytest.raises((RuntimeError, ValueError), match="swizzle"):
        scaled_mm.public_product(a, b, torch.bfloat16, None, False)


def test_torch_refuses_tiles_that_are_not_whole() -> None:
    a, b = products("mx", "mx", 16, 512, 128)[0]
    codes = torch.empty(16, 16, dtype=torch.float8_e8m0fnu, device="meta")
    with pytest.raises(RuntimeError, match="2048 elements"):
        torch._scaled_mm(a.payload, b.payload, codes, codes, out_dtype=torch.bfloat16)


# ------------------------------------------------------------------------------------------------------ swizzle


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (384, 16), (5, 3), (130, 5)])
def test_scales_lie_where_the_documentation_says(shape: tuple[int, int]) -> None:
    rows, columns = shape
    x = torch.arange(rows * columns, dtype=torch.int32).view(shape) + 1
    flat = scaled_mm.swizzled_32_4_4(x).tolist()
    tiles_across = -(-columns // 4)
    assert len(flat) == -(-rows // 128) * 128 * tiles_across * 4
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * tiles_across + column // 4
            place = tile * 512 + (row % 128 % 32) * 16 + (row % 128) // 32 * 4 + column % 4
            assert flat[place] == x[row, column]
    assert sum(1 for each in flat if each == 0) == len(flat) - rows * columns


def test_exponents_of_scales() -> None:
    scale = torch.tensor([[2.0**-126, 0.5, 1.0, 2.0, 2.0**127, torch.nan]])
    codes = scaled_mm.e8m0_codes(scale)
    assert codes.tolist() == [[1, 126, 127, 128, 254, 255]]
    decoded = codes.view(torch.float8_e8m0fnu).to(torch.float32)
    assert torch.equal(decoded[:, :5], scale[:, :5])
    assert decoded[0, 5].isnan()


# ------------------------------------------------------------------------------------------------------ numbers


def _operands(m: int, k: int, n: int, format: str) -> tuple[Tensor, Tensor, QuantizedTensor, QuantizedTensor]:
    generator = torch.Generator().manual_seed(7)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    a = EMULATED.quantize(x, FORMATS[format], "tensor")
    return x, w, a, EMULATED.quantize(w, FORMATS[E4M3], "tensor").t()


@pytest.mark.parametrize("format", [E4M3, E5M2])
@pytest.mark.parametrize("make", MAKERS)
def test_torchs_product_is_the_emulated_one(make, format: str) -> None:
    """On the CPU, where torch has the product for one scale a matrix: against float64 and the emulation."""
    _, _, a, b = _operands(48, 256, 32, format)
    exact = a.dequantize().double() @ b.dequantize().double()
    bound = a.dequantize().double().abs() @ b.dequantize().double().abs() * 256 * 2.0**-24
    for call in (make, lambda *args: EMULATED.scaled_mm(*args[:3])):
        found = call(a, b, torch.float32, None, False)
        assert bool(((found.double() - exact).abs() <= bound).all())


def _declared(level: Support = FULL) -> dict[tuple[str, str, str], Support]:
    table = cells()
    table["scaled_mm", E4M3, "tensor"] = level
    return table


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    for name in ("public_product", "private_product"):
        real = getattr(scaled_mm, name)
        monkeypatch.setattr(scaled_mm, name, lambda *a, _n=name, _r=real: seen.append(_n) or _r(*a))
    return seen


@pytest.mark.parametrize("public", [pytest.param(True, marks=PUBLIC), False])
def test_a_full_cell_is_torchs_and_another_is_emulated(monkeypatch: pytest.MonkeyPatch, public: bool) -> None:
    seen = _counted(monkeypatch)
    matmul = TorchScaledMm("test", _declared(), Conventions(swizzled=True, public=public))
    _, _, a, b = _operands(16, 64, 32, E4M3)
    got = matmul.scaled_mm(a, b, torch.bfloat16)
    assert seen == ["public_product" if public else "private_product"]
    torch.testing.assert_close(got, EMULATED.scaled_mm(a, b, torch.bfloat16), rtol=2**-7, atol=1e-3)
    _, _, a, b = _operands(16, 64, 32, E5M2)
    assert torch.equal(matmul.scaled_mm(a, b, torch.bfloat16), EMULATED.scaled_mm(a, b, torch.bfloat16))
    assert len(seen) == 1


def test_a_dtype_that_the_library_does_not_give_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _counted(monkeypatch)
    matmul = TorchScaledMm("test", _declared(), Conventions(True, outputs={"tensor": ("bfloat16",)}))
    _, _, a, b = _operands(16, 64, 32, E4M3)
    assert torch.equal(matmul.scaled_mm(a, b, torch.float32), EMULATED.scaled_mm(a, b, torch.float32))
    assert seen == []


@PUBLIC
def test_a_bias_is_rounded_with_the_product() -> None:
    matmul = TorchScaledMm("test", _declared(), Conventions(swizzled=True))
    _, _, a, b = _operands(16, 64, 32, E4M3)
    bias = torch.linspace(-3, 3, 32)
    exact = a.dequantize() @ b.dequantize() + bias
    for dtype, given in ((torch.bfloat16, bias), (torch.float32, bias), (torch.bfloat16, bias.bfloat16())):
        got = matmul.scaled_mm(a, b, dtype, given)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), exact, rtol=2**-8, atol=2e-2)


@PUBLIC
def test_a_mixed_pair_of_blocks_goes_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _counted(monkeypatch)
    pair = f"{E5M2} x {E4M3}"
    table = {("scaled_mm", pair, "block1x128 x block128x128"): FULL, ("scaled_mm", E4M3, "mx"): FULL,
             ("scaled_mm", pair, "row"): FULL}  # fmt: skip
    matmul = TorchScaledMm("test", table, Conventions(swizzled=True))
    matmul.scaled_mm(*products("block1x128", "block128x128", 256, 512, 128, E5M2)[0], out_dtype=torch.bfloat16)
    matmul.scaled_mm(*products("mx", "mx", 256, 512, 128)[0], out_dtype=torch.bfloat16)
    matmul.scaled_mm(*products("row", "row", 256, 512, 128, E5M2)[0], out_dtype=torch.bfloat16)
    assert seen == ["private_product", "public_product", "public_product"]


def test_sizes_and_cells_that_are_not_stated_are_refused() -> None:
    limited = Support("full", limits=(Limit("k", multiple=16), Limit("n", multiple=16)))
    matmul = TorchScaledMm("test", {("scaled_mm", E4M3, "tensor"): limited}, Conventions(swizzled=True))
    _, _, a, b = _operands(16, 40, 32, E4M3)
    with pytest.raises(Unsupported, match="k=40 is not a multiple of 16"):
        matmul.scaled_mm(a, b, torch.bfloat16)
    row = EMULATED.quantize(torch.ones(16, 64), FORMATS[E4M3], "row")
    with pytest.raises(Unsupported, match="no support"):
        matmul.scaled_mm(row, row.t(), torch.bfloat16)
    with pytest.raises(Unsupported, match="each term along K"):
        matmul.scaled_mm(row, EMULATED.quantize(torch.ones(64, 32), FORMATS[E4M3], "row"), torch.bfloat16)


def test_what_is_not_stated_is_not_quantized_to() -> None:
    """Nothing could be multiplied with it."""
    matmul = TorchScaledMm("test", {("quantize", E4M3, "tensor"): FULL}, Conventions(swizzled=True))
    x = torch.ones(16, 16)
    assert matmul.quantize(x, FORMATS[E4M3], "tensor").dequantize().equal(x)
    for name, scaling in ((E4M3, "row"), ("float8_e4m3fnuz", "tensor")):
        with pytest.raises(Unsupported, match=f"asked to quantize to {name}, scaling {scaling}: the backend states no"):
            matmul.quantize(x, FORMATS[name], scaling)


def test_an_empty_product_is_no_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _counted(monkeypatch)
    matmul = TorchScaledMm("test", _declared(), Conventions(swizzled=True))
    empty = EMULATED.quantize(torch.ones(0, 64), FORMATS[E4M3], "tensor")
    right = EMULATED.quantize(torch.ones(32, 64), FORMATS[E4M3], "tensor").t()
    assert matmul.scaled_mm(empty, right, torch.bfloat16).shape == (0, 32)
    assert seen == []
