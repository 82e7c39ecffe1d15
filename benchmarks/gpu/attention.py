"""Attention forward and backward, by candidate: each that says it serves the request, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from arms import Ratio, head, row
from gpu.bench import Bench, rotating, sqnr_db
from gpu.gemm import labelled, milliseconds, ratio, share
from gpu.timing import Calls, copies_for
from torch import Tensor

from accelbridge import ops
from accelbridge.backend import FULL, Implementation, Mask, Request

TITLE = "Attention by candidate"
DOCUMENTS = (1 / 2, 1 / 4, 1 / 8, 1 / 8)
"""Shares of a sequence that the documents of the masks with segments have."""
BACKWARD = 2.5
"""FLOP of the backward pass over the forward pass's (FlashAttention-2, arXiv:2307.08691, section 4.1)."""
REFERENCE_UP_TO = 1024
"""Tokens up to which the portable reference is timed, too; its memory grows with their square."""
FORWARD, BOTH = "forward", "forward and backward"


@dataclass(frozen=True)
class Case:
    """One request and its mask."""

    name: str
    batch: int
    sequence: int
    mask: Mask
    request: Request

    def __str__(self) -> str:
        return f"{self.name}, {self.sequence} tokens"


def cases(bench: Bench) -> Iterator[Case]:
    for sequence in bench.sizes.heads.sequences:
        batch = max(1, bench.sizes.heads.tokens // sequence)
        segments = _segments(batch, sequence).to(bench.device)
        yield _case(bench, "causal", batch, sequence, Mask())
        yield _case(bench, "window", batch, sequence, Mask(window=bench.sizes.heads.window))
        yield _case(bench, "segments", batch, sequence, Mask(segments_BS=segments))


def _case(bench: Bench, name: str, batch: int, sequence: int, mask: Mask) -> Case:
    heads = bench.sizes.heads
    shape = {"head_dim": heads.head_dim, "heads": heads.heads, "kv_heads": heads.kv_heads, "sequence": sequence}
    needs = {"causal"} | ({name} - {"causal"}) | ({"gqa"} if heads.heads != heads.kv_heads else set())
    return Case(name, batch, sequence, mask, Request("attention", "bfloat16", shape, needs=frozenset(needs)))


def _segments(batch: int, sequence: int) -> Tensor:
    """int32 [B, S]: the same documents in each row."""
    ends = torch.tensor(DOCUMENTS).cumsum(0)[:-1] * sequence
    return torch.bucketize(torch.arange(sequence), ends, right=True).to(torch.int32).expand(batch, -1).contiguous()


def pairs(case: Case) -> int:
    """Pairs of a query and a key that it sees, in one row of the batch."""
    position = torch.arange(case.sequence)
    first = torch.zeros_like(position)
    if case.mask.window is not None:
        first = (position - case.mask.window + 1).clamp_min(0)
    if case.mask.segments_BS is not None:
        document = case.mask.segments_BS[0].cpu()
        first = torch.maximum(first, torch.searchsorted(document, document))
    return int((position - first + 1).sum())


# ---------------------------------------------------------------------------------------------------- measuring


def measure(bench: Bench) -> None:
    for case in cases(bench):
        if bench.has_time(str(case), 2 * bench.sizes.seconds + 1):
            with bench.attempt(str(case)):
                _measure(bench, case)


def candidates(bench: Bench, case: Case) -> dict[str, Callable[..., Any]]:
    """Those that serve the request, in the plan's order: it takes the first."""
    capabilities, request = bench.target.capabilities, case.request
    on_chip = capabilities.support(request.op, request.dtype, request.variant, request.shape)
    reference = Implementation("attention", "reference", lambda _: FULL, lambda: ops.reference("attention"))
    found: dict[str, Callable[..., Any]] = {}
    for candidate in (*bench.target.backend.attention.implementations(), reference):
        support = on_chip and candidate.supports(request)
        what = f"{case}: {candidate.name}"
        if candidate is reference and case.sequence > REFERENCE_UP_TO:
            bench.leave_out(what, f"its memory grows with the square of the length; timed up to {REFERENCE_UP_TO}")
        elif not support:
            bench.leave_out(what, support.reason)
        else:
            with bench.attempt(what):
                found[candidate.name] = candidate.load()
    return found


def _measure(bench: Bench, case: Case) -> None:
    heads = bench.sizes.heads
    queries = (case.batch, heads.heads, case.sequence, heads.head_dim)
    keys = (case.batch, heads.kv_heads, case.sequence, heads.head_dim)

    def one() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = (bench.normal(*shape).requires_grad_() for shape in (queries, keys, keys))
        return q, k, v, bench.normal(*queries)

    bytes_each = 2 * 2 * case.batch * case.sequence * heads.head_dim * (heads.heads + heads.kv_heads)
    sets = rotating(one, copies_for(bytes_each, bench.rotate_bytes))
    found = candidates(bench, case)
    ways: dict[str, Calls | None] = {}
    for name, attention in found.items():
        for part, run in ((FORWARD, _forward), (BOTH, _both)):
            calls = [partial(run, attention, case.mask, *each) for each in sets]
            ways[f"{part}: {name}"] = bench.working(f"{case}: {name}, {part}", lambda calls=calls: calls)
    timings = bench.take_turns(ways)
    best = min((t for way, t in timings.items() if way.startswith(BOTH)), key=lambda t: t.seconds, default=None)
    level = bench.target.capabilities.support("attention", "bfloat16").level
    first: Tensor | None = None
    flops = 4.0 * case.batch * heads.heads * heads.head_dim * pairs(case)
    for order, (name, attention) in enumerate(found.items()):
        forward, both = timings.get(f"{FORWARD}: {name}"), timings.get(f"{BOTH}: {name}")
        if forward is None or both is None:
            continue  # reported where it failed
        out = _forward(attention, case.mask, *sets[0])
        first = out if first is None else first
        rate = (1 + BACKWARD) * flops / both.seconds
        assert best is not None
        bench.row(
            mask=case.name,
            sequence=case.sequence,
            batch=case.batch,
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            candidate=name,
            chosen=order == 0,
            level=level,
            forward=forward.as_dict() | {"tflops": flops / forward.seconds / 1e12},
            **both.as_dict(),
            tflops=rate / 1e12,
            of_peak=bench.of_peak(rate, "bfloat16", level),
            time_over_best=vars(Ratio.of(both.rounds, best.rounds)),
            sqnr_db=sqnr_db(out, first) if out is not first else None,
        )


def _forward(attention: Callable[..., Any], mask: Mask, q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    with torch.no_grad():
        return attention(q, k, v, mask)


def _both(attention: Callable[..., Any], mask: Mask, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> object:
    return torch.autograd.grad(attention(q, k, v, mask), (q, k, v), grad)


# ------------------------------------------------------------------------------------------------------- tables


def table(rows: list[dict[str, Any]]) -> str:
    names = ("mask", "tokens", "candidate", "forward, ms", "and backward, ms", "TFLOP/s", "of peak", "time / best")
    lines = [head(*names)]
    for r in rows:
        name = labelled(r["candidate"], r["level"]) + (" (the plan's)" if r["chosen"] else "")
        lines.append(
            row(
                r["mask"],
                f"{r['batch']} x {r['sequence']}",
                name,
                milliseconds(r["forward"]),
                milliseconds(r),
                f"{r['tflops']:.4g}",
                share(r["of_peak"]),
                ratio(r["time_over_best"]),
            )
        )
    return "\n".join(lines)
