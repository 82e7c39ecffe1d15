"""Attention, the portable reference and the fused CPU candidate, against a float64 oracle in numpy.

Bounds A1 (out), A2 (lse) and A3 (gradients) and the SQNR floor A5 are those of the conformance suite. A3 is
stated for 16-bit formats; the float32 terms of A1 are added here, which is what it becomes when u is 2^-24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelbridge import ops
from accelbridge.backend import Mask, Request
from accelbridge.cpu.attention import CpuAttention, sdpa, supports
from accelbridge.errors import Unsupported
from accelbridge.portable.attention import PortableAttention

reference = ops.reference("attention")
IMPLEMENTATIONS = {"reference": reference, "sdpa": sdpa}
U32 = 2.0**-24
U = {torch.float32: U32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SQNR = {torch.float32: 100.0, torch.bfloat16: 45.0}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Products this small only lose by being shared between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def gamma(n: int) -> float:
    return n * U32 / (1 - n * U32)


# ----------------------------------------------------------------------------------------------------- oracle


def sees(mask: Mask, batch: int, queries: int, keys: int) -> np.ndarray:
    """bool [B, Sq, Sk]"""
    place = np.arange(queries)[:, None] + keys - queries  # bottom-right
    key = np.arange(keys)[None, :]
    seen = (key <= place) if mask.causal else np.ones((queries, keys), dtype=bool)
    if mask.window is not None:
        seen = seen & (key > place - mask.window)
    out = np.repeat(seen[None], batch, axis=0)
    if mask.segments_BS is not None:
        documents = mask.segments_BS.numpy()
        for b in range(batch):
            out[b] &= np.equal.outer(documents[b], documents[b])
    return out


@dataclass
class Oracle:
    """Exact results, and the largest errors a correct implementation may make."""

    out: np.ndarray
    lse: np.ndarray
    grads: tuple[np.ndarray, np.ndarray, np.ndarray]
    out_bound: np.ndarray
    lse_bound: np.ndarray
    grad_bounds: tuple[np.ndarray, np.ndarray, np.ndarray]


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    d_out: Tensor | None = None,
    d_lse: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    head_of: Any = None,
) -> Oracle:
    """Both implementations declare that they round the softmax to float32: u_P of A1 to A3 is 2^-24."""
    Q, K, V = wide(q), wide(k), wide(v)
    B, H, Sq, D = Q.shape
    G, Sk = K.shape[1:3]
    u = U[q.dtype]
    group = np.array([head_of(h) if head_of else h // (H // G) for h in range(H)])
    K, V = K[:, group], V[:, group]
    factor = D**-0.5 if scale is None else scale
    seen = sees(mask, B, Sq, Sk)[:, None]
    S = Q @ K.swapaxes(-1, -2) * factor
    slope = np.ones_like(S)
    if softcap is not None:
        slope = 1 - np.tanh(S / softcap) ** 2
        S = softcap * np.tanh(S / softcap)
    S = np.where(seen, S, -np.inf)
    top = S.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    E = np.exp(S - top)
    total = E.sum(-1, keepdims=True)
    P = E / np.where(total > 0, total, 1.0)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    out = P @ V

    size = np.where(seen, np.abs(Q) @ np.abs(K).swapaxes(-1, -2) * abs(factor), 0.0).max(-1, initial=0.0)
    d_s = (gamma(D) + 4 * U32) * size + 8 * U32 + (0 if softcap is None else 8 * U32 * softcap)
    d_s = d_s[..., None]
    slack = U32 + 2 * d_s + gamma(max(Sq, Sk))
    out_bound = u * np.abs(out) + (1 + u) * slack * (P @ np.abs(V))
    finite = np.where(np.isfinite(lse), np.abs(lse), 0.0)
    lse_bound = d_s[..., 0] + (8 + np.sqrt(Sk)) * U32 * (1 + finite)

    dO = np.zeros_like(out) if d_out is None else wide(d_out)
    dL = np.zeros_like(lse) if d_lse is None else wide(d_lse)
    dS = P * (dO @ V.swapaxes(-1, -2) - (dO * out).sum(-1, keepdims=True) + dL[..., None]) * slope * factor
    spread = np.abs(dO) @ np.abs(V).swapaxes(-1, -2) + (np.abs(dO) * np.abs(out)).sum(-1, keepdims=True)
    # (2 u scale dS_mag of A3; the rest are the float32 errors of P, dP, the row sums and the products.)
    dS_mag = P * (spread + np.abs(dL)[..., None]) * abs(factor)
    dS_mag = dS_mag * (2 * u + 4 * d_s + 2 * gamma(max(Sq, Sk)) + 2 * gamma(D))

    def summed(x: np.ndarray) -> np.ndarray:
        per_group = np.zeros((B, G, *x.shape[2:]))
        for h in range(H):
            per_group[:, group[h]] += x[:, h]
        return per_group

    dQ, dK, dV = dS @ K, summed(dS.swapaxes(-1, -2) @ Q), summed(P.swapaxes(-1, -2) @ dO)
    dQ_bound = u * np.abs(dQ) + dS_mag @ np.abs(K)
    dK_bound = u * np.abs(dK) + summed(dS_mag.swapaxes(-1, -2) @ np.abs(Q))
    dV_bound = u * np.abs(dV) + summed((slack * P).swapaxes(-1, -2) @ np.abs(dO))
    return Oracle(out, lse, (dQ, dK, dV), out_bound, lse_bound, (dQ_bound, dK_bound, dV_bound))


def excess(found: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> float:
    """Largest error in units of the bound; infinite for NaN or a wrong infinity."""
    if found.size == 0:
        return 0.0
    same = np.isinf(exact) & (found == exact)
    with np.errstate(invalid="ignore"):
        ratio = np.where(same, 0.0, np.abs(found - exact) / np.maximum(bound, 1e-300))
    return float(np.nan_to_num(ratio, nan=np.inf).max())


def sqnr(found: np.ndarray, exact: np.ndarray) -> float:
    noise = ((found - exact) ** 2).sum((-1, -2))
    signal = (exact**2).sum((-1, -2))
    return float((10 * np.log10(np.maximum(signal, 1e-300) / np.maximum(noise, 1e-300))).min())


def tensors(
    dtype: torch.dtype,
    B: int = 2,
    H: int = 4,
    G: int = 2,
    Sq: int = 65,
    Sk: int = 65,
    D: int = 16,
    positive: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that want gradients, as a projection leaves them (heads last but one in memory), and d_out."""
    made = []
    for seed, (heads, length) in enumerate(((H, Sq), (G, Sk), (G, Sk), (H, Sq))):
        x = normal(B, length, heads, D, seed=seed)
        made.append((x.abs() if positive else x).to(dtype).transpose(1, 2))
    q, k, v, d_out = made
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_out


