"""ATT: attention: ``Attention.attention`` of the backend and every implementation of the op.

Formulae of the bounds: ``oracle/attention.py``. Sequences of different lengths in one batch are segment ids here, not
offsets; attention has no dropout of its own, so the test of dropout is one of the op ``dropout``.

A non-finite key or value may reach queries that do not see it (0 * inf), so what must not leak is tried with finite
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelbridge.backend import Mask, Request
from accelbridge.conformance.bench import Bench
from accelbridge.conformance.oracle import dropout as dropout_oracle
from accelbridge.conformance.oracle.attention import Exact, Rules
from accelbridge.conformance.oracle.matmul import ROUNDOFF, Arithmetic
from accelbridge.conformance.registry import case
from accelbridge.conformance.suite.matmul import TYPED

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SQNR_DB = {BF16: 45.0, F16: 62.0, F32: 100.0}
"""Floors for outputs and gradients. A kernel that rounds softmax and its gradient to bfloat16 leaves 52 to 54 dB, one
with them in fp8 35 and less; TF32 leaves 65."""


@dataclass(frozen=True)
class _Call:
    """One call on host tensors, and what is right."""

    q: Tensor
    k: Tensor
    v: Tensor
    rules: Rules
    exact: Exact

    def mask(self, t: Bench) -> Mask:
        segments = self.rules.segments
        return Mask(self.rules.causal, self.rules.window, None if segments is None else t.put(segments))

    def needs(self, lse: bool) -> frozenset[str]:
        rules = self.rules
        found = {
            "causal": rules.causal,
            "window": rules.window is not None,
            "segments": rules.segments is not None,
            "softcap": rules.softcap is not None,
            "lse": lse,
            "gqa": self.q.shape[1] != self.k.shape[1],
        }
        return frozenset(need for need, asked in found.items() if asked)

    def run(self, t: Bench, call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``out`` of tensors of the device."""
        rules = self.rules
        return t.run(call, q, k, v, self.mask(t), scale=rules.scale, softcap=rules.softcap)

    def run_lse(self, t: Bench, call: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``out`` and ``lse`` of tensors of the device."""
        rules = self.rules
        return t.run(call, q, k, v, self.mask(t), scale=rules.scale, softcap=rules.softcap, return_lse=True)


def _call(t: Bench, q: Tensor, k: Tensor, v: Tensor, **rules: Any) -> _Call:
    facts, made = t.capabilities.facts, Rules(**rules)
    named = facts.get("attention.probabilities")
    unit = ROUNDOFF.get(getattr(torch, str(named), None)) if named else None  # pyright: ignore[reportArgumentType]
    return _Call(q, k, v, made, Exact(q, k, v, made, Arithmetic.declared(facts), unit))


def _normal(
    t: Bench,
    queries: int,
    keys: int,
    dim: int,
    *,
    batch: int = 2,
    heads: int = 2,
    groups: int = 2,
    dtype: torch.dtype = F32,
    **rules: Any,
) -> _Call:
    """Standard normal q, k and v."""
    q = t.normal(batch, heads, queries, dim, name="q", dtype=dtype)
    k, v = (t.normal(batch, groups, keys, dim, name=name, dtype=dtype) for name in ("k", "v"))
    return _call(t, q, k, v, **rules)


def _kernels(t: Bench, call: _Call, lse: bool = False) -> list[tuple[str, Callable[..., Any]]]:
    """Every implementation that serves ``call``, by a name that says the call."""
    q, k = call.q, call.k
    shape = {"head_dim": q.shape[3], "heads": q.shape[1], "kv_heads": k.shape[1], "sequence": k.shape[2]}
    dtype = str(q.dtype).removeprefix("torch.")
    request = Request("attention", dtype, shape, needs=call.needs(lse))
    text = f"{dtype} Sq {q.shape[2]}, Sk {k.shape[2]}, D {q.shape[3]}"
    return [(f"{name} {text}", kernel) for name, kernel in t.candidates(request)]


def _dtypes(t: Bench) -> tuple[torch.dtype, ...]:
    for name in ("bfloat16", "float32"):
        t.require("attention", name)
    return (BF16, F32, F16) if t.supported("attention", "float16") else (BF16, F32)


def _put(t: Bench, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    return t.put(call.q), t.put(call.k), t.put(call.v)


def _leaves(t: Bench, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _put(t, call)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _forward(t: Bench, call: _Call, what: str = "") -> None:
    """Output of every implementation, and lse of those that return it, within their bounds."""
    for name, kernel in _kernels(t, call):
        out = call.run(t, kernel, *_put(t, call))
        t.within(out, call.exact.out, call.exact.out_bound, name=f"out of {name} {what}".strip())
    for name, kernel in _kernels(t, call, lse=True):
        out, lse = call.run_lse(t, kernel, *_put(t, call))
        t.within(out, call.exact.out, call.exact.out_bound, name=f"out of {name} {what}, with lse".strip())
        t.within(lse, call.exact.lse, call.exact.lse_bound, name=f"lse of {name} {what}".strip())
        t.same(str(lse.dtype), "torch.float32", "dtype of lse")


def _backward(t: Bench, call: _Call, dout: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(name, gradient on the device, exact gradient, bound) of dq, dk and dv in every implementation."""
    want = call.exact.gradients(dout)
    for name, kernel in _kernels(t, call):
        leaves = _leaves(t, call)
        found = t.run(torch.autograd.grad, call.run(t, kernel, *leaves), leaves, t.put(dout))
        for got, (what, (exact, bound)) in zip(found, want.items(), strict=True):
            yield f"{what} of {name}", got, exact, bound


def _floor(t: Bench, dtype: torch.dtype) -> float:
    """SQNR that a good kernel reaches; with float32 inputs in TF32, as declared, little more than float16 does."""
    tf32 = dtype == F32 and Arithmetic.declared(t.capabilities.facts).operand > 0.0
    return SQNR_DB[F16] - 6.0 if tf32 else SQNR_DB[dtype]


def _by_head(x: Tensor) -> Tensor:
    """[B, H, S, D] as one row per head of a sequence."""
    return x.reshape(x.shape[0] * x.shape[1], -1)


# ----------------------------------------------------------------------------------------------------- forward


@case("ATT-001", "core", timeout_s=180.0)
def forward_bound(t: Bench) -> None:
    """Every element of the output is within the bound, without a mask, for head dimensions from 32 to 256.

    Lengths 1, 2, 17, 64, 127, 129 and 1024: one key, an odd tail, one short of a tile and one more, more keys and
    queries than any tile has.
    """
    shapes = ((1, 1, 64), (2, 17, 32), (64, 64, 80), (127, 129, 128), (17, 1024, 96), (129, 2, 256), (1, 127, 64))
    for queries, keys, dim in (*shapes, (1024, 320, 64)):
        for dtype in _dtypes(t) if queries < 1024 else (BF16,):
            call = _normal(t, queries, keys, dim, dtype=dtype, batch=1)
            for name, kernel in _kernels(t, call):
                t.within(call.run(t, kernel, *_put(t, call)), call.exact.out, call.exact.out_bound, name=name)


@case("ATT-002", "core")
def causal(t: Bench) -> None:
    """A causal mask over equal lengths: the bound holds, and what lies after a query changes none of its bits.

    160 positions, and key and value changed from position 100 on.
    """
    for dtype in _dtypes(t):
        call = _normal(t, 160, 160, 64, dtype=dtype, causal=True)
        _forward(t, call)
        k, v = call.k.clone(), call.v.clone()
        k[:, :, 100:] = 3.0
        v[:, :, 100:] *= -7.0
        for name, kernel in _kernels(t, call):
            before = call.run(t, kernel, *_put(t, call)).to("cpu")
            after = call.run(t, kernel, t.put(call.q), t.put(k), t.put(v))
            t.equal(after[:, :, :100], before[:, :, :100].contiguous(), name=f"{name}, later keys changed")


@case("ATT-003", "core")
def causal_alignment(t: Bench) -> None:
    """A causal mask over different lengths is aligned bottom-right: the last query sees the last key.

    40 queries of 200 keys, 1 of 130, and 150 of 70, of which the first 80 see nothing.
    """
    for dtype in (BF16, F32):
        for queries, keys in ((40, 200), (1, 130), (150, 70)):
            _forward(t, _normal(t, queries, keys, 64, dtype=dtype, causal=True))


@case("ATT-004", "core")
def blind_rows(t: Bench) -> None:
    """Queries that see nothing give 0 and -inf, and neither they nor what they do not see get a gradient; no NaN.

    20 queries of 5 keys under a causal mask, so that the first 15 are blind.
    """
    for dtype in (BF16, F32):
        call = _normal(t, 20, 5, 64, dtype=dtype, causal=True)
        dout = t.normal(*call.q.shape, name="dout", dtype=dtype)
        _forward(t, call)
        for name, got, exact, bound in _backward(t, call, dout):
            t.within(got, exact, bound, name=name)
            if name.startswith("dq"):
                t.within(got[:, :, :15], torch.zeros_like(exact[:, :, :15]), 0.0, "EXACT", f"{name}, blind rows")
        dlse = t.normal(*call.exact.lse.shape, name="dlse")
        want = call.exact.gradients(dout, dlse.where(call.exact.lse.isfinite(), 0.0))
        for name, kernel in _kernels(t, call, lse=True):
            leaves = _leaves(t, call)
            found = t.run(torch.autograd.grad, call.run_lse(t, kernel, *leaves), leaves, (t.put(dout), t.put(dlse)))
            for got, (what, (exact, bound)) in zip(found, want.items(), strict=True):
                t.within(got, exact, bound, name=f"{what} of {name}, with lse")


@case("ATT-005", "core")
def logsumexp(t: Bench) -> None:
    """lse is within its bound: one key, several tiles of keys, scores beyond 1e4, and scales of its own.

    Natural logarithm, of scaled scores, in float32 whatever the inputs are.
    """
    for dtype in _dtypes(t):
        for queries, keys, size, scale in (
            (3, 1, 1.0, None),
            (33, 300, 1.0, 0.3),
            (33, 300, 8.0, None),
            (5, 129, 1e4, 1.0),
        ):
            call = _normal(t, queries, keys, 64, dtype=dtype)
            call = _call(t, (call.q.double() * size / max(1.0, size / 400.0)).to(dtype), call.k, call.v, scale=scale)
            for name, kernel in _kernels(t, call, lse=True):
                lse = call.run_lse(t, kernel, *_put(t, call))[1]
                t.within(lse, call.exact.lse, call.exact.lse_bound, name=f"{name}, q times {size:g}")
                t.same(str(lse.dtype), "torch.float32", "dtype of lse")


@case("ATT-006", "core")
def every_key_counts(t: Bench) -> None:
    """With equal scores the output is the exact mean of 1024 values, so that no key is lost or counted twice.

    Values are multiples of unit vectors, along j mod D and along j div (1024 / D): a tile that is left out shows in one
    of the two. Each mean is a small integer over D, which bfloat16 holds.
    """
    keys, dim = 1024, 64
    j = torch.arange(keys)
    for pattern, column in {"j mod D": j % dim, "j div 16": j // (keys // dim)}.items():
        v = torch.zeros(1, 2, keys, dim)
        v[:, 0, j, column] = 1.0 + (column % 7)
        v[:, 1, j, column] = -2.0 - (column % 5)
        for dtype in _dtypes(t):
            k = t.normal(1, 2, keys, dim, name="k", dtype=dtype)
            call = _call(t, torch.zeros(1, 2, 9, dim, dtype=dtype), k, v.to(dtype))
            want = v.double().mean(2, keepdim=True).expand(1, 2, 9, dim).to(dtype)
            for name, kernel in _kernels(t, call):
                t.equal(call.run(t, kernel, *_put(t, call)), want.contiguous(), name=f"{name}, {pattern}")


@case("ATT-007", "train")
def grouped_heads(t: Bench) -> None:
    """Of H query heads and G key/value heads, head h reads key and value head h // (H / G), for H / G of 1, 2, 4 and 8.

    In each group another key has a score that leaves the rest nothing, and each value is a number of its own, so that
    the output names key head and value head exactly.
    """
    heads, keys, dim = 8, 12, 32
    for groups in (8, 4, 2, 1):
        head = torch.arange(heads) // (heads // groups)
        k = torch.zeros(2, groups, keys, dim)
        for group in range(groups):
            k[:, group, group + 3, 0] = 64.0
        v = (torch.arange(groups)[:, None] * keys + torch.arange(keys)).float()[None, :, :, None].expand(2, -1, -1, dim)
        q = torch.zeros(2, heads, 5, dim)
        q[..., 0] = 64.0
        want = (head * keys + head + 3).float()[None, :, None, None].expand(2, heads, 5, dim).contiguous()
        for dtype in _dtypes(t):
            call = _call(t, q.to(dtype), k.to(dtype), v.to(dtype).contiguous())
            for name, kernel in _kernels(t, call):
                got = call.run(t, kernel, *_put(t, call))
                t.equal(got, want.to(dtype), name=f"{name}, {groups} of {heads} heads")
    # One key/value head per query head makes the same answer of each mapping; a random one is no such case.
    _forward(t, _normal(t, 65, 65, 32, heads=8, groups=2, dtype=BF16, causal=True))


# ---------------------------------------------------------------------------------------------------- backward


@case("ATT-008", "train", timeout_s=180.0)
def backward(t: Bench) -> None:
    """dQ, dK and dV are within their bounds and have the SQNR of a good kernel in every head.

    With and without a causal mask, 96 and 1024 keys: over 1024 keys without a mask, a dK that lacks the term
    rowsum(dO O) is within the bound and only the SQNR shows it.
    """
    for queries, keys, is_causal in ((96, 96, False), (130, 130, True), (40, 200, True), (64, 1024, False)):
        for dtype in _dtypes(t) if keys == 130 else (BF16, F32):
            call = _normal(t, queries, keys, 64, batch=1, dtype=dtype, causal=is_causal)
            dout = t.normal(*call.q.shape, name="dout", dtype=dtype)
            for name, got, exact, bound in _backward(t, call, dout):
                t.within(got, exact, bound, name=name)
                t.sqnr(_by_head(got), _by_head(exact), _floor(t, dtype), name=name)


@case("ATT-009", "train")
def grouped_gradients(t: Bench) -> None:
    """dK and dV of a key/value head are the sums over the query heads that read it, for 2, 4 and 8 of them."""
    for groups in (4, 2, 1):
        for dtype in (BF16, F32):
            call = _normal(t, 64, 64, 32, heads=8, groups=groups, dtype=dtype, causal=groups != 2)
            dout = t.normal(*call.q.shape, name="dout", dtype=dtype)
            for name, got, exact, bound in _backward(t, call, dout):
                t.within(got, exact, bound, name=f"{name}, {groups} of 8 heads")
                t.sqnr(_by_head(got), _by_head(exact), _floor(t, dtype), name=f"{name}, {groups} of 8 heads")


@case("ATT-010", "train")
def gradient_through_lse(t: Bench) -> None:
    """A loss of lse alone gives dQ and dK within their bounds and dV exactly 0; with a loss of the output besides, the
    gradients add up."""
    for dtype in (BF16, F32):
        for is_causal in (False, True):
            call = _normal(t, 48, 130, 32, heads=4, dtype=dtype, causal=is_causal)
            dlse = t.normal(*call.q.shape[:3], name="dlse")
            for dout in (torch.zeros_like(call.q), t.normal(*call.q.shape, name="dout", dtype=dtype)):
                want = call.exact.gradients(dout, dlse)
                for name, kernel in _kernels(t, call, lse=True):
                    leaves = _leaves(t, call)
                    out = call.run_lse(t, kernel, *leaves)
                    found = t.run(torch.autograd.grad, out, leaves, (t.put(dout), t.put(dlse)))
                    for got, (what, (exact, bound)) in zip(found, want.items(), strict=True):
                        t.within(got, exact, bound, name=f"{what} of {name}, causal {is_causal}")


# ---------------------------------------------------------------------------------------- segments and windows


def _segments(*lengths: int) -> Tensor:
    """Ids of documents of these lengths, one after the other; a document of no tokens leaves its id out."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


_DOCUMENTS = torch.stack([_segments(1, 0, 17, 65, 0, 47), _segments(64, 1, 1, 0, 64, 0)])
"""Two sequences of 130 positions, the second without a remainder of a tile."""


@case("ATT-011", "train")
def segments(t: Bench) -> None:
    """Each document of a packed sequence comes out as it would alone, and its neighbours change none of its bits.

    Documents of 0, 1, 17, 47, 64 and 65 tokens, with and without a causal mask; equal ids that do not stand together
    see each other.
    """
    scattered = torch.stack([torch.arange(130) % 3, torch.arange(130) // 50 % 2])
    for dtype in (BF16, F32):
        for is_causal in (False, True):
            call = _normal(t, 130, 130, 32, heads=4, dtype=dtype, causal=is_causal, segments=_DOCUMENTS)
            _forward(t, call, f"causal {is_causal}")
            _neighbours(t, call)
    _forward(t, _normal(t, 130, 130, 32, dtype=F32, causal=False, segments=scattered), "scattered")
    _forward(t, _normal(t, 130, 130, 32, dtype=F32, causal=True, window=9, segments=_DOCUMENTS), "window")


def _neighbours(t: Bench, call: _Call) -> None:
    own = _DOCUMENTS[0] == 2
    k, v = call.k.clone(), call.v.clone()
    k[0, :, ~own] = 3.0
    v[0, :, ~own] *= -100.0
    for name, kernel in _kernels(t, call):
        before = call.run(t, kernel, *_put(t, call)).to("cpu")
        after = call.run(t, kernel, t.put(call.q), t.put(k), t.put(v))
        t.equal(after[0][:, 1:18], before[0][:, 1:18].contiguous(), name=f"{name}, neighbours changed")


@case("ATT-012", "train")
def segment_gradients(t: Bench) -> None:
    """Gradients of packed documents are within their bounds, and a loss of one document gives the others exactly 0."""
    own = _DOCUMENTS[0] == 2
    for dtype in (BF16, F32):
        for is_causal in (False, True):
            call = _normal(t, 130, 130, 32, heads=4, dtype=dtype, causal=is_causal, segments=_DOCUMENTS)
            dout = t.normal(*call.q.shape, name="dout", dtype=dtype)
            for name, got, exact, bound in _backward(t, call, dout):
                t.within(got, exact, bound, name=f"{name}, causal {is_causal}")
            dout[:, :, ~own] = 0.0
            dout[1] = 0.0
            for name, got, exact, bound in _backward(t, call, dout):
                t.within(got, exact, bound, name=f"{name}, one document")
                others = got[0][:, 18:]
                t.within(others, torch.zeros(others.shape), 0.0, "EXACT", f"{name}, the other documents")


@case("ATT-013", "train")
def bad_masks(t: Bench) -> None:
    """Segment ids of another batch or length, or where queries and keys differ in number, and windows that cannot be,
    raise an error with a type of its own."""
    call = _normal(t, 12, 12, 32, segments=torch.arange(12).expand(2, 12) // 5)
    ids = call.rules.segments
    assert ids is not None
    more = [Mask(False, None, t.put(x)) for x in (ids[:1], ids[:, :11], ids[0], torch.arange(13).expand(2, 13))]
    q, k, v = _put(t, call)
    for _, kernel in _kernels(t, call):
        for mask in (*more, Mask(True, 0), Mask(True, -3), Mask(False, 4)):
            t.raises(TYPED, kernel, q, k, v, mask)
        t.raises(TYPED, kernel, q[:, :, :7], k, v, Mask(False, None, t.put(ids)))
        t.raises(TYPED, kernel, q[:, :, :7], k, v, Mask(False, None, t.put(ids[:, :7])))
    _forward(t, call, "after errors")


@case("ATT-014", "train")
def window_edges(t: Bench) -> None:
    """A window sees exactly its own number of positions, the query's own one among them, at both of its edges.

    Windows of 1, 2, 64, 100 and more than all, 150 queries of 150 and 40 of 150 keys. Three keys have scores that leave
    the others nothing, so that a row that sees one of them too many or too few is another row.
    """
    for dtype in (BF16, F32):
        for queries, window in ((150, 1), (150, 2), (150, 64), (40, 64), (40, 100), (150, 500)):
            call = _normal(t, queries, 150, 32, dtype=dtype)
            q, k = call.q.clone(), call.k.clone()
            q[..., 0] = 40.0
            k[..., 0] = 0.0
            k[:, :, [5, 75, 120], 0] = torch.tensor([100.0, 60.0, 30.0], dtype=dtype)
            _forward(t, _call(t, q, k, call.v, causal=True, window=window), f"window {window}")


# ------------------------------------------------------------------------------------------------------ options


@case("ATT-015", "train")
def scale_and_cap(t: Bench) -> None:
    """A scale of 0, a negative and a large one are honoured, the default is D^-1/2, and a cap bends the scores.

    Output, lse and gradients; softcap s is s tanh(score / s).
    """
    options: list[dict[str, Any]] = [{"scale": 0.0}, {"scale": -0.3}, {"scale": 1.7}, {}]
    options += [{"softcap": 1.5}, {"softcap": 3.0, "scale": 0.5}]
    for dtype in (BF16, F32):
        for rules in options:
            call = _normal(t, 33, 150, 64, dtype=dtype, causal=True, **rules)
            _forward(t, call, str(rules))
            dout = t.normal(*call.q.shape, name="dout", dtype=dtype)
            for name, got, exact, bound in _backward(t, call, dout):
                t.within(got, exact, bound, name=f"{name} {rules}")


@case("ATT-016", "train")
def dropout(t: Bench) -> None:
    """Dropout drops the elements that its keys say, forward and backward alike, at its rate, and keeps the mean.

    Attention here has no dropout of its own; this is the op ``dropout``, whose mask is a function of keys, site and
    coordinates: the same keys give the same mask, a slice that says where it starts the mask of the whole.
    """
    keys = t.integers(3, low=-(2**31), high=2**31 - 1, name="keys", dtype=torch.int32)
    site = 77
    for dtype in (BF16, F32):
        x, g = t.uniform(3, 70, 90, name="x").add(0.5).to(dtype), t.normal(3, 70, 90, name="g", dtype=dtype)
        for name, call in t.candidates(
            Request("dropout", str(dtype).removeprefix("torch."), {"dim": 90, "sequence": 70})
        ):
            for p in (0.1, 0.5, 0.9):
                kept = dropout_oracle.kept(keys, site, p, (3, 70, 90))
                leaf = t.put(x).requires_grad_()
                out = t.run(call, leaf, t.put(keys), t.put(torch.tensor(site, dtype=torch.int32)), p)
                (back,) = t.run(torch.autograd.grad, out, leaf, t.put(g))
                _dropped(t, out, x, kept, p, f"{name} {dtype}, p {p}")
                _dropped(t, back, g, kept, p, f"gradient of {name} {dtype}, p {p}")
                _rate(t, t.fetch(out), p, name)
            slice_ = (t.put(x[:, 20:50, 30:]), t.put(keys), t.put(torch.tensor(site, dtype=torch.int32)), 0.5, (20, 30))
            kept = dropout_oracle.kept(keys, site, 0.5, (3, 70, 90))[:, 20:50, 30:]
            _dropped(t, t.run(call, *slice_), x[:, 20:50, 30:], kept, 0.5, f"{name} {dtype}, a slice")


def _dropped(t: Bench, got: Tensor, x: Tensor, kept: Tensor, p: float, name: str) -> None:
    """``got`` is 0 exactly where dropped, elsewhere x / (1 - p) but for a rounding of the factor and one of the
    product."""
    want = torch.where(kept, x.double() / (1.0 - p), 0.0)
    t.within(got, want, want.abs() * (2.0 * ROUNDOFF[x.dtype] + 2.0**-23), name=name)


def _rate(t: Bench, out: Tensor, p: float, name: str) -> None:
    """Share of kept elements, and the mean of what was uniform in [0.5, 1.5), within 5 standard deviations."""
    n = out.numel()
    t.at_most(
        abs(float((out != 0).double().mean()) - (1 - p)), 5 * (p * (1 - p) / n) ** 0.5, f"rate off, {name}, p {p}"
    )
    spread = ((1.0 + 1 / 12) / (1 - p) - 1.0) ** 0.5  # of x kept / (1 - p), as E x = 1 and E x^2 = 1 + 1/12
    t.at_most(abs(float(out.double().mean()) - 1.0), 5 * spread / n**0.5 + 2.0**-9, f"mean off, {name}, p {p}")


@case("ATT-018", "train")
def signal_to_noise(t: Bench) -> None:
    """SQNR of output, dQ, dK and dV in every head of every sequence is at least 45 dB in bfloat16, 62 in float16 and
    100 in float32, and that of every row of the output at most 10 dB less.

    1024 queries of 192 keys, and 200 of 200 under a causal mask: of 1024 rows, one that is 0 leaves 30 dB of the whole.
    """
    for queries, keys, is_causal in ((1024, 192, False), (200, 200, True)):
        for dtype in _dtypes(t):
            floor = _floor(t, dtype)
            call = _normal(t, queries, keys, 64, dtype=dtype, causal=is_causal)
            for name, kernel in _kernels(t, call):
                out = call.run(t, kernel, *_put(t, call))
                t.sqnr(_by_head(out), _by_head(call.exact.out), floor, name=f"out of {name}")
                t.sqnr(out, call.exact.out, floor - 10.0, name=f"rows of {name}")
            for name, got, exact, _ in _backward(t, call, t.normal(*call.q.shape, name="dout", dtype=dtype)):
                t.sqnr(_by_head(got), _by_head(exact), floor, name=name)


# ------------------------------------------------------------------------------------- layouts, edges and errors


def _packed(t: Bench, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of one tensor [B, S, 3, H, D], as one projection leaves them."""
    whole = torch.stack([x.transpose(1, 2) for x in (call.q, call.k, call.v)], dim=2)
    q, k, v = t.put(whole.contiguous()).unbind(2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _offset(t: Bench, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v one element into their memory, with 3 elements of something else at the end of each row."""

    def lay(x: Tensor) -> Tensor:
        wide = torch.full((*x.shape[:3], x.shape[3] + 4), 50.0, dtype=x.dtype)
        wide[..., 1:-3] = x
        return t.put(wide)[..., 1:-3]

    return lay(call.q), lay(call.k), lay(call.v)


def _swapped(t: Bench, call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as [B, S, H, D] in memory."""
    q, k, v = (t.put(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in (call.q, call.k, call.v))
    return q, k, v


@case("ATT-019", "train")
def strides(t: Bench) -> None:
    """Views of one packed projection, [B, S, H, D] in memory, odd offsets and a gradient in another order: output and
    gradients within the same bounds as of contiguous tensors."""
    for dtype in (BF16, F32):
        call = _normal(t, 70, 70, 32, heads=4, groups=4, dtype=dtype, causal=True)
        dout = t.normal(*call.q.shape, name="dout", dtype=dtype)
        want = call.exact.gradients(dout)
        for layout, lay in {"packed": _packed, "swapped": _swapped, "offset": _offset}.items():
            for name, kernel in _kernels(t, call):
                leaves = tuple(x.detach().requires_grad_() for x in lay(t, call))
                out = call.run(t, kernel, *leaves)
                t.within(out, call.exact.out, call.exact.out_bound, name=f"out of {name}, {layout}")
                strided = t.put(dout.transpose(1, 2).contiguous()).transpose(1, 2)
                found = t.run(torch.autograd.grad, out, leaves, strided)
                for got, (what, (exact, bound)) in zip(found, want.items(), strict=True):
                    t.within(got, exact, bound, name=f"{what} of {name}, {layout}")


@case("ATT-020", "train")
def non_finite(t: Bench) -> None:
    """A NaN in a key or value reaches every query that sees it: none of them comes out finite.

    A causal mask with the NaN at position 20 of 90. Queries that do not see it are free: some kernels
    multiply what is masked by 0.
    """
    for dtype in _dtypes(t):
        call = _normal(t, 90, 90, 32, dtype=dtype, causal=True)
        for what in ("key", "value"):
            k, v = call.k.clone(), call.v.clone()
            (k if what == "key" else v)[:, :, 20] = torch.nan
            want = torch.full((2, 2, 70, 32), torch.nan, dtype=torch.float64)
            for name, kernel in _kernels(t, call):
                out = call.run(t, kernel, t.put(call.q), t.put(k), t.put(v))
                t.within(out[:, :, 20:], want, 0.0, "EXACT", f"{name}, NaN in a {what}")
        _forward(t, call, "without NaN")


@case("ATT-022", "train")
def combine(t: Bench) -> None:
    """The outputs over two parts of the keys, put together by their lse, are the output over all of them.

    What attention over a sequence that is spread over devices relies on. float32, to 1e-5 absolutely and relatively.
    """
    for split in (1, 64, 100):
        call = _normal(t, 40, 150, 64)
        parts = [_call(t, call.q, call.k[:, :, at], call.v[:, :, at]) for at in (slice(split), slice(split, None))]
        for name, kernel in _kernels(t, call, lse=True):
            (o1, l1), (o2, l2) = (part.run_lse(t, kernel, *_put(t, part)) for part in parts)
            lse = torch.logaddexp(l1, l2)
            out = o1 * (l1 - lse).exp().unsqueeze(-1) + o2 * (l2 - lse).exp().unsqueeze(-1)
            t.within(lse, call.exact.lse, 1e-5 + 1e-5 * call.exact.lse.abs(), name=f"lse of {name}, {split} keys first")
            t.within(out, call.exact.out, 1e-5 + 1e-5 * call.exact.out.abs(), name=f"{name}, {split} keys first")


@case("ATT-023", "train")
def empty(t: Bench) -> None:
    """No batch or no queries give an empty result; no keys give 0 and -inf; gradients are 0 or empty."""
    for batch, queries, keys in ((0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)):
        for is_causal in (False, True):
            call = _normal(t, queries, keys, 32, batch=batch, dtype=BF16, causal=is_causal)
            text = f"batch {batch}, causal {is_causal}"
            zeros = torch.zeros_like(call.q, dtype=torch.float64)
            for name, kernel in _kernels(t, call):
                leaves = _leaves(t, call)
                out = call.run(t, kernel, *leaves)
                t.within(out, zeros, 0.0, "EXACT", f"{name}, {text}")
                for got, leaf in zip(t.run(torch.autograd.grad, out, leaves, t.put(call.q)), leaves, strict=True):
                    t.within(got, torch.zeros(leaf.shape), 0.0, "EXACT", f"gradient of {name}, {text}")
            for name, kernel in _kernels(t, call, lse=True):
                out, lse = call.run_lse(t, kernel, *_put(t, call))
                t.within(out, zeros, 0.0, "EXACT", f"{name}, {text}, with lse")
                t.equal(lse, torch.full(call.q.shape[:3], -torch.inf), "EXACT", f"lse of {name}, {text}")
    _forward(t, _normal(t, 5, 7, 32, dtype=BF16), "something")


@case("ATT-024", "train")
def bad_shapes(t: Bench) -> None:
    """Two dtypes, two devices, a head dimension or length of k that is not that of q or v, and query heads that are no
    multiple of the key/value heads raise an error with a type of its own."""
    call = _normal(t, 9, 9, 32, heads=4, groups=2)
    q, k, v = _put(t, call)
    for _, kernel in _kernels(t, call):
        for bad in (
            (q.to(BF16), k, v),
            (q, k, v.to(BF16)),
            (q, k.to("meta"), v),
            (q[..., :16], k, v),
            (q, k[:, :, :8], v),
            (q[:, :3], k, v),
            (q, k[:, :1].expand(2, 3, 9, 32), v[:, :1].expand(2, 3, 9, 32)),
            (q[0], k[0], v[0]),
            (q[:1], k, v),
        ):
            t.raises(TYPED, kernel, *bad, Mask(False))
        t.raises(TYPED, kernel, q, k, v, Mask(False), softcap=-1.0)
    _forward(t, call, "after errors")
