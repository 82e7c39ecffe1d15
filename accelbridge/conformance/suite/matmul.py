"""MM: dense products: ``Matmul.matmul`` of the backend and every implementation of the op ``linear``.

Formulae of the bounds: ``oracle/matmul.py``. Our interface has no ``out=``, alpha or beta: what other suites assert of
them is asserted of the bias and of ``out_dtype``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelbridge.backend import Request
from accelbridge.conformance.bench import Bench
from accelbridge.conformance.oracle import matmul as oracle
from accelbridge.conformance.registry import case
from accelbridge.errors import AccelbridgeError

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TYPED = (ValueError, TypeError, NotImplementedError, AccelbridgeError)
"""Errors that say what was wrong with a call; torch's bare RuntimeError is none."""


@dataclass(frozen=True)
class _Product:
    """One implementation of ``a @ b``, with ``b [K, N]`` on the device; of ``linear`` the weight is its transpose."""

    name: str
    call: Callable[..., Tensor]
    linear: bool

    def put(self, t: Bench, b: Tensor) -> Tensor:
        """The right operand on the device, laid out as the callers of this op lay it out."""
        return t.put(b.mT.contiguous()).mT if self.linear else t.put(b)

    def on(self, t: Bench, a: Tensor, b: Tensor) -> Tensor:
        """The product of two tensors of the device."""
        return t.run(self.call, a, b.mT) if self.linear else t.run(self.call, a, b)

    def of(self, t: Bench, a: Tensor, b: Tensor) -> Tensor:
        """The product, on the device, of two host tensors."""
        return self.on(t, t.put(a), self.put(t, b))


def _linears(t: Bench, dtype: torch.dtype, k: int) -> list[tuple[str, Callable[..., Tensor]]]:
    return t.candidates(Request("linear", str(dtype).removeprefix("torch."), {"k": k, "dim": k}))


def _products(t: Bench, dtype: torch.dtype, k: int) -> list[_Product]:
    linears = [_Product(f"linear {name} {dtype}", call, True) for name, call in _linears(t, dtype, k)]
    return [_Product(f"matmul {dtype}", t.backend.matmul.matmul, False), *linears]


def _dtypes(t: Bench) -> tuple[torch.dtype, ...]:
    """bfloat16 and float32 are asked of every backend, float16 is tested where it is claimed."""
    for name in ("bfloat16", "float32"):
        t.require("linear", name)
    return (BF16, F32, F16) if t.supported("linear", "float16") else (BF16, F32)


def _arithmetic(t: Bench) -> oracle.Arithmetic:
    return oracle.Arithmetic.declared(t.capabilities.facts)


def _exact(t: Bench, m: int, k: int, n: int, batch: tuple[int, ...] = (), name: str = "") -> tuple[Tensor, Tensor]:
    """Integers as float64 whose product is exact in bfloat16, and so is every partial sum of it in any order: few
    enough of a row of ``a`` are not 0. The first and the last k always count, and no element of ``b`` is 0."""
    a = t.sparse(*batch, m, k, density=min(0.8, 8.0 / max(1, k)), name=f"{name}a{m}x{k}").double()
    b = 2.0 * t.integers(*batch, k, n, low=-2, high=1, name=f"{name}b{k}x{n}").double() + 1.0
    if k:
        a[..., -1], a[..., 0] = -2.0, 1.0
        assert float((a.abs() @ b.abs()).max()) <= 256.0, "these integers do not fit bfloat16"
    return a, b


# ------------------------------------------------------------------------------------------------------- values


@case("MM-001", "core")
def exact_integers(t: Bench) -> None:
    """The product of small integers equals float64 bit for bit.

    M, N and K run over 1, 2, 7, 16, 31, 64, 127, 257 and 1024. Integers whose partial sums all fit the output format
    are exact in every order of summation and under split-K (density as in oneDNN's benchdnn).
    """
    sizes = (1, 2, 7, 16, 31, 64, 127, 257, 1024)
    shapes = [(sizes[i], sizes[(i + 1) % 9], sizes[(i + 2) % 9]) for i in range(9)]
    for m, k, n in (*shapes, (1024, 257, 127), (127, 1024, 257)):
        a, b = _exact(t, m, k, n)
        want = oracle.product(a, b)
        for dtype in _dtypes(t) if m == 1024 or m == 31 else (BF16,):
            for product in _products(t, dtype, k):
                t.equal(product.of(t, a.to(dtype), b.to(dtype)), want.to(dtype), name=f"{product.name} {m}x{k}x{n}")