def grads(*inputs: Tensor) -> list[Tensor]:
    found = [x.grad for x in inputs]
    assert all(g is not None for g in found)
    return [g for g in found if g is not None]


SEGMENTS = torch.tensor([[0] * 1 + [1] * 17 + [2] * 47, [5] * 64 + [6] * 1])
MASKS = {
    "full": Mask(causal=False),
    "causal": Mask(),
    "window": Mask(window=7),
    "segments": Mask(segments_BS=SEGMENTS),
    "segments, full": Mask(causal=False, segments_BS=SEGMENTS),
    "segments, window": Mask(window=7, segments_BS=SEGMENTS),
}


# --------------------------------------------------------------------------------------------- against bounds


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("positive", [False, True], ids=["normal", "positive"])
def test_within_bounds(name: str, dtype: torch.dtype, mask: Mask, groups: int, positive: bool) -> None:
    q, k, v, d_out = tensors(dtype, G=groups, positive=positive)
    out = IMPLEMENTATIONS[name](q, k, v, mask)
    out.backward(d_out)
    exact = oracle(q, k, v, mask, d_out)
    assert out.dtype == dtype
    assert excess(wide(out), exact.out, exact.out_bound) <= 1
    assert sqnr(wide(out), exact.out) >= SQNR[dtype]
    for found, expected, bound in zip(grads(q, k, v), exact.grads, exact.grad_bounds, strict=True):
        assert found.dtype == dtype
        assert excess(wide(found), expected, bound) <= 1
        if not positive:  # on positive data dQ and dK are differences of nearly equal numbers
            assert sqnr(wide(found), expected) >= SQNR[dtype]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_bounds_beyond_the_tiles_of_a_fused_kernel(name: str, dtype: torch.dtype) -> None:
    q, k, v, d_out = tensors(dtype, B=1, H=2, G=1, Sq=601, Sk=601, D=32)
    out = IMPLEMENTATIONS[name](q, k, v, Mask())
    out.backward(d_out)
    exact = oracle(q, k, v, Mask(), d_out)
    assert excess(wide(out), exact.out, exact.out_bound) <= 1
    for found, expected, bound in zip(grads(q, k, v), exact.grads, exact.grad_bounds, strict=True):
        assert excess(wide(found), expected, bound) <= 1
        assert sqnr(wide(found), expected) >= SQNR[dtype]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (5, 9), (9, 5), (9, 1), (3, 0), (0, 3)])
