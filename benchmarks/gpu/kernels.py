"""Every family of portable kernels beside its floor, and beside the other candidates for the same work.

The floor of a piece of work is the time in which the chip could move the bytes that it must move, or do the operations
that it must do, whichever takes longer, at the figures of its datasheet (the chip's peaks, and its fact
``memory.bandwidth``). Candidates are those of the backend that serve the request, the portable reference, and the
reference compiled; a copy of the input stands beside what only moves memory. They take turns on inputs that rotate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from arms import Ratio, head, row
from gpu.attention import Case, pairs
from gpu.attention import _case as attention_case
from gpu.bench import UNKNOWN, Bench, rotating, sqnr_db
from gpu.gemm import SCALINGS, milliseconds, number, ratio
from gpu.timing import Calls, Timing, copies_for
from torch import Tensor

from accelbridge import ops
from accelbridge.backend import Implementation, Mask, Request
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.quantized import block_counts
from accelbridge.precision.recipe import VARIANTS
from accelbridge.precision.scalings import SCALINGS as KINDS

TITLE = "Kernels, beside their floors"
COPY, REFERENCE, COMPILED = "copy", "reference", "reference, compiled"
BYTES = 2
"""Of an element of bfloat16, in which all of it is asked."""


@dataclass(frozen=True)
class Work:
    """One thing to do, in all the ways that there are to do it."""

    what: str
    size: str
    bytes: float
    """That it must move between the device and its memory."""
    flops: float
    """That it must do."""
    dtype: str
    """Of its operations, as the chip's peaks name it."""
    inputs: Callable[[], tuple[Tensor, ...]]
    ways: dict[str, Callable[..., object]] = field(default_factory=dict)
    exact: bool = True
    """Whether all ways give the same thing, so that they are compared."""

    def floor_s(self, bench: Bench) -> float | None:
        """None where the chip's figures are not known."""
        chip, facts = bench.target.capabilities.chip, bench.target.capabilities.facts
        bandwidth, peak = facts.get("memory.bandwidth"), chip.peak_flops.get(self.dtype)
        if bandwidth is None or (self.flops and peak is None):
            return None
        return max(self.bytes / float(bandwidth), self.flops / peak if peak else 0.0)


# ------------------------------------------------------------------------------------------------------ what there is


def works(bench: Bench) -> Iterator[Work]:
    """All families, at the sizes of each model's layers."""
    for model, llama in bench.sizes.llamas.items():
        tokens = bench.sizes.tokens[0]
        yield from _quantizing(bench, model, tokens, llama.dim)
        yield from _products(bench, model, tokens, *llama.layers()["gate and up"])
        yield from _layers(bench, model, tokens, llama.dim, llama.ffn_dim, llama.heads, llama.head_dim)
    yield from _losses(bench)
    yield from _attention(bench)


def candidates(bench: Bench, request: Request) -> dict[str, Callable[..., Any]]:
    """The backend's own that serve ``request``; the others are left out with their reasons."""
    found: dict[str, Callable[..., Any]] = {}
    on_chip = bench.target.capabilities.support(request.op, request.dtype, request.variant, request.shape)
    for candidate in _implementations(bench, request.op):
        support = on_chip and candidate.supports(request)
        what = f"{request.op} {request.variant}: {candidate.name}"
        if not support:
            bench.leave_out(what, support.reason)
            continue
        with bench.attempt(what):
            found[candidate.name] = candidate.load()
    return found


def _implementations(bench: Bench, op: str) -> Sequence[Implementation]:
    return [each for each in bench.target.backend.implementations() if each.op == op]


def _format(bench: Bench) -> str | None:
    variants = str(bench.target.capabilities.facts.get("fp8.variant", "")).split()
    return VARIANTS[variants[0]][0] if variants else None


def _quantizing(bench: Bench, model: str, rows: int, columns: int) -> Iterator[Work]:
    name = _format(bench)
    if name is None:
        bench.leave_out(f"{model}: quantizing", f"{bench.target.capabilities.chip.name} has no fp8 products")
        return
    format = FORMATS[name]
    for scaling in ("tensor", "row", "block1x128", "block128x128", "mx_pow2"):
        counts = block_counts(torch.Size((rows, columns)), KINDS[scaling].block)
        passes = 2 if scaling == "tensor" else 1
        ours = candidates(bench, Request("quantize", name, variant=scaling))
        reference = EmulatedFp8(bench.target.backend.name).quantize
        ways: dict[str, Callable[..., object]] = {COPY: torch.clone}
        ways |= {each: partial(_quantized, call, format, scaling) for each, call in ours.items()}
        ways[REFERENCE] = partial(_quantized, reference, format, scaling)
        yield Work(
            f"quantize {scaling}",
            f"{model}, {rows} x {columns}",
            (passes * BYTES + 1) * rows * columns + 4 * counts[0] * counts[1],
            0.0,
            "",
            lambda: (bench.normal(rows, columns),),
            ways,
        )