def _draws(t: Bench, dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """Kinds of data: zero-mean, all-positive (nothing cancels: what is missing shows), and wide exponents, whose
    products do not fit float16."""
    kinds: dict[str, Callable[..., Tensor]] = {"normal": t.normal, "uniform": t.uniform}
    return kinds if dtype == F16 else {**kinds, "wide": t.wide}


@case("MM-002", "core")
def componentwise_bound(t: Bench) -> None:
    """Every element is within the bound of float32 accumulation and one rounding, for K from 1 to 16384.

    Normal, all-positive and wide-exponent data.
    """
    arithmetic = _arithmetic(t)
    for m, k, n in ((33, 1, 9), (48, 64, 40), (40, 1000, 48), (24, 16384, 40)):
        for dtype in _dtypes(t):
            for kind, draw in _draws(t, dtype).items():
                a, b = draw(m, k, name=f"a{k}", dtype=dtype), draw(k, n, name=f"b{k}", dtype=dtype)
                want, limit = oracle.product(a, b), oracle.bound(a, b, dtype, arithmetic)
                for product in _products(t, dtype, k):
                    t.within(product.of(t, a, b), want, limit, name=f"{product.name} {kind} {m}x{k}x{n}")


@case("MM-003", "core")
def signal_to_noise(t: Bench) -> None:
    """SQNR of the whole, of every row and of every 64 x 64 tile is at least 52 dB in bfloat16, 68 in float16 and 110
    in float32.

    1024 x 256 x 192 and 64 x 1024 x 192 of normal data: one zero row in 1024 leaves 30 dB of the whole.
    """
    for m, k, n in ((1024, 256, 192), (64, 1024, 192)):
        for dtype in _dtypes(t):
            a, b = t.normal(m, k, name=f"a{k}", dtype=dtype), t.normal(k, n, name=f"b{k}", dtype=dtype)
            want, floor = oracle.product(a, b), oracle.SQNR_DB[dtype]
            if dtype == F32 and _arithmetic(t).operand:
                floor = oracle.SQNR_DB[F16] - 3.0  # two operands rounded to 11 bits, each with its noise
            for product in _products(t, dtype, k):
                got = product.of(t, a, b)
                t.sqnr(got, want, floor, name=f"{product.name} {m}x{k}x{n}")
                t.sqnr(oracle.tiles(got, 64), oracle.tiles(want, 64), floor, name=f"tiles of {product.name} {m}x{k}")


@case("MM-004", "core")
def accumulator_probe(t: Bench) -> None:
    """The accumulator is float32 or wider and rounds as declared, and float32 operands keep the bits declared.

    A head of 256 and 16384 terms of 2^-11 after it: float32 keeps them all (264), a float16 or bfloat16 accumulator
    that adds blocks of 16 to 256 terms loses them. 1 + 1.5 * 2^-24, far apart in K, is 1 + 2^-23 rounded to nearest and
    1 rounded toward zero. 1 + 2^-12 as a float32 operand is 1 in TF32.
    """
    k = 256 + 16384
    a = torch.zeros(2, k)
    a[:, 0] = 256.0
    a[:, 256:] = 2.0**-11
    a[1] *= -0.5
    b = torch.tensor([1.0, 2.0, -0.5]).expand(k, 3).contiguous()
    for dtype in _dtypes(t):
        for product in _products(t, dtype, k):
            t.equal(product.of(t, a.to(dtype), b.to(dtype)), oracle.product(a, b).to(dtype), "PROBE", product.name)
    _probe(t, "matmul.accumulator", _rounding(t))
    for product in _products(t, F32, 8):
        _probe(t, "matmul.float32", _operand_bits(t, product), product.name)


def _probe(t: Bench, fact: str, found: str, name: str = "") -> None:
    t.note(fact, found)
    t.same(found, t.capabilities.facts.get(fact, "float32"), f"{fact} {name}".strip(), "PROBE")


def _rounding(t: Bench) -> str:
    """How sums of bfloat16 products are rounded, seen in a float32 result."""
    a = torch.zeros(1, 512)
    a[0, 0], a[0, -1] = 1.0, 1.5 * 2.0**-24
    b = torch.ones(512, 1)
    out = t.fetch(t.run(t.backend.matmul.matmul, t.put(a.to(BF16)), t.put(b.to(BF16)), torch.float32))
    return {1.0 + 2.0**-23: "float32", 1.0: "float32_toward_zero"}.get(float(out), f"something that gives {float(out)}")


def _operand_bits(t: Bench, product: _Product) -> str:
    """To what float32 operands are rounded before they are multiplied."""
    a, b = torch.zeros(2, 8), torch.eye(8)
    a[0, 3], a[1, 3] = 1.0 + 2.0**-23, 1.0 + 2.0**-10
    low, high = t.fetch(product.of(t, a, b))[:, 3].tolist()
    if low == 1.0 + 2.0**-23:
        return "float32"
    return "tf32" if (low, high) == (1.0, 1.0 + 2.0**-10) else f"something that gives {low} and {high}"


# ------------------------------------------------------------------------------------------------------ layouts


def _padded(t: Bench, x: Tensor, before: int, after: int) -> Tensor:
    """``x`` on the device inside rows that are longer, by numbers that would show."""
    wide = torch.full((x.shape[0], before + x.shape[1] + after), 96.0, dtype=x.dtype)
    wide[:, before : before + x.shape[1]] = x
    return t.put(wide)[:, before : before + x.shape[1]]


def _stepped(t: Bench, x: Tensor) -> Tensor:
    """``x`` on the device as every second row and third column of more."""
    more = torch.full((2 * x.shape[0], 3 * x.shape[1]), 96.0, dtype=x.dtype)
    more[::2, ::3] = x
    return t.put(more)[::2, ::3]


def _offset(t: Bench, x: Tensor, by: int) -> Tensor:
    """``x`` on the device, starting ``by`` elements into its memory."""
    flat = torch.full((by + x.numel(),), 96.0, dtype=x.dtype)
    flat[by:] = x.reshape(-1)
    return t.put(flat)[by:].view(x.shape)


_LAYOUTS: dict[str, Callable[[Bench, Tensor], Tensor]] = {
    "row-major": lambda t, x: t.put(x),
    "column-major": lambda t, x: t.put(x.mT.contiguous()).mT,
    "in wider rows": lambda t, x: _padded(t, x, 8, 16),
    "in wider columns": lambda t, x: _padded(t, x.mT.contiguous(), 8, 16).mT,
    "every third": _stepped,
}
_MISALIGNED: dict[str, Callable[[Bench, Tensor], Tensor]] = {
    "one element off": lambda t, x: _offset(t, x, 1),
    "seven elements off": lambda t, x: _offset(t, x, 7),
    "in odd rows": lambda t, x: _padded(t, x, 3, 10 if x.shape[1] % 2 == 0 else 11),
    "in odd columns": lambda t, x: _padded(t, x.mT.contiguous(), 1, 12 if x.shape[0] % 2 == 0 else 13).mT,
}


def _each_layout(t: Bench, layouts: dict[str, Callable[[Bench, Tensor], Tensor]], m: int, k: int, n: int) -> None:
    a, b = _exact(t, m, k, n)
    want = oracle.product(a, b)
    for dtype in (BF16, F32):
        for product in _products(t, dtype, k):
            for left, lay_a in layouts.items():
                for right, lay_b in layouts.items():
                    got = product.on(t, lay_a(t, a.to(dtype)), lay_b(t, b.to(dtype)))
                    t.equal(got, want.to(dtype), name=f"{product.name}, {left} x {right}")


@case("MM-005", "core")
def strides(t: Bench) -> None:
    """Transposed, padded, stepped and broadcast (stride 0) operands give the bits of contiguous ones.

    Every pair of layouts of exact integers, 64 x 96 x 72.
    """
    _each_layout(t, _LAYOUTS, 64, 96, 72)
    a, b = _exact(t, 64, 96, 72, name="broadcast")
    for dtype in (BF16, F32):
        row, column = a[:1].to(dtype), b[:, :1].to(dtype)
        for product in _products(t, dtype, 96):
            got = product.on(t, t.put(row).expand(64, 96), product.put(t, b.to(dtype)))
            t.equal(got, oracle.product(a[:1].expand(64, 96), b).to(dtype), name=f"{product.name}, rows of stride 0")
            got = product.on(t, t.put(a.to(dtype)), t.put(column).expand(96, 72))
            want = oracle.product(a, b[:, :1].expand(96, 72))
            t.equal(got, want.to(dtype), name=f"{product.name}, columns of stride 0")


@case("MM-006", "core")
def misaligned(t: Bench) -> None:
    """Operands that start one element into their memory, or whose rows have odd lengths, give the right bits.

    A request names no layout, so a plan could not avoid a kernel that refuses one: refusing is failing.
    """
    _each_layout(t, _MISALIGNED, 33, 48, 40)


@case("MM-007", "core", revision=2)
def empty_dimensions(t: Bench) -> None:
    """K = 0 gives zeros, or the bias; M = 0 or N = 0 gives an empty result."""
    for dtype in (F32, BF16):
        for m, k, n in ((4, 0, 5), (0, 3, 5), (4, 3, 0)):
            a, b = t.normal(m, k, name="a", dtype=dtype), t.normal(k, n, name="b", dtype=dtype)
            for product in _products(t, dtype, k):
                t.equal(product.of(t, a, b), torch.zeros(m, n, dtype=dtype), name=f"{product.name} {m}x{k}x{n}")
        # What is not constant, or a result that is always 0 would do.
        bias = torch.arange(5).to(dtype)
        for name, call in _linears(t, dtype, 0):
            got = t.run(call, t.put(torch.zeros(4, 0, dtype=dtype)), t.put(torch.zeros(5, 0, dtype=dtype)), t.put(bias))
            t.equal(got, bias.expand(4, 5).contiguous(), name=f"linear {name} of nothing, with bias")
        a, b = _exact(t, 4, 3, 5)
        for product in _products(t, dtype, 3):
            t.equal(product.of(t, a.to(dtype), b.to(dtype)), oracle.product(a, b).to(dtype), name=product.name)


@case("MM-008", "core")
def batches(t: Bench) -> None:
    """Products of batches of 1, 2, 3 and 65, of broadcast batches, and of a batch with one matrix are exact.

    Integers of their own in each batch; ``linear`` has one weight for all.
    """
    for count in (1, 2, 3, 65):
        a, b = _exact(t, 17, 24, 9, (count,), name=f"{count}/")
        cases = [(a, b), (a, b[0]), (a[0], b), (a[:, None], b[None, :3]), (a[None], b[:1, None])]
        for dtype in (BF16, F32):
            for number, (left, right) in enumerate(cases):
                got = t.run(t.backend.matmul.matmul, t.put(left.to(dtype)), t.put(right.to(dtype)))
                t.equal(got, oracle.product(left, right).to(dtype), name=f"matmul {dtype} of {count}, case {number}")
            for product in _products(t, dtype, 24)[1:]:
                for left in (a, a[None], a[0, 0]):
                    want = oracle.product(left, b[0]).to(dtype)
                    t.equal(product.of(t, left.to(dtype), b[0].to(dtype)), want, name=f"{product.name} of {count}")


@case("MM-009", "core")
def epilogue(t: Bench) -> None:
    """A bias is added to every column, and ``out_dtype`` is what the accumulated sum is rounded to, once.

    Exact integers, N = 1, 64 and 200. With K = 300 of ones and out_dtype float32, 257 and more would be lost by
    rounding to bfloat16 first.
    """
    for dtype in (BF16, F32):
        for n in (1, 64, 200):
            a, b = _exact(t, 33, 40, n)
            bias = t.integers(n, low=-5, high=5, name=f"bias{n}").double()
            want = (oracle.product(a / 2, b, bias)).to(dtype)
            for name, call in _linears(t, dtype, 40):
                weight = b.mT.contiguous().to(dtype)
                got = t.run(call, t.put((a / 2).to(dtype)), t.put(weight), t.put(bias.to(dtype)))
                t.equal(got, want, name=f"linear {name} {dtype}, N = {n}")
    a, b = torch.ones(3, 301, dtype=BF16), torch.ones(301, 5, dtype=BF16)
    b[:, 1:] *= torch.tensor([2.0, -1.0, 3.0, 0.5])
    for out in (F32, BF16):
        got = t.run(t.backend.matmul.matmul, t.put(a), t.put(b), out)
        t.equal(got, oracle.product(a, b).to(out), name=f"matmul, out_dtype {out}")
    got = t.run(t.backend.matmul.matmul, t.put(a.float()), t.put(b.float()), BF16)
    t.equal(got, oracle.product(a, b).to(BF16), name="matmul of float32, out_dtype bfloat16")


@case("MM-010", "core")
def non_finite(t: Bench) -> None:
    """One NaN, one infinity, or two of opposite sign in A or B reach their row or column, and nothing else.

    Class and sign as IEEE 754 has them, all other elements exact.
    """
    a = 2.0 * t.integers(40, 16, low=-2, high=1, name="a").double() + 1.0
    b = 2.0 * t.integers(16, 48, low=-2, high=1, name="b").double() + 1.0
    a[3, 5], a[9, 2], a[10, 15], a[12, 1], a[12, 7] = torch.nan, torch.inf, -torch.inf, torch.inf, -torch.inf
    b[4, 5], b[0, 11], b[15, 40] = torch.nan, -torch.inf, torch.inf
    _poisoned(t, a, b)


@case("MM-011", "core")
def zero_times_infinity(t: Bench) -> None:
    """0 times an infinity or NaN within K gives NaN."""
    a, b = _exact(t, 40, 64, 48)
    a[7, 20], a[8, 33], a[9, 40] = 0.0, 0.0, 0.0
    b[20, 2], b[33, 9], b[40, 30] = torch.inf, torch.nan, -torch.inf
    _poisoned(t, a, b)


def _poisoned(t: Bench, a: Tensor, b: Tensor) -> None:
    want = oracle.product(a, b)
    assert 0 < int(want.isfinite().sum()) < want.numel()
    for dtype in _dtypes(t):
        for product in _products(t, dtype, a.shape[1]):
            t.equal(product.of(t, a.to(dtype), b.to(dtype)), want.to(dtype), name=product.name)


@case("MM-012", "core")
def permutation_and_scale(t: Bench) -> None:
    """Permuted rows of A and columns of B permute the result, and an operand times 2^k scales it exactly.

    Integers for the permutations; normal data for the scale, of which no bit may change.
    """
    a, b = _exact(t, 70, 64, 90)
    rows = t.uniform(70, name="rows").argsort()
    columns = t.uniform(90, name="columns").argsort()
    want = oracle.product(a, b)[rows][:, columns]
    for dtype in _dtypes(t):
        x, y = t.normal(70, 64, name="x", dtype=dtype), t.normal(64, 90, name="y", dtype=dtype)
        for product in _products(t, dtype, 64):
            got = product.of(t, a[rows].to(dtype), b[:, columns].contiguous().to(dtype))
            t.equal(got, want.to(dtype), name=f"{product.name}, permuted")
            plain = product.of(t, x, y).to("cpu")
            t.equal(product.of(t, x * 8.0, y), plain * 8.0, name=f"{product.name} of 8 a")
            t.equal(product.of(t, x, y * 0.25), plain * 0.25, name=f"{product.name} of b / 4")


# ------------------------------------------------------------------------------------------------------- errors


@case("MM-013", "core")
def mismatches(t: Bench) -> None:
    """Shapes that do not fit and operands on another device raise an error with a type of its own, as do operands of
    two dtypes in ``linear``.

    Not torch's bare RuntimeError, and at the call, not when the device is next waited for. ``matmul`` computes two
    dtypes in the wider one. torch's "meta" is a device that no backend is.
    """
    x, y, z = t.put(t.normal(4, 6, name="a")), t.put(t.normal(6, 5, name="b")), t.put(t.normal(7, 5, name="c"))
    matmul = t.backend.matmul.matmul
    t.raises(TYPED, matmul, x, z)
    t.raises(TYPED, matmul, x[0, 0], y)
    t.raises(TYPED, matmul, x.expand(2, 4, 6), y.expand(3, 6, 5))
    t.raises(TYPED, matmul, x, y.to("meta"))
    t.raises(TYPED, matmul, x.to("meta"), y)
    for _, call in _linears(t, F32, 6):
        weight, bias = y.mT, t.put(t.normal(5, name="bias"))
        t.raises(TYPED, call, x, z.mT)
        t.raises(TYPED, call, x, weight.expand(2, 5, 6))
        t.raises(TYPED, call, x, weight, bias[:3])
        t.raises(TYPED, call, x, weight.to(BF16))
        t.raises(TYPED, call, x, weight.to("meta"))
    # The operands are as they were, and a right call still works.
    t.within(t.run(matmul, x, y), *_bounded(t, t.normal(4, 6, name="a"), t.normal(6, 5, name="b")), name="after errors")


def _bounded(t: Bench, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return oracle.product(a, b), oracle.bound(a, b, a.dtype, _arithmetic(t))


# ------------------------------------------------------------------------------------- repetition and gradients


@contextmanager
def _load(t: Bench, work: Callable[[], Any]) -> Iterator[None]:
    """Another thread keeps the device busy meanwhile."""
    stop = threading.Event()

    def busy() -> None:
        while not stop.wait(0.001):
            work()

    thread = threading.Thread(target=busy, name="load", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60.0)


@case("MM-015", "core")
def repeats(t: Bench) -> None:
    """Where determinism is declared, 50 repeats of a product under load have the same bits.

    64 x 4096 x 48: few output tiles and a long K, which is where kernels split K. Implementations that say that they
    are not deterministic are left out, and the plan says so too.
    """
    t.needs(t.capabilities.deterministic, "determinism")
    loose = {c.name for c in t.backend.implementations() if c.op == "linear" and not c.deterministic}
    for dtype in (BF16, F32):
        a, b = t.normal(64, 4096, name="a", dtype=dtype), t.normal(4096, 48, name="b", dtype=dtype)
        other = t.put(t.normal(64, 64, name="load"))
        for product in _products(t, dtype, 4096):
            if any(product.name.startswith(f"linear {name} ") for name in loose):
                continue
            x, y = t.put(a), product.put(t, b)
            first = product.on(t, x, y).to("cpu")
            with _load(t, lambda other=other: other @ other):
                for _ in range(49):
                    t.equal(product.on(t, x, y), first, name=product.name)


@case("MM-016", "train")
def gradients(t: Bench) -> None:
    """The gradients of both operands, and of a bias, are within the bound with the K of their own sums.

    The gradient of the output comes contiguous, transposed and broadcast from a single number.
    """
    m, k, n = 48, 80, 33
    grads = {
        "contiguous": lambda g: t.put(g),
        "transposed": lambda g: t.put(g.mT.contiguous()).mT,
        "one number": lambda g: t.put(g[:1, :1]).expand(m, n),
    }
    for dtype in _dtypes(t):
        a, b = t.normal(m, k, name="a", dtype=dtype), t.normal(k, n, name="b", dtype=dtype)
        g, bias = t.normal(m, n, name="g", dtype=dtype), t.normal(n, name="bias", dtype=dtype)
        for layout, lay in grads.items():
            seen = g[:1, :1].expand(m, n) if layout == "one number" else g
            x, y, z = t.put(a).requires_grad_(), t.put(b).requires_grad_(), t.put(bias).requires_grad_()
            out = t.run(t.backend.matmul.matmul, x, y)
            found = t.run(torch.autograd.grad, out, (x, y), lay(g))
            _gradients_within(t, found, a, b, seen, f"matmul {dtype}, {layout}")
            for name, call in _linears(t, dtype, k):
                weight = t.put(b.mT.contiguous()).requires_grad_()
                out = t.run(call, x, weight, z)
                dx, dw, dz = t.run(torch.autograd.grad, out, (x, weight, z), lay(g))
                _gradients_within(t, (dx, dw.mT, dz), a, b, seen, f"linear {name} {dtype}, {layout}")


def _gradients_within(t: Bench, found: tuple[Tensor, ...], a: Tensor, b: Tensor, g: Tensor, name: str) -> None:
    sums = {"da": (g, b.mT), "db": (a.mT, g), "dbias": (torch.ones(1, g.shape[0], dtype=g.dtype), g)}
    for got, (what, (left, right)) in zip(found, sums.items(), strict=False):
        want, limit = _bounded(t, left, right)
        t.within(got, want.reshape(got.shape), limit.reshape(got.shape), name=f"{what} of {name}")