@pytest.mark.parametrize("mask", [Mask(causal=False), Mask(), Mask(window=2)], ids=["full", "causal", "window"])
def test_lengths_that_differ_are_aligned_bottom_right(name: str, queries: int, keys: int, mask: Mask) -> None:
    q, k, v, d_out = tensors(torch.float32, Sq=queries, Sk=keys)
    out = IMPLEMENTATIONS[name](q, k, v, mask)
    out.backward(d_out)
    exact = oracle(q, k, v, mask, d_out)
    assert out.shape == q.shape
    assert excess(wide(out), exact.out, exact.out_bound) <= 1
    for found, expected, bound in zip(grads(q, k, v), exact.grads, exact.grad_bounds, strict=True):
        assert excess(wide(found), expected, bound) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [None, -0.7, 0.0])
def test_reference_with_lse_softcap_and_scale(
    dtype: torch.dtype, mask: Mask, softcap: float | None, scale: float | None
) -> None:
    q, k, v, d_out = tensors(dtype)
    d_lse = normal(2, 4, 65, seed=9)
    out, lse = reference(q, k, v, mask, scale=scale, softcap=softcap, return_lse=True)
    torch.autograd.backward((out, lse), (d_out, d_lse))
    exact = oracle(q, k, v, mask, d_out, d_lse, scale, softcap)
    assert lse.dtype == torch.float32
    assert excess(wide(out), exact.out, exact.out_bound) <= 1
    assert excess(wide(lse), exact.lse, exact.lse_bound) <= 1
    for found, expected, bound in zip(grads(q, k, v), exact.grads, exact.grad_bounds, strict=True):
        assert excess(wide(found), expected, bound) <= 1


# -------------------------------------------------------------------------------------------------------- lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [1, 2, 65])
@pytest.mark.parametrize("scale", [None, 50.0, 1500.0])
def test_lse_is_its_own_test(dtype: torch.dtype, keys: int, scale: float | None) -> None:
    # With one key out says nothing about base or scale; scores reach +-1e4.
    q, k, v, _ = tensors(dtype, Sq=3, Sk=keys)
    _, lse = reference(q, k, v, Mask(causal=False), scale=scale, return_lse=True)
    exact = oracle(q, k, v, Mask(causal=False), scale=scale)
    assert excess(wide(lse), exact.lse, exact.lse_bound) <= 1
    if keys == 1:
        group = wide(k).repeat(2, axis=1)
        assert np.allclose(wide(lse), (wide(q) * group).sum(-1) * (0.25 if scale is None else scale), rtol=1e-5)


