"""F8: products of quantized matrices.

Operands lie in rows along K, as hardware wants them: the right one is quantized as [N, K] and handed over transposed.
Bounds: ``oracle/scaled.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelbridge.conformance.bench import Bench, NotSupported
from accelbridge.conformance.calls import fitting
from accelbridge.conformance.oracle.formats import E4M3, TABLES, Table
from accelbridge.conformance.oracle.scaled import product_bound, shared_exponents, spread
from accelbridge.conformance.registry import case
from accelbridge.conformance.suite._fp8 import (
    accumulator,
    declared,
    from_codes,
    pair,
    pairs,
    products,
    quantize,
    read,
)
from accelbridge.errors import AccelbridgeError, Unsupported

_REFUSED = (Unsupported, NotImplementedError)
_FLOORS = {(3, 3): 27.0, (3, 2): 23.0, (2, 3): 23.0, (2, 2): 21.0}
"""dB by bits of the operands' mantissas. Rounding Gaussian data to p significand bits leaves 6.02 p + 7.4 dB, two
operands' noise adds up to 28.5, 24.6 and 22.6 dB for any K; 1.5 dB less is asked."""
_ROW_SCATTER_DB = 3.0
"""By how much a row may be worse than the whole: signal and noise of n outputs scatter by 4.34 sqrt(4 / n) dB together,
so 5 of these at n = 256. A row that is wrong has 0 dB."""


def _end_to_end(t: Bench, got: Tensor, want: Tensor, floor: float, name: str) -> None:
    t.sqnr(got, want, floor, name=name, rows=False)
    t.sqnr(got, want, floor - _ROW_SCATTER_DB, name=f"{name} rows")


