"""One small call of every cell of the capability table: what it takes, and what must come of it.

For the tests that ask the same of every op. An op that is not here cannot be claimed: nothing would try it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from accelbridge import ops
from accelbridge.backend import Mask, Request, Support
from accelbridge.conformance.bench import Bench
from accelbridge.conformance.oracle import small
from accelbridge.conformance.oracle.formats import TABLES
from accelbridge.portable.sharded_adamw import ShardedAdamW

Implemented = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """A small call of one op in one dtype."""

    arguments: tuple[Any, ...]
    """Tensors on the host, and what else the op takes."""
    right: Callable[..., Tensor]
    """The float64 result for such arguments."""
    dtype: torch.dtype
    """Of the result."""

    @property
    def want(self) -> Tensor:
        return self.right(*self.arguments)

    def invoke(self, t: Bench, run: Implemented, *arguments: Any) -> Tensor:
        """Call ``run`` with ``arguments`` (default: those of the call), put on the device anew."""
        return run(*(t.put(x) if isinstance(x, Tensor) else x for x in arguments or self.arguments))


def implementations(t: Bench, op: str, dtype: str) -> list[tuple[str, Implemented]]:
    """(name, callable) of everything that a plan could bind to ``op``, its portable reference among them."""
    needs = frozenset({"causal", "gqa"}) if op == "attention" else frozenset()
    found = t.candidates(Request(op, dtype, needs=needs))
    if op == "adamw":
        return [(name, partial(_adamw_step, make)) for name, make in [*found, ("reference", ShardedAdamW)]]
    if op == "linear":
        found.append(("matmul", lambda x, weight, bias: t.backend.matmul.matmul(x, weight.T) + bias))
    return found


def call(t: Bench, op: str, dtype: str) -> Call:
    """The small call of ``op``, one of :data:`OPS`."""
    return OPS[op](t, getattr(torch, dtype))


def _linear(t: Bench, dtype: torch.dtype) -> Call:
    shapes = {"x": (3, 5), "weight": (4, 5), "bias": (4,)}
    return Call(tuple(t.integers(*s, name=n, dtype=dtype) for n, s in shapes.items()), small.linear, dtype)


def _attention(t: Bench, dtype: torch.dtype) -> Call:
    q = t.normal(1, 4, 6, 8, name="q", dtype=dtype)
    k, v = (t.normal(1, 2, 6, 8, name=name, dtype=dtype) for name in "kv")
    return Call((q, k, v, Mask()), lambda q, k, v, _: small.causal_attention(q, k, v), dtype)


def _embedding(t: Bench, dtype: torch.dtype) -> Call:
    tokens = t.integers(2, 3, low=0, high=6, name="tokens", dtype=torch.int64)
    return Call((tokens, t.normal(7, 4, dtype=dtype)), lambda ids, weight: weight.double()[ids], dtype)


def _rms_norm(t: Bench, dtype: torch.dtype) -> Call:
    return Call((t.normal(3, 8, dtype=dtype), t.normal(8, name="weight", dtype=dtype), 1e-5), small.rms_norm, dtype)


def _rope(t: Bench, dtype: torch.dtype) -> Call:
    angles = t.normal(5, 4, name="angles")
    return Call((t.normal(1, 5, 2, 8, dtype=dtype), angles.cos(), angles.sin()), small.rope, dtype)


def _swiglu(t: Bench, dtype: torch.dtype) -> Call:
    gate, up = (t.normal(3, 8, name=name, dtype=dtype) for name in ("gate", "up"))
    return Call((gate, up), small.swiglu, dtype)


def _dropout(t: Bench, dtype: torch.dtype) -> Call:
    keys = t.integers(4, low=-(2**31), high=2**31 - 1, name="keys", dtype=torch.int32)
    site = torch.tensor(77, dtype=torch.int32)
    return Call((t.normal(4, 16, dtype=dtype), keys, site, 0.25), small.dropout, dtype)


def _cross_entropy(t: Bench, dtype: torch.dtype) -> Call:
    targets = t.integers(6, low=0, high=9, name="targets", dtype=torch.int64)
    targets[2] = -100
    out = torch.float64 if dtype == torch.float64 else torch.float32
    return Call((t.normal(6, 10, dtype=dtype), targets), small.cross_entropy, out)


def _linear_cross_entropy(t: Bench, dtype: torch.dtype) -> Call:
    x, weight = (t.integers(*shape, name=name, dtype=dtype) for name, shape in (("x", (6, 5)), ("weight", (10, 5))))
    targets = t.integers(6, low=0, high=9, name="targets", dtype=torch.int64)
    targets[2] = -100
    out = torch.float64 if dtype == torch.float64 else torch.float32
    return Call((x, weight, targets), small.linear_cross_entropy, out)


_RATE, _DECAY, _EPSILON = 2.0**-5, 0.25, 1e-6


def _adamw(t: Bench, dtype: torch.dtype) -> Call:
    right = partial(small.adamw_first_step, lr=_RATE, decay=_DECAY, eps=_EPSILON)
    return Call((t.normal(3, 5, dtype=dtype), t.normal(3, 5, name="g", dtype=dtype)), right, dtype)


def _adamw_step(make: Implemented, values: Tensor, gradient: Tensor) -> Tensor:
    """What a first step makes of ``values``."""
    parameter = torch.nn.Parameter(values)
    parameter.grad = gradient
    make([parameter], lr=_RATE, weight_decay=_DECAY, eps=_EPSILON).step()
    return parameter.detach()


OPS: dict[str, Callable[[Bench, torch.dtype], Call]] = {
    "adamw": _adamw,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "dropout": _dropout,
    "embedding": _embedding,
    "linear": _linear,
    "linear_cross_entropy": _linear_cross_entropy,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
}
"""Ops of one process."""


# -------------------------------------------------------------------------------------------- several processes


def group_call(t: Bench, op: str, dtype: str, variant: str) -> tuple[Tensor, Tensor]:
    """Run the small call of a cell of :data:`GROUP_OPS` on all ranks: the result and what it must be, of its dtype."""
    kind = getattr(torch, dtype)
    if op == "vocab_parallel_cross_entropy":
        return _vocab_parallel(t, kind)
    if op == "vocab_parallel_linear_cross_entropy":
        return _vocab_parallel_linear(t, kind)
    size, rank = t.world.size, t.world.rank
    if variant and op not in ("all_reduce", "reduce_scatter", "reduce"):
        raise ValueError(f"the suite knows no variants of {op}")
    # 3 rows to each rank: small integers, of which a sum or a product is exact in any float of 8 bits.
    every = torch.stack([t.integers(3 * size, low=1, high=2, name=f"rank{r}") for r in range(size)])
    if op in ("all_reduce", "reduce_scatter", "reduce"):
        return _reduction(t, op, variant, every, kind)
    x = t.put(every[rank].to(kind))
    if op == "broadcast":
        dist.broadcast(x, src=size - 1)
        return x, every[-1].to(kind)
    if op == "all_gather":
        out = torch.zeros(3 * size * size, dtype=kind, device=t.device)
        dist.all_gather_into_tensor(out, x)
        return out, every.reshape(-1).to(kind)
    out = torch.zeros(3 * size, dtype=kind, device=t.device)
    dist.all_to_all_single(out, x)
    return out, every.reshape(size, size, 3)[:, rank].reshape(-1).to(kind)


def _reduction(t: Bench, op: str, variant: str, every: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    rank, size = t.world.rank, t.world.size
    x, how, total = t.put(every[rank].to(kind)), _reduce_op(variant), _reduced(every, variant)
    if op == "all_reduce":
        dist.all_reduce(x, op=how)
    elif op == "reduce":
        dist.reduce(x, dst=0, op=how)
        return (x, total.to(kind)) if rank == 0 else (t.put(total.to(kind)), total.to(kind))  # elsewhere undefined
    else:
        out = torch.zeros(3, dtype=kind, device=t.device)
        dist.reduce_scatter_tensor(out, x, op=how)
        return out, total.reshape(size, 3)[rank].to(kind)
    return x, total.to(kind)


def _reduce_op(variant: str) -> Any:
    if variant != "premul_sum":
        return getattr(dist.ReduceOp, variant.upper())
    # Any vendor's may take a factor; torch named the function that makes one after the first that did.
    make = next(getattr(dist, name) for name in dir(dist) if name.endswith("_premul_sum"))
    return make(2.0)


def _reduced(every: Tensor, variant: str) -> Tensor:
    by_name = {
        "sum": every.sum(0),
        "avg": every.mean(0),
        "product": every.prod(0),
        "min": every.amin(0),
        "max": every.amax(0),
        "premul_sum": 2.0 * every.sum(0),
    }
    return by_name[variant]


def _vocab_parallel(t: Bench, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    size, rank = t.world.size, t.world.rank
    logits, targets = t.integers(6, 4 * size, name="logits"), t.integers(6, low=0, high=4 * size - 1, name="targets")
    mine = t.put(logits[:, 4 * rank : 4 * rank + 4].to(kind))
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    got = ops.reference("vocab_parallel_cross_entropy")(mine, t.put(targets.long()), group)
    return got, small.cross_entropy(logits, targets.long())


def _vocab_parallel_linear(t: Bench, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    size, rank = t.world.size, t.world.rank
    x, weight = t.integers(6, 5, name="x"), t.integers(4 * size, 5, name="weight")
    targets = t.integers(6, low=0, high=4 * size - 1, name="targets").long()
    mine = t.put(weight[4 * rank : 4 * rank + 4].to(kind))
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    run = ops.reference("vocab_parallel_linear_cross_entropy")
    return run(t.put(x.to(kind)), mine, t.put(targets), group), small.linear_cross_entropy(x, weight, targets)


VOCAB_PARALLEL = ("vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy")
GROUP_OPS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter", *VOCAB_PARALLEL)
"""Ops of all ranks together."""


# ------------------------------------------------------------------------------------------------------- fp8


def quantized(t: Bench, format: str, scaling: str) -> tuple[Tensor, Tensor]:
    """Quantize a small matrix and read it back: the result and what it is about."""
    x = t.integers(16, 32, name="a")
    return t.backend.matmul.quantize(t.put(x), TABLES[format].format, scaling).dequantize(), x


def scaled_product(t: Bench, formats: str, scalings: str) -> tuple[Tensor, Tensor]:
    """Quantize two matrices, as small as the cell's limits allow, and multiply them: the result and what it is about.
    "A x B" names both operands' formats or scalings where they differ."""
    matmul, operands = t.backend.matmul, []
    m, k, n = fitting(t.capabilities.support("scaled_mm", formats, scalings), m=16, k=32, n=16)
    a, b = (t.integers(rows, k, name=name) for rows, name in ((m, "a"), (n, "b")))
    for x, format, scaling in zip((a, b), _both(formats), _both(scalings or "tensor"), strict=True):
        operands.append(matmul.quantize(t.put(x), TABLES[format].format, scaling))
    return matmul.scaled_mm(operands[0], operands[1].t(), torch.float32), a.double() @ b.double().T


def fitting(support: Support, **sizes: int) -> tuple[int, ...]:
    """``sizes`` by dimension, each as much larger as the limits of ``support`` ask."""
    found = []
    for dim, size in sizes.items():
        limits = [limit for limit in support.limits if limit.dim == dim]
        step = math.lcm(*(limit.multiple for limit in limits))
        least = max([size, *(limit.minimum for limit in limits)])
        found.append(-(-least // step) * step)
    return tuple(found)


def _both(name: str) -> tuple[str, str]:
    left, _, right = name.partition(" x ")
    return left, right or left
