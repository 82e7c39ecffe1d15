"""The kernels of rms_norm, rope, swiglu and the losses, interpreted, against float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from accelbridge import ops
from accelbridge.errors import Unsupported
from accelbridge.kernels import cross_entropy as losses
from accelbridge.kernels import rms_norm, rope, swiglu, tiles
from accelbridge.kernels.tiles import Tile
from accelbridge.ops import chunked_losses
from tests.kernels import layer_checks as check
from tests.kernels.layer_bounds import DTYPES, KINDS, data
from tests.kernels.layer_checks import IGNORED, TILES, gradient, leaf
from tests.kernels.layers_on_two import on_two
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def small_tiles() -> None:
    tiles.bind(TILES)


# ------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(61, 300), (4, 128), (1, 1), (14, 96)])
def test_rms_norm(dtype: torch.dtype, kind: str, rows: int, columns: int) -> None:
    check.rms_norm(rms_norm, dtype, kind, rows, columns)


@pytest.mark.parametrize("columns", [4096, 16384])
def test_rms_norm_of_long_rows(columns: int) -> None:
    check.rms_norm(rms_norm, torch.bfloat16, "normal", 5, columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (1, 1, 1, 2), (2, 3, 5, 40), (1, 4, 8, 128), (1, 2, 2, 512)])
def test_rope(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    check.rope(rope, dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_by_row_and_of_quarter_turns(dtype: torch.dtype) -> None:
    check.rope(rope, dtype, (3, 5, 2, 8), by_row=True)
    check.rope_of_quarter_turns(rope, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "magnitude"), [((3, 50), 1.0), ((1,), 1.0), ((2, 64), 30.0)])
def test_swiglu(dtype: torch.dtype, kind: str, shape: tuple[int, ...], magnitude: float) -> None:
    check.swiglu(swiglu, dtype, kind, shape, magnitude)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "magnitude"), [(7, 257, 1.0), (6, 301, 40.0), (4, 128, 1.0), (1, 1, 1.0)])
def test_cross_entropy(dtype: torch.dtype, kind: str, rows: int, columns: int, magnitude: float) -> None:
    check.cross_entropy(losses, dtype, kind, rows, columns, magnitude)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_over_a_large_vocabulary(dtype: torch.dtype) -> None:
    tiles.reset()
    tiles.bind({"softmax_parts": Tile({"BLOCK": 8192}), "softmax_gradient": Tile({"BLOCK": 8192})})
    check.cross_entropy(losses, dtype, "normal", 4, 128256, 3.0)


def test_cross_entropy_of_infinities() -> None:
    check.cross_entropy_of_infinities(losses)


def test_a_logit_that_is_not_finite_makes_the_loss_so() -> None:
    for bad in (torch.nan, torch.inf):
        logits = data("normal", 3, 200)
        logits[1, 150] = bad
        assert losses.cross_entropy(logits, torch.tensor([1, 2, 3])).isnan()
    assert losses.cross_entropy(torch.full((1, 200), -torch.inf), torch.tensor([3])).isnan()


@pytest.mark.parametrize("target", [-1, 200, 2**40])
def test_a_target_outside_of_the_vocabulary_gives_nan_and_reads_nothing(target: int) -> None:
    logits, targets = data("normal", 3, 200), torch.tensor([0, target, 3])
    assert losses.cross_entropy(logits, targets).isnan()
    for call in (losses.linear_cross_entropy, ops.reference("linear_cross_entropy")):
        assert call(data("normal", 3, 8), data("normal", 200, 8, seed=1), targets).isnan()


def test_sums_over_rows_have_no_order_but_that_of_the_tile() -> None:
    """No atomics: the sum of a program is its own, and programs are added in order."""
    for module in (rms_norm, rope, swiglu, losses):
        assert "atomic" not in inspect.getsource(module)
    x, weight = leaf(data("normal", 61, 300)), leaf(data("normal", 300, seed=1))
    found = []
    for _ in range(2):
        weight.grad = None
        rms_norm.rms_norm(x, weight, 1e-5).backward(data("normal", 61, 300, seed=2))
        found.append(gradient(weight))
    assert torch.equal(*found)


# ---------------------------------------------------------------------------------------------- linear and loss


@pytest.fixture
def seven_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_losses, "COLUMNS", 7)


@pytest.mark.usefixtures("seven_columns")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy_is_both_in_one(dtype: torch.dtype) -> None:
    x, weight = data("normal", 9, 16, dtype=dtype), data("normal", 24, 16, dtype=dtype, seed=1)
    targets = check.some_targets(9, 24)
    wide = [leaf(t.double()) for t in (x, weight)]
    wanted = torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, targets, ignore_index=IGNORED, reduction="sum")
    wanted.backward()
    for call in (losses.linear_cross_entropy, ops.reference("linear_cross_entropy")):
        leaves = [leaf(x), leaf(weight)]
        loss = call(*leaves, targets, IGNORED)
        loss.backward()
        assert loss.dtype == torch.float32
        # bfloat16 rounds 24 logits of about 4 to 2^-9 of them, then each product.
        bound = 3e-6 if dtype == torch.float32 else 2e-2
        assert abs(loss.item() - wanted.item()) <= bound * wanted.item()
        for found, right in zip(leaves, wide, strict=True):
            assert gradient(found).dtype == dtype
            off = (gradient(found).double() - gradient(right)).norm() / gradient(right).norm()
            assert off <= bound, float(off)


# ------------------------------------------------------------------------------------------ what tensors look like


def test_empty_tensors() -> None:
    for rows in (0, 3):
        logits = leaf(torch.zeros(rows, 7))
        losses.cross_entropy(logits, torch.full((rows,), 5), 5).backward()
        assert gradient(logits).shape == (rows, 7)
        assert not gradient(logits).any()
    x, weight = leaf(torch.zeros(0, 8)), leaf(torch.ones(8))
    rms_norm.rms_norm(x, weight, 1e-5).sum().backward()
    assert torch.equal(gradient(weight), torch.zeros(8))
    assert rope.rope(torch.zeros(2, 0, 3, 8), *ops.rope_table(torch.arange(0), 8)).shape == (2, 0, 3, 8)
    assert swiglu.swiglu(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0, 5)
    empty = leaf(torch.zeros(0, 4))
    losses.linear_cross_entropy(empty, torch.zeros(5, 4), torch.zeros(0, dtype=torch.long)).backward()
    assert gradient(empty).shape == (0, 4)


def _strided(x: Tensor, how: str) -> Tensor:
    """The numbers of ``x`` with gaps between rows, in transposed order, or expanded."""
    if how == "gaps":
        return torch.cat([x, torch.full_like(x, torch.nan)], dim=-1)[..., : x.shape[-1]]
    if how == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x[..., :1].expand(x.shape)


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Any]]]] = {
    "rms_norm": (rms_norm.rms_norm, lambda: [data("normal", 5, 3, 96), data("normal", 96, seed=1), 1e-5]),
    "rope": (rope.rope, lambda: [data("normal", 2, 5, 3, 8), *ops.rope_table(torch.arange(5), 8)]),
    "swiglu": (swiglu.swiglu, lambda: [data("normal", 3, 50), data("normal", 3, 50, seed=1)]),
    "cross_entropy": (losses.cross_entropy, lambda: [data("normal", 5, 300), check.some_targets(5, 300), IGNORED]),
}


@pytest.mark.parametrize("how", ["gaps", "transposed", "expanded"])
@pytest.mark.parametrize("name", CALLS)
def test_strides_do_not_matter(name: str, how: str) -> None:
    call, make = CALLS[name]
    first, *rest = make()
    tensor = _strided(first, how)
    assert not tensor.is_contiguous()
    found, dense = tensor.detach().requires_grad_(), leaf(tensor.contiguous())
    rest_found = [_strided(r, how) if isinstance(r, Tensor) and r.shape == tensor.shape else r for r in rest]
    rest_dense = [r.contiguous() if isinstance(r, Tensor) else r for r in rest_found]
    results = call(found, *rest_found), call(dense, *rest_dense)
    assert torch.equal(*results)
    for result in results:  # the gradient of a sum is expanded as well
        result.sum().backward()
    assert torch.equal(gradient(found), gradient(dense))


def test_offsets_beyond_int32() -> None:
    """Three rows that are 2^30 elements apart, in memory of which no more than they is touched."""
    apart = torch.empty(2**31 + 512, dtype=torch.bfloat16).as_strided((3, 300), (2**30, 1))
    rows = data("normal", 3, 300, dtype=torch.bfloat16)
    apart.copy_(rows)
    weight, targets = torch.ones(300), torch.tensor([1, 2, 3])
    assert torch.equal(rms_norm.rms_norm(apart, weight, 1e-5), rms_norm.rms_norm(rows, weight, 1e-5))
    assert torch.equal(losses.cross_entropy(apart, targets), losses.cross_entropy(rows, targets))
    heads, angles = apart[:, None, None, :16], ops.rope_table(torch.arange(1), 16)
    assert torch.equal(rope.rope(heads, *angles), rope.rope(rows[:, None, None, :16], *angles))


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: rms_norm.rms_norm(torch.zeros(2, 3), torch.ones(1), 1e-5), ValueError, r"\(1,\).*\(2, 3\)"),
        (lambda: rms_norm.rms_norm(torch.zeros(1, 16385), torch.ones(16385), 1e-5), Unsupported, "16385.*16384"),
        (lambda: rms_norm.rms_norm(torch.zeros(2, 3).double(), torch.ones(3), 1e-5), Unsupported, "float64"),
        (lambda: rope.rope(torch.zeros(1, 2, 3, 8), torch.zeros(2, 8), torch.zeros(2, 8)), ValueError, r"\(2, 8\)"),
        (lambda: rope.rope(torch.zeros(1, 2, 1, 1024), *ops.rope_table(torch.arange(2), 1024)), Unsupported, "1024"),
        (lambda: rope.rope(torch.zeros(1, 1, 1, 2), leaf(torch.ones(1, 1)), torch.ones(1, 1)), Unsupported, "gradient"),
        (lambda: swiglu.swiglu(torch.zeros(2, 3), torch.zeros(3)), ValueError, r"\(2, 3\).*\(3,\)"),
        (lambda: swiglu.swiglu(torch.zeros(3), torch.zeros(3).bfloat16()), ValueError, "one dtype.*bfloat16"),
        (lambda: swiglu.swiglu(torch.zeros(3).int(), torch.zeros(3).int()), Unsupported, "int32"),
        (lambda: losses.cross_entropy(torch.zeros(2, 3), torch.zeros(3)), ValueError, r"\(2, 3\).*\(3,\)"),
        (lambda: losses.cross_entropy(torch.zeros(2, 3).double(), torch.zeros(2)), Unsupported, "float64"),
        (
            lambda: losses.linear_cross_entropy(torch.zeros(2, 3), torch.zeros(4, 5), torch.zeros(2)),
            ValueError,
            r"\(2, 3\).*\(4, 5\)",
        ),
    ],
)
def test_what_a_kernel_cannot_do_is_refused(call: Callable[[], Tensor], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


# ------------------------------------------------------------------------------------------------- torch's own checks


def _leaves(args: list[Any]) -> list[Any]:
    """Those that are as wide as the first take a gradient: neither angles nor targets are."""
    width = args[0].shape[-1]
    return [leaf(a) if isinstance(a, Tensor) and a.shape[-1] == width else a for a in args]


def _op_calls() -> Iterator[Any]:
    own = torch.ops.accelbridge
    x, weight, targets = data("normal", 3, 2, 40), data("normal", 40, seed=1), check.some_targets(5, 200)
    logits, numbers = data("normal", 5, 200), torch.rand(5)
    angles = ops.rope_table(torch.arange(3), 8)
    yield "rms_norm", own.rms_norm.default, (leaf(x), leaf(weight), 1e-5)
    yield "rms_norm_backward", own.rms_norm_backward.default, (x, x, weight, torch.rand(3, 2))
    yield "rope", own.rope.default, (leaf(data("normal", 2, 3, 2, 8)), *angles, False)
    yield "swiglu", own.swiglu.default, (leaf(logits), leaf(logits + 1))
    yield "swiglu_backward", own.swiglu_backward.default, (logits, logits, logits)
    yield "cross_entropy", own.cross_entropy.default, (leaf(logits), targets, IGNORED)
    yield "cross_entropy_backward", own.cross_entropy_backward.default, (numbers[0], logits, targets, numbers, IGNORED)
    yield "softmax_parts", own.softmax_parts.default, (logits, targets, 0)
    yield "softmax_gradient", own.softmax_gradient.default, (logits, targets, numbers, numbers, 0)


@pytest.mark.parametrize(("op", "args"), [pytest.param(*rest, id=name) for name, *rest in _op_calls()])
def test_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(op, args)


@pytest.mark.parametrize("name", CALLS)
def test_compiles_as_one_graph(name: str) -> None:
    call, make = CALLS[name]
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        args = _leaves(make())
        result = run(*args)
        result.square().sum().backward()
        results.append([result, *(gradient(a) for a in args if isinstance(a, Tensor) and a.requires_grad)])
    for plain, compiled in zip(*results, strict=True):
        assert torch.equal(plain, compiled)


def test_dtensors_and_a_split_vocabulary_on_two_ranks() -> None:
    run_ranks(on_two, 2, timeout=120)