def test_gradient_through_lse_alone_leaves_values_untouched() -> None:
    q, k, v, _ = tensors(torch.float32)
    d_lse = normal(2, 4, 65, seed=9)
    out, lse = reference(q, k, v, Mask(), return_lse=True)
    torch.autograd.backward((out, lse), (torch.zeros_like(out), d_lse))
    exact = oracle(q, k, v, Mask(), None, d_lse)
    dq, dk, dv = grads(q, k, v)
    assert not dv.any()
    assert excess(wide(dq), exact.grads[0], exact.grad_bounds[0]) <= 1
    assert excess(wide(dk), exact.grads[1], exact.grad_bounds[1]) <= 1


def test_two_halves_merge_by_their_lse() -> None:
    q, k, v, _ = tensors(torch.float32)
    whole = reference(q, k, v, Mask(causal=False))
    outs, lses = zip(
        *(
            reference(q, k[:, :, part], v[:, :, part], Mask(causal=False), return_lse=True)
            for part in (slice(0, 20), slice(20, None))
        ),
        strict=True,
    )
    weights = torch.softmax(torch.stack(lses), 0).unsqueeze(-1)
    assert torch.allclose((torch.stack(outs) * weights).sum(0), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_agree_with_differences_in_float64(softcap: float | None) -> None:
    q, k, v = (normal(1, h, s, 2, dtype=torch.float64, seed=h).requires_grad_() for h, s in ((2, 3), (1, 4), (1, 4)))

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = reference(q, k, v, Mask(window=2), softcap=softcap, return_lse=True)
        assert out.dtype == lse.dtype == torch.float64
        return out, lse

    assert torch.autograd.gradcheck(call, (q, k, v))


# ------------------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_rows_that_see_nothing(dtype: torch.dtype, window: int | None) -> None:
    q, k, v, d_out = tensors(dtype, Sq=9, Sk=5)
    out, lse = reference(q, k, v, Mask(window=window), return_lse=True)
    torch.autograd.backward((out, lse), (d_out, torch.ones_like(lse)))
    dq, dk, dv = grads(q, k, v)
    assert not out[:, :, :4].any()
    assert (lse[:, :, :4] == -torch.inf).all()
    assert lse[:, :, 4:].isfinite().all()
    assert not dq[:, :, :4].any()
    assert not any(x.isnan().any() for x in (out, lse, dq, dk, dv))
    # The blind rows give the keys nothing: the gradients are those of the seeing rows alone.
    alone = [x.detach().clone().requires_grad_() for x in (q[:, :, 4:], k, v)]
    seeing, its_lse = reference(*alone, Mask(window=window), return_lse=True)
    torch.autograd.backward((seeing, its_lse), (d_out[:, :, 4:], torch.ones_like(its_lse)))
    assert torch.allclose(dk, grads(alone[1])[0], rtol=2 * U[dtype], atol=1e-6)
    assert torch.allclose(dv, grads(alone[2])[0], rtol=2 * U[dtype], atol=1e-6)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_of_integers_are_exact(name: str, dtype: torch.dtype) -> None:
    # q = 0 weighs 64 keys by 1/64 each, so the mean of small integers is exact.
    q = torch.zeros(1, 2, 3, 8, dtype=dtype)
    k = normal(1, 1, 64, 8, dtype=dtype)
    v = torch.randint(-3, 4, (1, 1, 64, 8), generator=torch.Generator().manual_seed(1)).to(dtype)
    out = IMPLEMENTATIONS[name](q, k, v, Mask(causal=False))
    assert np.array_equal(wide(out), np.broadcast_to(wide(v).mean(2, keepdims=True), (1, 2, 3, 8)))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_each_head_reads_its_own_group(name: str, groups: int) -> None:
    q, k = normal(1, 8, 5, 4), normal(1, groups, 5, 4, seed=1)
    v = torch.arange(1.0, groups + 1).view(1, groups, 1, 1).expand(1, groups, 5, 4)
    out = IMPLEMENTATIONS[name](q, k, v, Mask())
    expected = torch.tensor([h // (8 // groups) + 1.0 for h in range(8)]).view(1, 8, 1, 1).expand_as(out)
    assert torch.allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [1, 2, 5, 8, 20])
def test_window_has_exactly_its_width(name: str, window: int) -> None:
    q, k = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8)
    v = torch.eye(8).view(1, 1, 8, 8)  # out[i, j] > 0 where query i sees key j
    out = IMPLEMENTATIONS[name](q, k, v, Mask(window=window))[0, 0]
    assert (out > 0).tolist() == [[i - window < j <= i for j in range(8)] for i in range(8)]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_segments_equal_runs_of_single_documents(name: str) -> None:
    q, k, v, d_out = tensors(torch.float32, B=1)
    lengths = [1, 17, 40, 7]
    segments = torch.repeat_interleave(torch.tensor([3, 1, 0, 2]), torch.tensor(lengths)).unsqueeze(0)
    attention = IMPLEMENTATIONS[name]
    out = attention(q, k, v, Mask(segments_BS=segments))
    out.backward(d_out)
    start = 0
    for length in lengths:
        part = slice(start, start := start + length)
        alone = [x.detach()[:, :, part].clone().requires_grad_() for x in (q, k, v)]
        its_out = attention(*alone, Mask())
        its_out.backward(d_out[:, :, part])
        assert torch.allclose(out[:, :, part], its_out, atol=1e-6)
        for packed, single in zip(grads(q, k, v), grads(*alone), strict=True):
            assert torch.allclose(packed[:, :, part], single, atol=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_future_and_other_documents_do_not_matter_to_a_bit(name: str) -> None:
    q, k, v, _ = (x.detach() for x in tensors(torch.float32))
    for mask, hidden in ((Mask(), 30), (Mask(segments_BS=SEGMENTS[:1].expand(2, -1)), 18)):
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, hidden:], other_v[:, :, hidden:] = 7.0, -3.0
        before, after = (IMPLEMENTATIONS[name](q, *kv, mask) for kv in ((k, v), (other_k, other_v)))
        assert torch.equal(before[:, :, :hidden], after[:, :, :hidden])


def test_segments_are_kept_in_the_mask_they_belong_to() -> None:
    mask = Mask(segments_BS=SEGMENTS)
    first = ops.visible_keys(mask, 65, 65, SEGMENTS.device)
    assert ops.visible_keys(mask, 65, 65, SEGMENTS.device) is first
    assert ops.visible_keys(Mask(causal=False, segments_BS=SEGMENTS), 65, 65, SEGMENTS.device) is not first
    assert first is not None
    assert np.array_equal(first[:, 0].numpy(), sees(mask, 2, 65, 65))


# ---------------------------------------------------------------------------------------- the bounds can fail


@pytest.mark.parametrize(
    "mutant",
    [
        {"head_of": lambda h: h % 2},
        {"mask": Mask(window=8)},
        {"mask": Mask(window=6)},
        {"mask": Mask()},
        {"scale": 0.26},
        {"softcap": 5.0},
    ],
    ids=["wrong group", "window + 1", "window - 1", "no window", "wrong scale", "undue softcap"],
)
def test_bounds_reject_mutants(mutant: dict[str, Any]) -> None:
    q, k, v, d_out = tensors(torch.bfloat16)
    right = oracle(q, k, v, Mask(window=7), d_out)
    wrong = oracle(q, k, v, **{"mask": Mask(window=7), "d_out": d_out, **mutant})
    assert excess(wrong.out, right.out, right.out_bound) > 2
    if "head_of" not in mutant:
        assert excess(wrong.grads[0], right.grads[0], right.grad_bounds[0]) > 2


def test_lse_bound_rejects_another_base() -> None:
    q, k, v, _ = tensors(torch.float32, Sk=1)
    right = oracle(q, k, v, Mask(causal=False))
    assert excess(right.lse / np.log(2), right.lse, right.lse_bound) > 1000


# --------------------------------------------------------------------------------------- interface and checks


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        (((1, 3, 2, 4), (1, 2, 2, 4)), {}, "3 query heads and 2 key/value heads"),
        (((1, 2, 2, 4), (2, 2, 2, 4)), {}, r"\(1, 2, 2, 4\).*\(2, 2, 2, 4\)"),
        (((1, 2, 2, 4), (1, 2, 2, 6)), {}, "head_dim; found 4 and 6"),
        (((2, 2, 4), (2, 2, 4)), {}, r"\(2, 2, 4\)"),
        (((1, 2, 2, 4),) * 2, {"mask": Mask(window=0)}, "window=0"),
        (((1, 2, 2, 4),) * 2, {"mask": Mask(causal=False, window=3)}, "causal=False, window=3"),
        (((1, 2, 2, 4), (1, 2, 3, 4)), {"mask": Mask(segments_BS=torch.zeros(1, 2))}, "2 queries and 3 keys"),
        (((1, 2, 2, 4),) * 2, {"mask": Mask(segments_BS=torch.zeros(3, 2))}, r"segments \(3, 2\), batch 1"),
    ],
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_calls_that_do_not_fit_raise(name: str, shapes, options: dict[str, Any], words: str) -> None:
    q, k = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=words):
        IMPLEMENTATIONS[name](q, k, k, options.get("mask", Mask()))


