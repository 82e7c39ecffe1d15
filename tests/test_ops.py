"""The portable ops against float64 oracles written here in numpy, and their binding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from accelbridge import ops
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.portable.matmul import PortableMatmul

U32 = 2.0**-24
U = {torch.float32: U32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-53}
TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float64: 0.0}
DTYPES = (torch.float32, torch.bfloat16)
KINDS = ("normal", "positive")


def data(kind: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "integers":
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator)
    return (x.abs() if kind == "positive" else x).to(dtype)


def wide(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def gamma(n: float, u: float = U32) -> float:
    return n * u / (1 - n * u)


def assert_within(found: Tensor, exact: np.ndarray, bound: np.ndarray | float) -> None:
    """Every error is at most ``bound``, and there is no NaN."""
    error = np.abs(wide(found) - exact)
    assert found.shape == exact.shape
    assert np.all(error <= bound), f"{np.nanmax(error / np.maximum(bound, 1e-300))} bounds off"


def m1(a: np.ndarray, b: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The exact product and bound M1: u|C| + (1+u) gamma_{K-1} (|A||B|) + the smallest subnormal."""
    exact, u = a @ b, U[dtype]
    acc = min(u, U32)
    return exact, u * np.abs(exact) + (1 + u) * gamma(a.shape[-1] - 1, acc) * (np.abs(a) @ np.abs(b)) + TINY[dtype]