def _integers(t: Bench, m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """float64 integers in [-3, 3], [M, K] and, with 0 for all but a fifth, [N, K]: all sums are exact in 13 bits. The
    first and last term along K are not 0."""
    a, b = t.integers(m, k, name=f"a{m}/{k}"), t.sparse(n, k, density=0.2, name=f"b{n}/{k}")
    for end in (0, -1):
        a[:, end], b[:, end] = 1.0 + t.integers(m, low=0, high=2, name=f"e{end}"), 2.0
    return a.double(), b.double()


@case("F8-001", "fp8")
def exact_integers(t: Bench) -> None:
    """Products of small integers with scales that are powers of two equal float64 bit for bit, with and without a
    bias.

    Every declared pair of formats and every candidate; outputs in float32 and bfloat16; M, N, K of one and several
    tiles.
    """
    for m, k, n in ((16, 16, 16), (48, 512, 80), (144, 272, 160)):
        a, b = _integers(t, m, k, n)
        bias = t.integers(n, low=-64, high=64, name="bias", dtype=torch.bfloat16)
        want = a @ b.t() * 4.0
        for tables in pairs(t):
            scales = torch.tensor([[2.0**-3]]), torch.tensor([[2.0**5]])
            left = from_codes(t, tables[0].encode(a), tables[0], scales[0])
            right = from_codes(t, tables[1].encode(b), tables[1], scales[1]).t()
            for name, scaled_mm in products(t, *tables, "tensor"):
                label = f"{tables[0].name} x {tables[1].name} {m}x{k}x{n} {name}"
                for dtype in (torch.float32, torch.bfloat16):
                    got = t.run(scaled_mm, left, right, dtype)
                    t.equal(got, want.float().to(dtype) + 0.0, name=f"{label} {dtype}")
                got = t.run(scaled_mm, left, right, torch.bfloat16, t.put(bias))
                t.equal(got, (want + bias.double()).float().bfloat16() + 0.0, name=f"{label} bias")


@case("F8-002", "fp8")
def kernel_sqnr(t: Bench) -> None:
    """Against float64 of the operands as they were quantised, a bfloat16 product has an SQNR of at least 52 dB, as a
    whole and in each row, at K = 16384; 35 dB where fewer accumulator bits than float32's are declared."""
    floor = 52.0 if accumulator(t).is_float32 else 35.0
    a, b = t.normal(16, 16384, name="a"), t.normal(128, 16384, name="b")
    for tables in pairs(t):
        left, right = quantize(t, a, tables[0], "tensor"), quantize(t, b, tables[1], "tensor")
        want = read(left, tables[0]) @ read(right, tables[1]).t()
        for name, scaled_mm in products(t, *tables, "tensor"):
            got = t.run(scaled_mm, left, right.t(), torch.bfloat16)
            t.sqnr(got, want, floor, name=f"{tables[0].name} x {tables[1].name} {name}")


@case("F8-003", "fp8")
def kernel_bound(t: Bench) -> None:
    """Each element of a product is within the bound of its declared accumulator, for K from 64 to 16384, on normal and
    on all-positive data, in bfloat16 and float32."""
    table = declared(t, E4M3, op="scaled_mm")[0]
    for k in (64, 1024, 16384):
        for kind, make in (("normal", t.normal), ("positive", t.uniform)):
            left = quantize(t, make(16, k, name="a"), table, "tensor")
            right = quantize(t, make(32, k, name="b"), table, "tensor")
            a, b = read(left, table), read(right, table).t()
            for name, scaled_mm in products(t, table, table, "tensor"):
                for dtype in (torch.bfloat16, torch.float32):
                    got = t.run(scaled_mm, left, right.t(), dtype)
                    want, bound = product_bound(a, b, dtype, accumulator(t))
                    t.within(got, want, bound, name=f"{table.name} K={k} {kind} {dtype} {name}")


@case("F8-004", "fp8")
def end_to_end_sqnr(t: Bench) -> None:
    """Against float64 of what was quantised, SQNR is at least 27 (e4m3 x e4m3), 23 (mixed) and 21 dB (e5m2 x e5m2),
    and in each row hardly less, for every declared pair, and e4m3 x e4m3 with every scaling that is declared."""
    a, b = t.normal(64, 512, name="a"), t.normal(288, 512, name="b")
    want = a.double() @ b.double().t()
    for scaling in ("tensor", "row", "block1x128", "block128x128", "mx", "tensor_pow2"):
        for tables in pairs(t, scaling) if _has(t, scaling) else ():
            floor = _FLOORS[tables[0].format.mantissa_bits, tables[1].format.mantissa_bits]
            if scaling != "tensor" and floor < 27.0:
                continue
            left, right = quantize(t, a, tables[0], scaling), quantize(t, b, tables[1], scaling).t()
            for name, scaled_mm in products(t, *tables, scaling):
                got = t.run(scaled_mm, left, right, torch.bfloat16)
                _end_to_end(t, got, want, floor, f"{tables[0].name} x {tables[1].name} {scaling} {name}")


def _has(t: Bench, scaling: str) -> bool:
    """Whether any e4m3 product is declared with ``scaling``; "tensor" must be."""
    return scaling == "tensor" or any(t.supported("scaled_mm", name, scaling) for name in E4M3)


@case("F8-005", "fp8")
def scales_count(t: Bench) -> None:
    """Each operand's scale multiplies the result by exactly its power of two.

    The interface has no scale of the result: outputs are never fp8.
    """
    table = declared(t, E4M3, op="scaled_mm")[0]
    a, b = _integers(t, 32, 64, 48)
    codes_a, codes_b = table.encode(a), table.encode(b)
    for scale_a, scale_b in ((1.0, 1.0), (4.0, 1.0), (1.0, 4.0), (2.0**-12, 1.0), (1.0, 2.0**9), (8.0, 2.0**-20)):
        left = from_codes(t, codes_a, table, torch.tensor([[scale_a]]))
        right = from_codes(t, codes_b, table, torch.tensor([[scale_b]])).t()
        for name, scaled_mm in products(t, table, table, "tensor"):
            got = t.run(scaled_mm, left, right, torch.float32)
            t.equal(got, (a @ b.t() * scale_a * scale_b).float() + 0.0, name=f"{scale_a:g} x {scale_b:g} {name}")


_BLOCKS = {"row": (1, -1), "block1x128": (1, 128), "block128x128": (128, 128), "mx": (1, 32)}
_POWERS_OF_TWO = {name: name if name == "mx" else f"{name}_pow2" for name in _BLOCKS}
_FINE = tuple(("scaled_mm", name, "row") for name in E4M3)


@case("F8-006", "fp8", optional=_FINE)
def fine_scales(t: Bench) -> None:
    """With scales of rows and of blocks 1x128, 128x128 and 1x32 (MX), distinct powers of two, products are exact.

    By hand for each declared scaling, and through ``quantize`` where scales are declared to be powers of two; where
    they are made of any magnitudes, each element is within half a step of what it was, or saturated where a scale of
    MX is the shared exponent that its specification gives. NOT_SUPPORTED where no such scaling is declared.
    """
    tried = 0
    for scaling_a, scaling_b in (*((s, s) for s in _BLOCKS), ("block1x128", "block128x128")):
        for name in E4M3:
            if t.supported("scaled_mm", name, pair(scaling_a, scaling_b)):
                tried += 1
                _scales_by_hand(t, TABLES[name], scaling_a, scaling_b)
        for name in E4M3 if scaling_a == scaling_b else ():
            if t.supported("quantize", name, scaling_a):
                _quantised_blocks(t, TABLES[name], scaling_a)
            if t.supported("scaled_mm", name, _POWERS_OF_TWO[scaling_a]):
                tried += 1
                _quantised_exactly(t, TABLES[name], scaling_a)
    if not tried:
        raise NotSupported("no product with scales of rows or blocks is declared")


def _exponents(t: Bench, shape: tuple[int, int], block: tuple[int, int], name: str) -> Tensor:
    """Powers of two from 2^-2 to 2^2, one a block."""
    rows, columns = (1 if size < 0 else -(-n // size) for n, size in zip(shape, block, strict=True))
    return torch.exp2(t.integers(rows, columns, low=-2, high=2, name=name))


def _sizes(t: Bench, table: Table, scaling: str) -> tuple[int, ...]:
    """M, K and N that blocks of 128 do not divide, as far as the limits of the cell allow."""
    return fitting(t.capabilities.support("scaled_mm", table.name, scaling), m=144, k=384, n=160)


def _scales_by_hand(t: Bench, table: Table, scaling_a: str, scaling_b: str) -> None:
    m, k, n = _sizes(t, table, pair(scaling_a, scaling_b))
    a, b = _integers(t, m, k, n)
    codes_a, codes_b = table.encode(a), table.encode(b)
    block_a, block_b = _BLOCKS[scaling_a], _BLOCKS[scaling_b]
    scale_a, scale_b = _exponents(t, (m, k), block_a, "sa"), _exponents(t, (n, k), block_b, "sb")
    left, right = from_codes(t, codes_a, table, scale_a, block_a), from_codes(t, codes_b, table, scale_b, block_b).t()
    want = (a * spread(scale_a.double(), block_a, (m, k))) @ (b * spread(scale_b.double(), block_b, (n, k))).t()
    scaling = pair(scaling_a, scaling_b)
    for name, scaled_mm in products(t, table, table, scaling):
        got = t.run(scaled_mm, left, right, torch.float32)
        t.equal(got, want.float() + 0.0, name=f"{table.name} {scaling} {name}")


def _quantised_exactly(t: Bench, table: Table, scaling: str) -> None:
    m, k, n = _sizes(t, table, _POWERS_OF_TWO[scaling])
    operands = []
    for rows, name in ((m, "qa"), (n, "qb")):
        x = t.integers(rows, k, name=name).double()
        x[:, ::32] = 3.0  # each block's largest
        operands.append(
            x * spread(_exponents(t, (rows, k), _BLOCKS[scaling], name).double(), _BLOCKS[scaling], (rows, k))
        )
    a, b = operands
    exact = _POWERS_OF_TWO[scaling]
    left, right = (quantize(t, x.float(), table, exact) for x in operands)
    for x, q, name in ((a, left, "left"), (b, right, "right")):
        t.equal(t.run(q.dequantize), x.float(), name=f"{table.name} {exact} {name}")
    for name, scaled_mm in products(t, table, table, exact):
        got = t.run(scaled_mm, left, right.t(), torch.float32)
        t.equal(got, (a @ b.t()).float() + 0.0, name=f"{table.name} {exact} {name}")


def _quantised_blocks(t: Bench, table: Table, scaling: str) -> None:
    shape, block = (144, 384), _BLOCKS[scaling]
    # Blocks of very different size: a scale that is another's is far off.
    rows, columns = (1 if size < 0 else -(-n // size) for n, size in zip(shape, block, strict=True))
    size = torch.exp2(t.integers(rows, columns, low=-20, high=20, name="size")).double()
    x = (t.normal(*shape).double() * spread(size, block, shape)).float()
    q = quantize(t, x, table, scaling)
    scale, magnitude = spread(q.scale.to("cpu").double(), block, shape), x.double().abs()
    bound = torch.maximum(magnitude * table.half_step, scale * table.smallest / 2.0) * (1.0 + 2.0**-20)
    if scaling == "mx":
        t.equal(q.scale, shared_exponents(x, table.format.max), name=f"{table.name} {scaling} scales")
        bound = torch.maximum(bound, magnitude - scale * table.format.max)
    t.within(t.run(q.dequantize), x.double(), bound, name=f"{table.name} {scaling} dequantized")


@case("F8-007", "fp8")
def variant(t: Bench) -> None:
    """Code 0x38 as an operand contributes 1.0 in e4m3fn and IEEE's e4m3, 0.5 in e4m3fnuz, and fact "fp8.variant" lists
    the variants whose products are right."""
    right = []
    for name, suffix in zip(E4M3, ("fn", "fnuz", "ieee"), strict=True):
        table = TABLES[name]
        if not t.supported("scaled_mm", name, "tensor"):
            continue
        right.append(suffix)
        # Row i holds it i + 1 times.
        left = torch.full((16, 16), 0x38, dtype=torch.uint8).tril()
        one = table.encode(torch.ones(16, 16, dtype=torch.float64))
        want = (torch.arange(1.0, 17.0) * (0.5 if suffix == "fnuz" else 1.0)).view(16, 1).expand(16, 16)
        for candidate, scaled_mm in products(t, table, table, "tensor"):
            got = t.run(scaled_mm, from_codes(t, left, table), from_codes(t, one, table).t(), torch.float32)
            t.equal(got, want.contiguous(), name=f"{name} {candidate}")
    if not right:
        t.fail("CAPABILITY", "no product of an e4m3 format is declared")
    t.note("fp8.variant", " ".join(right))
    t.same(" ".join(right), str(t.capabilities.facts.get("fp8.variant", "fn")), "fp8.variant", code="FACT")


_PLACES = (1, 2, 7, 16, 31, 32, 63, 64, 127, 128, 255, 256, 500, 511, 512, 1000)
"""Along K, of the small term: within an instruction, in the next, behind a promotion."""
_PROBED = range(7, 24)
"""Bits."""


@case("F8-008", "fp8")
def accumulator_probe(t: Bench) -> None:
    """Accumulator bits, and from which K on partial sums are kept in float32, are as declared.

    2^14 + 2^(14-j), the small term at various places of K = 1024: with b significand bits it is kept for j < b. Fewer
    than 13 bits, or 128 terms without promotion, are too few to train with.
    """
    table, stated = declared(t, E4M3, op="scaled_mm")[0], accumulator(t)
    left = torch.zeros(len(_PROBED), 1024, dtype=torch.float64)
    right = torch.zeros(len(_PLACES), 1024, dtype=torch.float64)
    for row, j in enumerate(_PROBED):
        left[row], left[row, 0] = 2.0 ** (14 - j), 128.0
    right[:, 0] = 128.0
    for column, place in enumerate(_PLACES):
        right[column, place] = 1.0
    want = left @ right.t()
    a, b = from_codes(t, table.encode(left), table), from_codes(t, table.encode(right), table).t()
    for name, scaled_mm in products(t, table, table, "tensor"):
        got = t.run(scaled_mm, a, b, torch.float32)
        kept = (got.to("cpu").double() == want).long().cumprod(0).sum(0) + _PROBED.start  # bits, by place
        bits, wide = int(kept.min()), _PROBED.stop
        t.note("fp8.accumulator_bits", bits)
        t.same(bits, min(stated.bits, wide), f"fp8.accumulator_bits {name}", code="FACT")
        t.at_least(bits, 13, f"accumulator bits {name}")
        if stated.is_float32:
            t.equal(got, want.float(), code="FACT", name=name)
            continue
        narrow = [place for place, found in zip(_PLACES, kept.tolist(), strict=True) if found < wide]
        t.at_most(
            max(narrow, default=0), min(stated.promotion, 128) - 1, f"last term in {bits} bits {name}", code="FACT"
        )


@case("F8-010", "fp8")
def nan_poisons(t: Bench) -> None:
    """A NaN code in an operand makes NaN of its row or column and of nothing else; an e5m2 infinity makes infinity."""
    for tables in pairs(t):
        for operand, place in ((0, (5, 0)), (1, (17, 63))):
            a, b = _integers(t, 16, 64, 32)
            codes_a, codes_b = tables[0].encode(a), tables[1].encode(b)
            table, values, codes = tables[operand], (a, b)[operand], (codes_a, codes_b)[operand]
            specials = [float("nan"), *([float("inf")] if table.values.isinf().any() else [])]
            for special in specials:
                values[place] = special
                code = table.encode(torch.tensor([special], dtype=torch.float64), nonfinite=True)
                codes[place] = code[0]
                left, right = from_codes(t, codes_a, tables[0]), from_codes(t, codes_b, tables[1]).t()
                for name, scaled_mm in products(t, *tables, "tensor"):
                    got = t.run(scaled_mm, left, right, torch.float32)
                    label = f"{tables[0].name} x {tables[1].name} {special} in operand {operand} {name}"
                    t.equal(got, (a @ b.t()).float() + 0.0, name=label)


@case("F8-011", "fp8")
def odd_shapes(t: Bench) -> None:
    """M, N and K that no tile divides give the right product, or are refused with Unsupported where the backend
    declares so; a K that differs and a format that is not declared are refused with a typed error too."""
    table = declared(t, E4M3, op="scaled_mm")[0]
    for m, k, n in ((1, 1, 1), (3, 17, 5), (7, 130, 9), (17, 33, 129), (5, 16, 16), (16, 48, 5)):
        a, b = _integers(t, m, k, n)
        left, right = from_codes(t, table.encode(a), table), from_codes(t, table.encode(b), table).t()
        cell = t.capabilities.support("scaled_mm", table.name, "tensor", {"m": m, "k": k, "n": n})
        for name, scaled_mm in products(t, table, table, "tensor"):
            if not cell:
                t.raises(_REFUSED, scaled_mm, left, right, torch.float32)
            else:
                got = t.run(scaled_mm, left, right, torch.float32)
                t.equal(got, (a @ b.t()).float() + 0.0, name=f"{m}x{k}x{n} {name}")
    left = from_codes(t, torch.zeros(16, 32, dtype=torch.uint8), table)
    right = from_codes(t, torch.zeros(16, 48, dtype=torch.uint8), table).t()
    for _, scaled_mm in products(t, table, table, "tensor"):
        t.raises((AccelbridgeError, ValueError), scaled_mm, left, right, torch.float32)
    x = t.put(t.normal(16, 32))
    for name, other in TABLES.items():
        if not t.supported("quantize", name, "tensor"):
            t.raises(_REFUSED, t.backend.matmul.quantize, x, other.format, "tensor")


@case("F8-012", "fp8")
def zero_tensor(t: Bench) -> None:
    """A tensor, row or block of zeros has a finite scale above 0 and comes back as exactly 0, alone and beside
    others."""
    x = t.normal(256, 256)
    x[:, :128] = 0.0
    x[7], x[128:] = 0.0, 0.0
    for scaling in ("tensor", "row", "block1x128", "block128x128", "mx", "tensor_pow2"):
        for table in declared(t, E4M3, scaling) if _has(t, scaling) else ():
            for what, host in (("all", torch.zeros(32, 64)), ("part", x)):
                q = quantize(t, host, table, scaling)
                scale, label = q.scale.to("cpu"), f"{table.name} {scaling} {what}"
                t.same(bool((scale.isfinite() & (scale > 0)).all()), True, f"{label}: scales finite, above 0")
                back = t.run(q.dequantize)
                zeros = t.put(host == 0.0)
                t.equal(back.where(zeros, torch.ones_like(back)).abs(), (host != 0.0).float(), name=label)


@case("F8-013", "fp8")
def linear_forward_and_backward(t: Bench) -> None:
    """The three products of a linear layer (forward, input gradient, weight gradient) have SQNR of at least 27, 23 and
    23 dB against float64, at sizes of activations, weights and gradients that differ by orders of magnitude.

    Activations and weights are e4m3, gradients of the output e5m2 where that product is declared, else e4m3. Each
    operand is quantised anew along the K of its product, twice, with other sizes the second time: a scale that is left
    over from before overflows or wastes the range.
    """
    e4m3 = declared(t, E4M3, op="scaled_mm")[0]
    gradient = next((a for a, b in pairs(t) if b is e4m3 and a is not e4m3), e4m3)
    tokens, inputs, outputs = 272, 384, 320
    for step, (size_x, size_w, size_dy) in enumerate(((1.0, 0.02, 1.0e-4), (300.0, 2.0e-4, 1.0e-7))):
        x = t.normal(tokens, inputs, name=f"x{step}") * size_x
        w = t.normal(outputs, inputs, name=f"w{step}") * size_w
        dy = t.normal(tokens, outputs, name=f"dy{step}") * size_dy
        for name, a, b, left, floor in (
            ("forward", x, w, e4m3, 27.0),
            ("input gradient", dy, w.t().contiguous(), gradient, 23.0),
            ("weight gradient", dy.t().contiguous(), x.t().contiguous(), gradient, 23.0),
        ):
            first, second = quantize(t, a, left, "tensor"), quantize(t, b, e4m3, "tensor").t()
            for candidate, scaled_mm in products(t, left, e4m3, "tensor"):
                got = t.run(scaled_mm, first, second, torch.bfloat16)
                _end_to_end(t, got, a.double() @ b.double().t(), floor, f"{name} {step} {candidate}")