def test_other_calls_that_do_not_fit_raise() -> None:
    q = torch.zeros(1, 2, 2, 4)
    with pytest.raises(ValueError, match="softcap"):
        reference(q, q, q, Mask(), softcap=0.0)
    with pytest.raises(ValueError, match=r"torch.float32.*torch.bfloat16"):
        reference(q, q, q.bfloat16(), Mask())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_candidate_supports_what_the_fused_kernel_does(dtype: str) -> None:
    assert supports(Request("attention", dtype, needs=frozenset({"causal", "gqa", "segments", "window"})))


@pytest.mark.parametrize(
    ("dtype", "need", "words"),
    [
        ("float32", "lse", "softmax sum"),
        ("float32", "softcap", "cap"),
        ("float32", "sinks", "sinks"),
        ("float8_e5m2", "causal", "float8_e5m2"),
    ],
)
def test_candidate_gives_a_reason(dtype: str, need: str, words: str) -> None:
    answer = supports(Request("attention", dtype, needs=frozenset({need})))
    assert not answer
    assert words in answer.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_candidate_runs_on_the_fused_kernel(dtype: torch.dtype, groups: int) -> None:
    q, k, v, d_out = tensors(dtype, G=groups)
    for mask in MASKS.values():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where the kernel doesn't apply
            sdpa(q, k, v, mask).backward(d_out)