# ----------------------------------------------------------------------------------------------------- layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 65, 1024])
def test_linear_within_bound_forward_and_backward(dtype: torch.dtype, kind: str, k: int) -> None:
    x, weight = (
        data(kind, 9, k, dtype=dtype).requires_grad_(),
        data(kind, 6, k, dtype=dtype, seed=1).requires_grad_(),
    )
    grad = data(kind, 9, 6, dtype=dtype, seed=2)
    y = ops.linear(x, weight)
    y.backward(grad)
    assert y.dtype == dtype
    assert x.grad is not None
    assert weight.grad is not None
    assert_within(y, *m1(wide(x), wide(weight).T, dtype))
    assert_within(x.grad, *m1(wide(grad), wide(weight), dtype))
    assert_within(weight.grad, *m1(wide(grad).T, wide(x), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_exact_on_integers(dtype: torch.dtype) -> None:
    x, weight = data("integers", 2, 5, 200, dtype=dtype), data("integers", 7, 200, dtype=dtype, seed=1)
    x[..., [0, -1]] = weight[..., [0, -1]] = 1  # the ends count
    bias = torch.arange(7).to(dtype)
    assert np.array_equal(wide(ops.linear(x, weight, bias)), wide(x) @ wide(weight).T + np.arange(7))


def test_embedding_takes_rows_and_adds_gradients_of_repeated_tokens() -> None:
    weight = data("normal", 11, 3).requires_grad_()
    tokens = torch.tensor([[0, 10], [4, 4]])
    out = ops.embedding(tokens, weight)
    assert np.array_equal(wide(out), wide(weight)[tokens.numpy()])
    out.sum().backward()
    expected = np.zeros((11, 3))
    np.add.at(expected, tokens.numpy().ravel(), 1.0)
    assert weight.grad is not None
    assert np.array_equal(wide(weight.grad), expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("magnitude", [1.0, 1e-4, 300.0])
def test_rms_norm_within_bound(dtype: torch.dtype, kind: str, magnitude: float) -> None:
    n, d, eps = 5, 96, 1e-5
    x = (data(kind, n, d) * magnitude).to(dtype).requires_grad_()
    weight = (data(kind, d, seed=1) + 0.5).to(dtype).requires_grad_()
    grad = data(kind, n, d, dtype=dtype, seed=2)
    y = ops.rms_norm(x, weight, eps)
    y.backward(grad)
    assert y.dtype == dtype
    assert x.grad is not None
    assert weight.grad is not None

    X, W, dY, u, acc = wide(x), wide(weight), wide(grad), U[dtype], min(U[dtype], U32)
    r = 1 / np.sqrt((X**2).mean(-1, keepdims=True) + eps)
    # A sum of d squares has no cancellation: relative error gamma_{d+2}, halved by the root, and a few steps.
    relative = gamma(d / 2 + 8, acc) + u
    assert_within(y, X * r * W, relative * np.abs(X * r * W))
    exact = r * dY * W - X * r**3 * (dY * W * X).mean(-1, keepdims=True)
    size = np.abs(r * dY * W) + np.abs(X) * r**3 * np.abs(dY * W * X).mean(-1, keepdims=True)
    assert_within(x.grad, exact, u * np.abs(exact) + gamma(3 * d, acc) * size)
    exact, size = (dY * X * r).sum(0), np.abs(dY * X * r).sum(0)
    assert_within(weight.grad, exact, u * np.abs(exact) + gamma(d + n, acc) * size)


def test_rms_norm_statistics_are_float32_for_bfloat16() -> None:
    # In bfloat16 the running sum of 4096 ones would stop at 256.
    x = torch.ones(4096, dtype=torch.bfloat16)
    assert torch.equal(ops.rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 0.0), x)


def test_rope_table_within_bound() -> None:
    positions = torch.tensor([0, 1, 7, 511, 4095])
    cos, sin = ops.rope_table(positions, 64, 10000.0)
    angle = positions.numpy()[:, None] * 10000.0 ** (-np.arange(0, 64, 2) / 64)
    bound = 20 * U32 * angle + 4 * U32
    assert cos.dtype == sin.dtype == torch.float32
    assert_within(cos, np.cos(angle), bound)
    assert_within(sin, np.sin(angle), bound)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("per_row", [False, True])
def test_rope_turns_pairs_as_complex_numbers(dtype: torch.dtype, per_row: bool) -> None:
    b, s, h, d = 2, 7, 3, 8
    positions = torch.arange(s) + (torch.tensor([[0], [5]]) if per_row else 0)
    cos, sin = ops.rope_table(positions, d)
    x = data("normal", b, s, h, d, dtype=dtype).requires_grad_()
    grad = data("normal", b, s, h, d, dtype=dtype, seed=1)
    y = ops.rope(x, cos, sin)
    y.backward(grad)
    assert y.dtype == dtype
    assert x.grad is not None
    turn = (wide(cos) + 1j * wide(sin))[..., None, :]

    def turned(x: Tensor, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        X = wide(x)
        z = (X[..., : d // 2] + 1j * X[..., d // 2 :]) * turn
        exact = np.concatenate((z.real, z.imag), -1)
        size = np.tile(np.abs(X[..., : d // 2]) + np.abs(X[..., d // 2 :]), 2)
        return exact, U[dtype] * np.abs(exact) + 3 * min(U[dtype], U32) * size

    assert_within(y, *turned(x, turn))
    exact, bound = turned(grad, turn.conj())
    assert_within(x.grad, exact, 4 * bound)  # in bfloat16 the halves' gradients may be rounded before they meet


def test_rope_scores_depend_on_distance_alone() -> None:
    q, k = (
        data("normal", 1, 1, 1, 16, dtype=torch.float64),
        data("normal", 1, 1, 1, 16, dtype=torch.float64, seed=1),
    )

    def score(m: int, n: int) -> float:
        turned = [ops.rope(x, *ops.rope_table(torch.tensor([p]), 16)) for x, p in ((q, m), (k, n))]
        return (turned[0] * turned[1]).sum().item()

    assert score(3, 1) == pytest.approx(score(42, 40), abs=1e-4)
    assert score(3, 1) != pytest.approx(score(1, 3), abs=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_within_bound(dtype: torch.dtype) -> None:
    gate, up = (data("normal", 4, 33, dtype=dtype, seed=i).requires_grad_() for i in (0, 1))
    grad = data("normal", 4, 33, dtype=dtype, seed=2)
    y = ops.swiglu(gate, up)
    y.backward(grad)
    assert gate.grad is not None
    assert up.grad is not None
    A, B, G, u = wide(gate), wide(up), wide(grad), U[dtype]
    s = 1 / (1 + np.exp(-A))
    relative = 2.1 * u + 16 * U32
    assert_within(y, A * s * B, relative * np.abs(A * s * B))
    assert_within(up.grad, G * A * s, relative * np.abs(G * A * s))
    assert_within(gate.grad, G * B * s * (1 + A * (1 - s)), relative * np.abs(G * B * s) * (1 + np.abs(A)))


# ------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kind", [*KINDS, "integers"])
@pytest.mark.parametrize("magnitude", [1.0, 40.0])
def test_cross_entropy_within_bound(dtype: torch.dtype, kind: str, magnitude: float) -> None:
    n, v = 23, 301
    logits = (data(kind, n, v) * magnitude).to(dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(3))
    targets[[2, 22]] = -100
    targets[0] = 0
    loss = ops.cross_entropy(logits, targets)
    loss.backward()
    assert loss.shape == ()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert logits.grad is not None

    X, kept, acc = wide(logits), targets.numpy() != -100, min(U[dtype], U32)
    shifted = X - X.max(-1, keepdims=True)
    lse = X.max(-1) + np.log(np.exp(shifted).sum(-1))
    index = np.where(kept, targets.numpy(), 0)
    losses = np.where(kept, lse - X[np.arange(n), index], 0.0)
    # Per token: shift, exponentials, a sum of v positive terms, logarithm, subtraction; then a sum of n.
    each = acc * (v + 16 + 4 * np.abs(X).max(-1))
    assert_within(loss, losses.sum(), each.sum() + gamma(n, acc) * losses.sum())
    p = np.exp(X - lse[:, None])
    exact = (p - np.eye(v)[index]) * kept[:, None]
    size = p + np.eye(v)[index] + 2.0**-126 / U32  # probabilities below the float32 range become 0
    assert_within(logits.grad, exact, U[dtype] * np.abs(exact) + 2 * each[:, None] * size)
    assert not logits.grad[~torch.from_numpy(kept)].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 4])
def test_cross_entropy_of_nothing_is_zero_with_zero_gradient(dtype: torch.dtype, n: int) -> None:
    logits = data("normal", n, 7, dtype=dtype).requires_grad_()
    loss = ops.cross_entropy(logits, torch.full((n,), 5), ignore_index=5)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_cross_entropy_of_bfloat16_is_computed_in_float32() -> None:
    # log(1000) = 6.9078; to bfloat16's three digits it would be 6.90625.
    loss = ops.cross_entropy(torch.zeros(1, 1000, dtype=torch.bfloat16), torch.tensor([3]))
    assert loss.item() == pytest.approx(np.log(1000), rel=1e-6)


# ----------------------------------------------------------------------------------------------------- checks

F = torch.zeros


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.linear(F(2, 3), F(4, 5)), r"\(2, 3\).*\(4, 5\)"),
        (lambda: ops.embedding(F(2, dtype=torch.long), F(4)), r"\(4,\)"),
        (lambda: ops.rms_norm(F(2, 3), F(1), 1e-5), r"\(1,\).*\(2, 3\)"),
        (lambda: ops.rope_table(F(2), 5), "5"),
        (lambda: ops.rope(F(1, 2, 3, 8), F(2, 8), F(2, 8)), r"\(1, 2, 3, 8\).*\(2, 8\)"),
        (lambda: ops.rope(F(1, 3, 2, 8), F(2, 4), F(2, 4)), r"\(1, 3, 2, 8\).*\(2, 4\)"),
        (lambda: ops.swiglu(F(2, 3), F(3)), r"\(2, 3\).*\(3,\)"),
        (lambda: ops.cross_entropy(F(2, 3, 4), F(2, 3)), r"\(2, 3, 4\)"),
        (lambda: ops.cross_entropy(F(2, 3), F(3, dtype=torch.long)), r"\(2, 3\).*\(3,\)"),
    ],
)
def test_shapes_that_do_not_fit_raise(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


# ---------------------------------------------------------------------------------------------------- binding


@pytest.fixture
def restored():
    yield
    ops.reset()


@pytest.mark.usefixtures("restored")
def test_bind_replaces_and_reset_restores() -> None:
    original = ops.swiglu
    assert ops.bound() == {name: ops.reference(name) for name in ops.NAMES}
    ops.bind({"swiglu": lambda gate, up: gate + up})
    assert ops.swiglu(torch.ones(1), torch.ones(1)).item() == 2
    assert ops.bound()["swiglu"] is ops.swiglu is not original
    assert ops.reference("swiglu") is original
    assert ops.bound()["rope"] is ops.reference("rope")
    ops.reset()
    assert ops.swiglu is original


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("table", [{"rms_norm": max, "swiglo": max}, {"rms_norm": max, "swiglu": None}])
def test_a_wrong_table_is_an_error_and_binds_nothing(table) -> None:
    with pytest.raises(ConfigError, match="swiglu"):
        ops.bind(table)
    assert ops.rms_norm is ops.reference("rms_norm")
    with pytest.raises(ConfigError, match=r"did you mean \"swiglu\""):
        ops.reference("swiglo")


@pytest.mark.usefixtures("restored")
def test_compilers_see_through_and_notice_another_binding() -> None:
    def block(x: Tensor) -> Tensor:
        return ops.swiglu(ops.rms_norm(x, torch.ones(4), 1e-5), x)

    x = data("normal", 3, 4)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), block(x))
    ops.bind({"swiglu": lambda gate, up: gate - up})
    assert torch.equal(compiled(x), block(x))


# ----------------------------------------------------------------------------------------------------- matmul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 64, 4096])
def test_portable_matmul_accumulates_in_float32_and_rounds_once(dtype: torch.dtype, kind: str, k: int) -> None:
    a, b = data(kind, 17, k).to(dtype), data(kind, k, 9, seed=1).to(dtype)
    for out_dtype in (torch.float32, torch.bfloat16):
        assert_within(PortableMatmul("x").matmul(a, b, out_dtype), *m1(wide(a), wide(b), out_dtype))
    assert PortableMatmul("x").matmul(a, b).dtype == dtype


@pytest.mark.parametrize("k", [64, 4096])
def test_torch_bfloat16_matmul_on_cpu_accumulates_in_float32(k: int) -> None:
    # What the reference of linear rests on; a bfloat16 accumulator is 6.8 bounds off at K = 4096.
    a, b = data("normal", 33, k, dtype=torch.bfloat16), data("normal", k, 9, dtype=torch.bfloat16, seed=1)
    assert_within(a @ b, *m1(wide(a), wide(b), torch.bfloat16))


def test_portable_matmul_refuses_quantized_products() -> None:
    from accelbridge.backend import Format

    fp8 = Format("float8_e4m3fn", 4, 3, 7, 448.0, "all_ones", "saturate")
    with pytest.raises(Unsupported, match=r'"acme".*float8_e4m3fn.*tensorwise.*use float32'):
        PortableMatmul("acme").quantize(torch.zeros(2), fp8, "tensorwise")
    x = torch.zeros(2, 2, dtype=torch.float8_e4m3fn)
    with pytest.raises(Unsupported, match=r'"acme".*float8_e4m3fn x float8_e4m3fn.*use float32'):
        PortableMatmul("acme").scaled_mm(x, x, torch.bfloat16)