def _quantized(call: Callable[..., Any], format: Any, scaling: str, x: Tensor) -> Tensor:
    return call(x, format, scaling).payload


def _products(bench: Bench, model: str, m: int, n: int, k: int) -> Iterator[Work]:
    name = _format(bench)
    for kind in SCALINGS if name is not None else ():
        a, b = SCALINGS[kind][0]
        mixed = a if a == b else f"{a} x {b}"
        found = candidates(bench, Request("scaled_mm", str(name), {"m": m, "n": n, "k": k}, mixed))
        if not found:
            bench.leave_out(f"{model}: product {kind}", "no candidate serves it; what is emulated is no kernel's rival")
            continue
        quantize = EmulatedFp8(bench.target.backend.name).quantize
        format, scales = FORMATS[str(name)], sum(_scales(rows, k, s) for rows, s in ((m, a), (n, b)))
        yield Work(
            f"product {kind}",
            f"{model}, m={m} n={n} k={k}",
            (m + n) * k + 4 * scales + BYTES * m * n,
            2.0 * m * n * k,
            "fp8",
            lambda: (bench.normal(m, k), bench.normal(n, k, scale=k**-0.5)),
            {each: _Product(call, partial(quantize, format=format), a, b) for each, call in found.items()},
        )


def _scales(rows: int, columns: int, scaling: str) -> int:
    down, across = block_counts(torch.Size((rows, columns)), KINDS[scaling].block)
    return down * across


@dataclass(frozen=True)
class _Product:
    """A product whose operands are quantized before it is timed: see :func:`_calls`."""

    call: Callable[..., Any]
    quantize: Callable[..., Any]
    a: str
    b: str

    def prepared(self, x: Tensor, w: Tensor) -> Callable[[], object]:
        left, right = self.quantize(x, scaling=self.a), self.quantize(w, scaling=self.b).t()
        return partial(self.call, left, right, torch.bfloat16)


def _layers(bench: Bench, model: str, tokens: int, dim: int, ffn_dim: int, heads: int, head_dim: int) -> Iterator[Work]:
    weight = torch.ones(dim, device=bench.device, dtype=torch.bfloat16)
    positions = torch.arange(tokens, device=bench.device)
    cos, sin = ops.rope_table(positions, head_dim)
    size = f"{model}, {tokens} x"
    yield from _both_ways(
        bench, Request("rms_norm", "bfloat16", {"dim": dim}), f"{size} {dim}", 2 * tokens * dim, 3 * tokens * dim,
        lambda: (bench.normal(tokens, dim),), lambda op, x: op(x, weight, 1e-5),
    )  # fmt: skip
    yield from _both_ways(
        bench, Request("swiglu", "bfloat16", {"dim": ffn_dim}), f"{size} {ffn_dim}", 3 * tokens * ffn_dim,
        5 * tokens * ffn_dim, lambda: (bench.normal(tokens, ffn_dim), bench.normal(tokens, ffn_dim)),
        lambda op, gate, up: op(gate, up),
    )  # fmt: skip
    turned = tokens * heads * head_dim
    yield from _both_ways(
        bench, Request("rope", "bfloat16", {"head_dim": head_dim}), f"{size} {heads} x {head_dim}", 2 * turned,
        2 * turned, lambda: (bench.normal(1, tokens, heads, head_dim),), lambda op, x: op(x, cos, sin),
    )  # fmt: skip


def _losses(bench: Bench) -> Iterator[Work]:
    vocabulary, tokens = bench.sizes.decoder.vocab_size, bench.sizes.tokens[0]
    targets = torch.randint(0, vocabulary, (tokens,), device=bench.device)
    yield from _both_ways(
        bench, Request("cross_entropy", "bfloat16", {"vocabulary": vocabulary}), f"{tokens} x {vocabulary}",
        tokens * vocabulary, 2 * tokens * vocabulary, lambda: (bench.normal(tokens, vocabulary),),
        lambda op, logits: op(logits, targets),
    )  # fmt: skip


def _both_ways(
    bench: Bench, request: Request, size: str, forward: float, backward: float,
    inputs: Callable[[], tuple[Tensor, ...]], call: Callable[..., Tensor],
) -> Iterator[Work]:  # fmt: skip
    """An op that only moves memory: ``forward`` and ``backward`` elements of it, the latter on top."""
    reference = ops.reference(request.op)
    named = candidates(bench, request) | {REFERENCE: reference}
    if bench.target.backend.accelerator:
        named[COMPILED] = torch.compile(reference, dynamic=False)
    work = Work(request.op, size, BYTES * forward, 0.0, "", inputs)
    yield replace(work, ways={COPY: _clone, **{name: partial(call, op) for name, op in named.items()}})
    both = {name: partial(_with_gradient, partial(call, op)) for name, op in named.items()}
    more = BYTES * (forward + backward)
    yield replace(work, what=f"{request.op}, with gradient", bytes=more, ways=both, exact=False)