def test_candidate_repeats_itself_bit_by_bit() -> None:
    q, k, v, d_out = tensors(torch.float32, B=6)
    torch.set_num_threads(2)
    runs = []
    for _ in range(5):
        for x in (q, k, v):
            x.grad = None
        out = sdpa(q, k, v, Mask())
        out.backward(d_out)
        runs.append((out, *grads(q, k, v)))
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


def test_cpu_attention_takes_the_reference_where_the_kernel_lacks_something() -> None:
    q, k, v, _ = tensors(torch.float32)
    attention = CpuAttention()
    out, lse = attention.attention(q, k, v, Mask(), return_lse=True)
    assert torch.allclose(out, sdpa(q, k, v, Mask()), atol=1e-6)
    assert lse.shape == (2, 4, 65)
    capped = attention.attention(q, k, v, Mask(), softcap=1.0)
    assert torch.equal(capped, reference(q, k, v, Mask(), softcap=1.0))  # pyright: ignore[reportArgumentType]
    for lacking in (
        lambda: sdpa(q, k, v, Mask(), softcap=1.0),
        lambda: sdpa(q, k, v, Mask(), return_lse=True),
    ):
        with pytest.raises(Unsupported, match="portable reference"):
            lacking()
    (candidate,) = attention.implementations()
    assert (candidate.op, candidate.name, candidate.load()) == ("attention", "sdpa", sdpa)
    assert PortableAttention().implementations() == ()