def _clone(*inputs: Tensor) -> Tensor:
    return inputs[0].clone()


def _with_gradient(call: Callable[..., Tensor], *inputs: Tensor) -> object:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = call(*leaves)
    return torch.autograd.grad(y, leaves, torch.ones_like(y))


def _attention(bench: Bench) -> Iterator[Work]:
    heads = bench.sizes.heads
    for sequence in bench.sizes.heads.sequences:
        case: Case = attention_case(bench, "causal", max(1, heads.tokens // sequence), sequence, Mask())
        queries = (case.batch, heads.heads, sequence, heads.head_dim)
        keys = (case.batch, heads.kv_heads, sequence, heads.head_dim)
        named = candidates(bench, case.request)
        flops = 4.0 * case.batch * heads.heads * heads.head_dim * pairs(case)
        moved = 2 * BYTES * case.batch * sequence * heads.head_dim * (heads.heads + heads.kv_heads)
        shapes = (queries, keys, keys)
        work = Work("attention", str(case), moved, flops, "bfloat16", partial(_normals, bench, shapes))
        if not named:
            bench.leave_out(f"attention: {case}", "no candidate serves it but the portable reference")
            continue
        calls = {name: partial(_attend, op, case.mask) for name, op in named.items()}
        yield replace(work, ways=dict(calls))
        both = {name: partial(_with_gradient, call) for name, call in calls.items()}
        # The backward pass does 2.5 times the operations (arXiv:2307.08691, section 4.1), and moves twice the tensors.
        yield replace(work, what="attention, with gradient", bytes=3 * moved, flops=3.5 * flops, ways=both, exact=False)


def _normals(bench: Bench, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    return tuple(bench.normal(*shape) for shape in shapes)


def _attend(op: Callable[..., Tensor], mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return op(q, k, v, mask)


# ---------------------------------------------------------------------------------------------------- measuring


def measure(bench: Bench) -> None:
    _ = bench.clock
    for work in works(bench):
        if bench.has_time(f"{work.what}, {work.size}", 2 * bench.sizes.seconds + 1):
            with bench.attempt(f"{work.what}, {work.size}"):
                _measure(bench, work)


def _measure(bench: Bench, work: Work) -> None:
    sets = rotating(work.inputs, copies_for(int(work.bytes), bench.rotate_bytes))
    ways: dict[str, Calls | None] = {
        name: bench.working(f"{work.what}: {name}", partial(_calls, way, sets)) for name, way in work.ways.items()
    }
    timings = bench.take_turns(ways)
    rivals = {name: timing for name, timing in timings.items() if name != COPY}
    best = min(rivals.values(), key=lambda timing: timing.seconds, default=None)
    first: Tensor | None = None
    for name, timing in timings.items():
        noise: float | str | None = None
        calls = ways[name]
        if work.exact and name != COPY and calls is not None:
            out = _codes(calls[0]())
            noise = None if first is None else sqnr_db(out, first)
            first = out if first is None else first
        bench.row(**_row_of(bench, work, name, timing, timings.get(COPY), best), sqnr_db=noise)


def _calls(way: Callable[..., object], sets: list[tuple[Tensor, ...]]) -> Calls:
    if isinstance(way, _Product):
        return [way.prepared(*inputs) for inputs in sets]
    return [partial(way, *inputs) for inputs in sets]


def _codes(out: object) -> Tensor:
    assert isinstance(out, Tensor)
    return out.to(torch.float32)


def _row_of(
    bench: Bench, work: Work, name: str, timing: Timing, copy: Timing | None, best: Timing | None
) -> dict[str, Any]:
    floor = work.floor_s(bench)
    return {
        "what": work.what,
        "size": work.size,
        "candidate": name,
        **timing.as_dict(),
        "bytes": work.bytes,
        "flops": work.flops,
        "floor_ms": UNKNOWN if floor is None else 1e3 * floor,
        "floor_over_time": UNKNOWN if floor is None or name == COPY else floor / timing.seconds,
        "gb_per_s": work.bytes / timing.seconds / 1e9,
        "tflops": work.flops / timing.seconds / 1e12,
        "time_over_copy": None if copy is None or name == COPY else vars(Ratio.of(timing.rounds, copy.rounds)),
        "time_over_best": None if best is None or name == COPY else vars(Ratio.of(timing.rounds, best.rounds)),
    }


def table(rows: list[dict[str, Any]]) -> str:
    names = ("what", "size", "candidate", "ms", "floor, ms", "floor / time", "time / copy", "time / best", "SQNR, dB")
    lines = [head(*names)]
    lines += [
        row(
            r["what"],
            r["size"],
            r["candidate"],
            milliseconds(r),
            number(r["floor_ms"]),
            number(r["floor_over_time"]),
            ratio(r["time_over_copy"]),
            ratio(r["time_over_best"]),
            number(r["sqnr_db"]),
        )
        for r in rows
    ]
    return "\n".join(lines)
