"""The lowerings on real gloo processes, against float64 oracles.

Every check is a function of one rank. One world of 3 runs all of them on the lowered group, which must pass
all, and those that carry ``raw="fails"`` on raw gloo too, which must fail each, so that a lowering which does
nothing cannot go unnoticed. Two ranks cannot show the precision of a reduction (one addition, one rounding).
"""

# pyright: reportPrivateImportUsage=false
# (torch.distributed re-exports without saying so)

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelbridge.backend import Lowering, World
from accelbridge.cpu.collectives import CPU_LOWERINGS, CpuCollectives
from accelbridge.errors import BackendError, Unsupported
from accelbridge.portable import process_group
from accelbridge.portable.collectives import TorchCollectives
from accelbridge.portable.lowerings import LIBRARY, Call, select
from accelbridge.portable.process_group import InterposedGroup, LoweredWork
from tests.ranks import Rank, run_ranks

HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The names of torch 2.13 where it has them; the older ones warn there.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

N = 3072  # divisible by 2, 3 and 4

Check = Callable[[int, int], None]
CHECKS: dict[str, Check] = {}
RAW_FAILS: set[str] = set()


def check(raw: str = "") -> Callable[[Check], Check]:
    """Register a check. ``raw="fails"``: raw gloo must fail it at 3 ranks (and fail alike on all ranks, or by
    values only, since the group is used further)."""

    def register(fn: Check) -> Check:
        CHECKS[fn.__name__] = fn
        if raw == "fails":
            RAW_FAILS.add(fn.__name__)
        return fn

    return register


# ---------------------------------------------------------------------------------------------------- oracles


def data(kind: str, dtype: torch.dtype, size: int, seed: int = 0) -> list[Tensor]:
    """One tensor per rank. "exact": integers whose sums fit the dtype; "random": normal; "positive": its
    absolute value."""
    out = []
    for rank in range(size):
        g = torch.Generator().manual_seed(1000 * seed + rank)
        x = torch.randint(-30, 31, (N,), generator=g).double() if kind == "exact" else torch.randn(N, generator=g)
        out.append((x.abs() if kind == "positive" else x).to(dtype))
    return out


def expect(got: Tensor, want: Tensor, magnitude: Tensor, terms: int) -> None:
    """``|err| <= u_out |S| + gamma_terms(2^-24) sum|x|``, plus half the smallest number of the dtype."""
    u = HALF[got.dtype]
    gamma = terms * 2.0**-24 / (1 - terms * 2.0**-24)
    bound = u * want.abs() + (1 + u) * gamma * magnitude + torch.finfo(got.dtype).smallest_normal * u
    worst = ((got.double() - want).abs() / bound).max().item()
    assert worst <= 1, f"{worst:.2f} times the bound of a float32 reduction"


def equal(got: Tensor, want: Tensor) -> None:
    """Bit for bit."""
    assert got.dtype == want.dtype, f"{got.dtype} != {want.dtype}"
    assert got.shape == want.shape, f"{got.shape} != {want.shape}"
    assert raw_bytes(got) == raw_bytes(want), f"{got.flatten()[:8]} != {want.flatten()[:8]}"


def raw_bytes(x: Tensor) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_on_all(x: Tensor, size: int) -> None:
    found: list[Any] = [None] * size
    dist.all_gather_object(found, hashlib.sha256(raw_bytes(x)).hexdigest())
    assert len(set(found)) == 1, "ranks hold different bits"


# ----------------------------------------------------------------------------------- reductions in every form


def reductions(xs: list[Tensor], rank: int, size: int, op: Any) -> Iterator[tuple[str, Tensor, slice]]:
    """Every c10d form of a reduction: its name, this rank's result, and which part of the whole that is."""
    mine, chunk = xs[rank], N // size
    whole, part = slice(0, N), slice(rank * chunk, (rank + 1) * chunk)
    x = mine.clone()
    dist.all_reduce(x, op)
    yield "all_reduce", x, whole
    a, b = mine[: N // 2].clone(), mine[N // 2 :].clone()
    with dist._coalescing_manager():
        dist.all_reduce(a, op)
        dist.all_reduce(b, op)
    yield "all_reduce coalesced", torch.cat([a, b]), whole
    x = mine.clone()
    dist.reduce(x, size - 1, op)
    if rank == size - 1:
        yield "reduce", x, whole
    elif isinstance(dist.group.WORLD, InterposedGroup) and mine.dtype in HALF:
        equal(x, mine)  # raw gloo leaves partial sums in a non-root's tensor
    out = mine.new_empty(chunk)
    reduce_scatter_single(out, mine, op)
    yield "reduce_scatter_tensor", out, part
    out = mine.new_empty(chunk)
    dist.reduce_scatter(out, list(mine.chunk(size)), op)
    yield "reduce_scatter", out, part
    first, second = mine.new_empty(chunk), mine.new_empty(chunk)
    with dist._coalescing_manager():
        reduce_scatter_single(first, mine, op)
        reduce_scatter_single(second, mine.flip(0), op)
    yield "reduce_scatter coalesced", first, part


def reduce_case(rank: int, size: int, kind: str, dtype: torch.dtype, op: Any, scale: float) -> None:
    xs = data(kind, dtype, size)
    total = torch.stack([x.double() for x in xs]).sum(0) * scale
    magnitude = torch.stack([x.double().abs() for x in xs]).sum(0) * scale
    for form, got, where in reductions(xs, rank, size, op):
        try:
            if kind == "exact":
                equal(got, total[where].to(dtype))
            else:
                expect(got, total[where], magnitude[where], size)
        except AssertionError as e:
            raise AssertionError(f"{form}, {kind}, {dtype}: {e}") from None
        if where.stop - where.start == N and form != "reduce":
            same_on_all(got, size)


@check()
def sum_exact(rank: int, size: int) -> None:
    for dtype in (*HALF, torch.float32, torch.int32, torch.int64):
        reduce_case(rank, size, "exact", dtype, dist.ReduceOp.SUM, 1.0)


@check(raw="fails")
def sum_random(rank: int, size: int) -> None:
    for dtype in HALF:
        reduce_case(rank, size, "random", dtype, dist.ReduceOp.SUM, 1.0)


@check(raw="fails")
def sum_positive(rank: int, size: int) -> None:
    for dtype in HALF:
        reduce_case(rank, size, "positive", dtype, dist.ReduceOp.SUM, 1.0)


@check(raw="fails")
def average(rank: int, size: int) -> None:
    for kind in ("random", "positive"):
        reduce_case(rank, size, kind, torch.bfloat16, dist.ReduceOp.AVG, 1 / size)


@check()
def average_float32(rank: int, size: int) -> None:
    """gloo's own AVG is a sum and one division; CPU_LOWERINGS trusts it."""
    xs = data("exact", torch.float32, size)
    total = torch.stack(xs).sum(0) / size
    for _, got, where in reductions(xs, rank, size, dist.ReduceOp.AVG):
        equal(got, total[where])


@check(raw="fails")
def premultiplied(rank: int, size: int) -> None:
    half: Any = dist._make_nccl_premul_sum(0.5)
    third: Any = dist._make_nccl_premul_sum(torch.tensor(1 / 3))
    reduce_case(rank, size, "exact", torch.float32, half, 0.5)
    reduce_case(rank, size, "positive", torch.bfloat16, third, 1 / 3)


@check(raw="fails")
def product(rank: int, size: int) -> None:
    xs = [1 + x.abs() / 64 for x in data("exact", torch.bfloat16, size)]
    want = torch.stack([x.double() for x in xs]).prod(0)
    for _, got, where in reductions(xs, rank, size, dist.ReduceOp.PRODUCT):
        expect(got, want[where], want[where], size)


@check(raw="fails")
def nan_in_minmax(rank: int, size: int) -> None:
    for dtype in (*HALF, torch.float32, torch.float64):
        xs = data("random", dtype, size)
        xs[0][: 2 * size] = torch.tensor([float("inf"), -float("inf")]).repeat(size)
        for r in range(size):
            xs[r][size + r] = float("nan")  # one rank each, so that every order of reduction meets one
        stack = torch.stack(xs)
        for op, want in ((dist.ReduceOp.MAX, stack.amax(0)), (dist.ReduceOp.MIN, stack.amin(0))):
            for form, got, where in reductions(xs, rank, size, op):
                assert torch.equal(got.isnan(), want[where].isnan()), f"{form} {dtype}: NaN got lost"
                equal(got.nan_to_num(0), want[where].nan_to_num(0))
                if where.stop - where.start == N and form != "reduce":
                    same_on_all(got, size)
    zeros = torch.tensor([-0.0, 0.0] if rank else [0.0, -0.0])
    dist.all_reduce(zeros, dist.ReduceOp.MAX)
    equal(zeros, torch.zeros(2))


@check()
def other_reductions(rank: int, size: int) -> None:
    """What no lowering touches still works, complex sums and bit operations included."""
    x = torch.full((3,), 1 + 2j)
    dist.all_reduce(x)
    equal(x, torch.full((3,), size * (1 + 2j)))
    bits = torch.tensor([1 << rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.item() == (1 << size) - 1
    top = torch.tensor([rank, -rank])
    dist.all_reduce(top, dist.ReduceOp.MAX)
    assert top.tolist() == [size - 1, 0]


# --------------------------------------------------------------------------------------------- strided memory


def column(values: Tensor) -> Tensor:
    """``values`` as every second element of a buffer that holds -1 in between."""
    return torch.stack([values, torch.full_like(values, -1)], 1)[:, 0]


def around(x: Tensor) -> None:
    """The elements between those of a column must not have been touched."""
    memory = x.as_strided((x.numel(),), (2,), x.storage_offset() + 1)
    assert bool((memory == -1).all()), "wrote between the elements"


def ramp(rank: int, n: int = 6) -> Tensor:
    return torch.arange(n, dtype=torch.float32) + 10 * rank


@check(raw="fails")
def strided_all_reduce(rank: int, size: int) -> None:
    want = torch.stack([ramp(r) for r in range(size)]).sum(0)
    x = column(ramp(rank))
    dist.all_reduce(x)
    equal(x, want)
    around(x)


@check()
def transposed_all_reduce(rank: int, size: int) -> None:
    want = torch.stack([ramp(r) for r in range(size)]).sum(0)
    x = ramp(rank).view(3, 2).t().contiguous().t()
    dist.all_reduce(x)
    equal(x.reshape(-1), want)


@check()
def expanded_all_reduce(rank: int, size: int) -> None:
    x = torch.full((1, 1), rank + 1.0, dtype=torch.bfloat16).expand(3, 4)
    dist.all_reduce(x)
    assert x.tolist() == [[size * (size + 1) / 2] * 4] * 3


@check(raw="fails")
def strided_broadcast(rank: int, size: int) -> None:
    x = column(ramp(rank))
    dist.broadcast(x, 1)
    equal(x, ramp(1))
    around(x)


@check(raw="fails")
def strided_reduce(rank: int, size: int) -> None:
    x = column(ramp(rank))
    dist.reduce(x, 1)
    equal(x, torch.stack([ramp(r) for r in range(size)]).sum(0) if rank == 1 else ramp(rank))
    around(x)


@check(raw="fails")
def strided_reduce_scatter(rank: int, size: int) -> None:
    want = sum(float(10 * rank + r) for r in range(size))
    inputs = [column(torch.full((3,), 10.0 * j + rank)) for j in range(size)]
    out = column(torch.zeros(3))
    dist.reduce_scatter(out, inputs)
    equal(out, torch.full((3,), want))
    around(out)
    out = column(torch.zeros(3))
    reduce_scatter_single(out, column(torch.cat(inputs)))
    equal(out, torch.full((3,), want))
    around(out)


@check()
def strided_gathers(rank: int, size: int) -> None:
    outs = [column(torch.zeros(6)) for _ in range(size)]
    dist.all_gather(outs, column(ramp(rank)))
    for r, out in enumerate(outs):
        equal(out, ramp(r))
        around(out)
    single = column(torch.zeros(6 * size))
    all_gather_single(single, column(ramp(rank)))
    equal(single, torch.cat([ramp(r) for r in range(size)]))
    around(single)
    windows = torch.arange(4.0).as_strided((3, 2), (1, 1)) + 0  # then as overlapping memory:
    overlapping = torch.arange(4.0).as_strided((3, 2), (1, 1))
    whole = torch.empty(3 * size, 2)
    all_gather_single(whole, overlapping)
    equal(whole, windows.repeat(size, 1))
    gathered = [column(torch.zeros(6)) for _ in range(size)] if rank == 1 else None
    dist.gather(column(ramp(rank)), gathered, 1)
    for r, out in enumerate(gathered or ()):
        equal(out, ramp(r))
        around(out)


@check(raw="fails")
def strided_scatter(rank: int, size: int) -> None:
    out = column(torch.zeros(6))
    dist.scatter(out, [column(ramp(r)) for r in range(size)] if rank == 1 else None, 1)
    equal(out, ramp(rank))
    around(out)


@check(raw="fails")
def strided_all_to_all(rank: int, size: int) -> None:
    want = torch.tensor([10.0 * r + rank for r in range(size)])
    out = column(torch.zeros(size))
    dist.all_to_all_single(out, ramp(rank, size))
    equal(out, want)
    around(out)
    out = torch.zeros(size)
    dist.all_to_all_single(out, column(ramp(rank, size)))
    equal(out, want)


# ---------------------------------------------------------------------------------------- movement and splits


def split_table(size: int) -> list[list[int]]:
    """Rows that rank i sends to rank j: uneven, with zeros, and a rank that sends nothing at all."""
    return [[0] * size if i == 1 else [(3 * i + j) % 4 for j in range(size)] for i in range(size)]


@check()
def uneven_all_to_all(rank: int, size: int) -> None:
    table = split_table(size)
    for dtype in (torch.float32, torch.bfloat16):
        blocks = [[torch.full((table[i][j], 2), 10.0 * i + j, dtype=dtype) for j in range(size)] for i in range(size)]
        want = torch.cat([blocks[i][rank] for i in range(size)])
        out = torch.full_like(want, -1)
        received = [table[i][rank] for i in range(size)]
        dist.all_to_all_single(out, torch.cat(blocks[rank]), received, table[rank])
        equal(out, want)
        outs = [torch.full_like(blocks[i][rank], -1) for i in range(size)]
        dist.all_to_all(outs, blocks[rank])
        equal(torch.cat(outs), want)
    nothing = torch.empty(0)
    dist.all_to_all_single(nothing, torch.empty(0), [0] * size, [0] * size)


def bits(rank: int, dtype: torch.dtype) -> Tensor:
    """All 256 bit patterns, in an order of the rank's own."""
    return (torch.arange(252) + 37 * rank).to(torch.uint8).view(dtype)


@check(raw="fails")
def float8_moves(rank: int, size: int) -> None:
    for dtype in FLOAT8:
        mine, all_of_them = bits(rank, dtype), [bits(r, dtype) for r in range(size)]
        x = mine.clone()
        dist.broadcast(x, 1)
        equal(x, bits(1, dtype))
        outs = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(outs, mine)
        for out, want in zip(outs, all_of_them, strict=True):
            equal(out, want)
        flat = mine.new_empty(252 * size)
        all_gather_single(flat, mine)
        equal(flat.view(torch.uint8), torch.cat([w.view(torch.uint8) for w in all_of_them]))
        outs = [torch.empty_like(mine) for _ in range(size)] if rank == 1 else None
        dist.gather(mine, outs, 1)
        for out, want in zip(outs or (), all_of_them, strict=False):
            equal(out, want)
        out = torch.empty_like(mine)
        dist.scatter(out, all_of_them if rank == 1 else None, 1)
        equal(out, mine)
        n = 252 // size
        out = torch.empty_like(mine)
        dist.all_to_all_single(out, mine)
        parts = [w.view(torch.uint8)[rank * n : (rank + 1) * n] for w in all_of_them]
        equal(out.view(torch.uint8), torch.cat(parts))
        outs = [mine.new_empty(n) for _ in range(size)]
        dist.all_to_all(outs, list(mine.chunk(size)))
        for out, want in zip(outs, parts, strict=True):
            equal(out.view(torch.uint8), want)


@check()
def point_to_point(rank: int, size: int) -> None:
    for dtype in (torch.float32, FLOAT8[0]):
        if rank == 0:
            dist.send(column(torch.ones(4)).to(dtype) if dtype in FLOAT8 else column(ramp(3)), 1)
        elif rank == 1:
            out = torch.zeros(4, dtype=dtype) if dtype in FLOAT8 else column(torch.zeros(6))
            assert dist.recv(out, None if dtype in FLOAT8 else 0) == 0
            equal(out, torch.ones(4).to(dtype) if dtype in FLOAT8 else ramp(3))


@check()
def float8_sums_are_refused(rank: int, size: int) -> None:
    x = torch.ones(4 * size, dtype=FLOAT8[0])
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(x),
        lambda: dist.reduce(x, 0),
        lambda: reduce_scatter_single(x[:4].clone(), x),
    ]
    for call in calls:
        with pytest.raises(Unsupported, match="float8 can be moved between ranks but not reduced"):
            call()


# ------------------------------------------------------------------------------------- asynchrony and futures


@check()
def works_are_honest(rank: int, size: int) -> None:
    xs = [column(torch.full((5,), float(k + rank))) for k in range(4)]
    want = [sum(float(k + r) for r in range(size)) for k in range(4)]
    works: list[Any] = [dist.all_reduce(x, async_op=True) for x in xs]
    for k in (2, 0):  # out of order
        works[k].wait()
        assert xs[k].tolist() == [want[k]] * 5
        works[k].wait()  # a second wait must not do it again
        assert xs[k].tolist() == [want[k]] * 5
    while not works[3].is_completed():
        pass
    assert xs[3].tolist() == [want[3]] * 5  # a poll that said yes
    assert works[1].get_future().then(lambda f: f.value()[0].sum().item()).wait() == 5 * want[1]
    native = dist.all_reduce(torch.ones(3), async_op=True)
    assert native is not None
    assert not isinstance(native, LoweredWork)
    native.wait()


@check()
def ddp_uses_futures(rank: int, size: int) -> None:
    model = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.zero_()
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp(torch.full((1, 3), float(rank + 1), dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is not None
    want = torch.full((2, 3), sum(range(1, size + 1)) / size, dtype=torch.bfloat16)
    torch.testing.assert_close(model.weight.grad, want, rtol=2**-7, atol=0)


# ------------------------------------------------------------------------------------------ torch's own users


@check(raw="fails")
def functional_collectives(rank: int, size: int) -> None:
    import torch.distributed._functional_collectives as funcol

    reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    xs = data("positive", torch.bfloat16, size)
    total = torch.stack([x.double() for x in xs]).sum(0)
    group, chunk = dist.group.WORLD, N // size
    assert group is not None
    expect(funcol.all_reduce(xs[rank], "sum", group) + 0, total, total, size)
    part = slice(rank * chunk, (rank + 1) * chunk)
    expect(reduce_scatter(xs[rank], "avg", 0, group) + 0, total[part] / size, total[part], size)
    equal(all_gather(xs[rank][:6], 0, group) + 0, torch.cat([x[:6] for x in xs]))
    table = split_table(size)
    mine = torch.cat([torch.full((table[rank][j],), 10.0 * rank + j) for j in range(size)])
    received = [table[i][rank] for i in range(size)]
    out = funcol.all_to_all_single(mine, received, table[rank], group) + 0
    equal(out, torch.cat([torch.full((table[i][rank],), 10.0 * i + rank) for i in range(size)]))


@check(raw="fails")
def dtensor_redistribute(rank: int, size: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = mesh_of(size)
    xs = data("positive", torch.bfloat16, size, seed=1)
    total = torch.stack([x.double() for x in xs]).sum(0)
    partial = DTensor.from_local(xs[rank], mesh, [Partial()])
    expect(partial.redistribute(mesh, [Replicate()]).to_local(), total, total, size)
    where = slice(rank * N // size, (rank + 1) * N // size)
    expect(partial.redistribute(mesh, [Shard(0)]).to_local(), total[where], total[where], size)
    equal(DTensor.from_local(xs[rank], mesh, [Shard(0)]).full_tensor(), torch.cat(xs))


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded_gradient(rank: int, mesh: Any, xs: list[Tensor], factor: float | None = None) -> Tensor:
    """The gradient that FSDP2 reduces in bfloat16 where rank r's own is ``xs[r]``; the whole of it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(N))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model: Any = fully_shard(Scale(), mesh=mesh, mp_policy=policy)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model(xs[rank]).backward()
    grad = model.weight.grad
    return grad.full_tensor()


@check(raw="fails")
def fsdp_reduce_scatter(rank: int, size: int) -> None:
    xs = data("positive", torch.bfloat16, size, seed=2)
    total = torch.stack([x.double() for x in xs]).sum(0)
    got = sharded_gradient(rank, mesh_of(size), xs)
    expect(got.bfloat16(), total / size, total / size, size)


@check(raw="fails")
def fsdp_premultiplied(rank: int, size: int) -> None:
    """A divide factor of the user's own makes FSDP2 ask for PREMUL_SUM."""
    xs = data("positive", torch.bfloat16, size, seed=3)
    total = torch.stack([x.double() for x in xs]).sum(0)
    got = sharded_gradient(rank, mesh_of(size), xs, factor=7.0)
    expect(got.bfloat16(), total / 7, total / 7, size)


@check(raw="fails")
def hsdp_all_reduce(rank: int, size: int) -> None:
    """All ranks replicate, none shard: all of the reduction is HSDP's all-reduce."""
    mesh = mesh_of(size, 1, names=("replicate", "shard"))
    xs = data("positive", torch.bfloat16, size, seed=4)
    total = torch.stack([x.double() for x in xs]).sum(0)
    expect(sharded_gradient(rank, mesh, xs).bfloat16(), total / size, total / size, size)


# ------------------------------------------------------------------------------------------------- the worlds


@contextmanager
def world(ctx: Rank, collectives: TorchCollectives) -> Iterator[None]:
    collectives.init(ctx.store(), World(ctx.rank, ctx.size), 30, check=False)
    try:
        yield
    finally:
        collectives.shutdown()


def run_checks(ctx: Rank, names: list[str]) -> dict[str, str]:
    """The traceback of every check that failed on this rank."""
    failed = {}
    for name in names:
        try:
            CHECKS[name](ctx.rank, ctx.size)
        except Exception:
            failed[name] = traceback.format_exc(limit=-2)
    return failed


def raw_and_lowered(ctx: Rank) -> tuple[dict[str, str], dict[str, str]]:
    with world(ctx, TorchCollectives("gloo")):
        assert not isinstance(dist.group.WORLD, InterposedGroup)
        # float8 last: gloo's barrier raises the error of an earlier call again while that is still queued
        raw = run_checks(ctx, sorted(RAW_FAILS, key=lambda name: name == "float8_moves"))
    with world(ctx, CpuCollectives()):
        assert isinstance(dist.group.WORLD, InterposedGroup)
        return raw, run_checks(ctx, list(CHECKS))


def test_three_ranks_raw_and_lowered() -> None:
    results = run_ranks(raw_and_lowered, 3)
    for rank, (_, lowered) in enumerate(results):
        assert not lowered, f"rank {rank}\n" + "\n".join(f"{k}\n{v}" for k, v in lowered.items())
    seen = {name for raw, _ in results for name in raw}
    assert seen == RAW_FAILS, f"raw gloo passes {RAW_FAILS - seen}: the lowering has lost its reason"


REDUCING = ("sum_exact", "sum_random", "average", "nan_in_minmax", "premultiplied")


def hosted(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def lowered_pair(ctx: Rank) -> dict[str, str]:
    """Also: the inner group is a c10d plugin of someone else's."""
    dist.Backend.register_backend("hosted", hosted, devices=["cpu"])
    with world(ctx, TorchCollectives("hosted", CPU_LOWERINGS)):
        return run_checks(ctx, [*REDUCING, *(name for name in CHECKS if name.startswith("strided"))])


def test_two_ranks() -> None:
    assert run_ranks(lowered_pair, 2) == [{}, {}]


def poor_library(ctx: Rank) -> list[str]:
    """What is issued for tensors without elements, and for a product, where the library takes neither."""
    issued: list[str] = []
    issue = process_group._Inner.issue

    def spy(self: Any, call: Call) -> Any:
        issued.append(call.op)
        assert all(tensor.numel() for tensor in call.tensors()), call
        return issue(self, call)

    process_group._Inner.issue = spy
    lowerings = [Lowering(name, "", "", "") for name in ("nothing", "refused_product")]
    with world(ctx, TorchCollectives("gloo", lowerings)):
        for size in (3, 0, 3, 0):  # what is known of a kind of calls is not of the empty ones
            x = torch.ones(size)
            dist.all_reduce(x)
            assert x.tolist() == [float(ctx.size)] * size
        dist.all_gather_into_tensor(torch.empty(0, 2), torch.empty(0, 2))
        dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0), op=dist.ReduceOp.MAX)
        with pytest.raises(Unsupported, match=r"PRODUCT.*has SUM, AVG, MIN and MAX"):
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.PRODUCT)
    return issued


def test_nothing_to_send_and_a_product() -> None:
    assert run_ranks(poor_library, 2) == [["allreduce"] * 6] * 2


UNEVEN = tuple(Lowering(n, "", "", "") for n in ("uneven_all_to_all", "avg_as_sum", *(w.name for w in CPU_LOWERINGS)))


def four_ranks(ctx: Rank) -> dict[str, Any]:
    """Every lowering at once, also those that gloo doesn't need; then subgroups and HSDP over 2x2."""
    issued: list[tuple[str, str]] = []
    issue = process_group._Inner.issue

    def spy(self: Any, call: Call) -> Any:
        issued.extend((call.op, str(t.dtype)) for t in call.tensors())
        return issue(self, call)

    process_group._Inner.issue = spy
    with world(ctx, TorchCollectives("cpu:gloo", UNEVEN)):
        names = ["uneven_all_to_all", "functional_collectives", "fsdp_reduce_scatter", "hsdp_all_reduce"]
        names += ["dtensor_redistribute", "float8_moves", "strided_all_to_all", *REDUCING]
        failed = run_checks(ctx, names)
        issued.clear()
        xs = data("exact", torch.bfloat16, 4, seed=5)
        mesh = mesh_of(2, 2, names=("replicate", "shard"))
        grad = sharded_gradient(ctx.rank, mesh, xs)
        equal(grad, (torch.stack([x.double() for x in xs]).sum(0) / 4).bfloat16().float())
        hsdp = set(issued)
        subgroup(ctx.rank)
    return {"failed": failed, "hsdp": hsdp}


def subgroup(rank: int) -> None:
    """In a group of ranks 1 and 3, roots are global ranks outside and group ranks inside."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return
    assert isinstance(group, InterposedGroup)
    x = column(ramp(rank))
    dist.broadcast(x, 3, group=group)
    equal(x, ramp(3))
    x = column(ramp(rank))
    dist.reduce(x, 3, group=group)
    equal(x, ramp(1) + ramp(3) if rank == 3 else ramp(rank))
    out = [column(torch.zeros(6)) for _ in range(2)] if rank == 3 else None
    dist.gather(column(ramp(rank)), out, 3, group=group)
    for got, r in zip(out or (), (1, 3), strict=False):
        equal(got, ramp(r))
    mean = torch.tensor([1.0 * rank]).bfloat16()
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    assert mean.item() == 2
    dist.destroy_process_group(group)


def test_four_ranks_hsdp_and_subgroups() -> None:
    for result in run_ranks(four_ranks, 4):
        assert result["failed"] == {}
        assert ("reduce_scatter_single", "torch.float32") in result["hsdp"]
        assert ("allreduce", "torch.float32") in result["hsdp"]
        moved = {op for op, dtype in result["hsdp"] if dtype == "torch.bfloat16"}
        assert moved <= {"all_gather_single", "all_gather_single_coalesced", "allgather"}


# ------------------------------------------------------------------------------------------ without processes


class Lone:
    rank, size = 0, 1

    def issue(self, call: Call) -> Any:
        raise AssertionError("no traffic expected")


class Coalescing:
    """An inner group as NCCL's is: what is called between start and end runs at the end."""

    def __init__(self) -> None:
        self.pending: list[Tensor] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        self.pending += tensors
        return _Instant()

    def _start_coalescing(self, device: torch.device) -> None:
        assert not self.pending

    def _end_coalescing(self, device: torch.device) -> Any:
        for tensor in self.pending:
            tensor.mul_(2)  # the other rank holds the same
        return _Instant()


class _Instant(dist.Work):
    def __init__(self) -> None:
        super().__init__()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


def test_results_come_back_after_the_end_of_coalescing() -> None:
    request = SimpleNamespace(
        store=dist.HashStore(),
        group_rank=0,
        group_size=2,
        global_ranks_in_group=[],
        group_id="g",
        timeout=timedelta(1),
    )
    inner: Any = Coalescing()
    group = InterposedGroup("any", request, inner, CPU_LOWERINGS, check=False)
    x, device = torch.ones(3).bfloat16(), torch.device("cpu")
    group._start_coalescing(device)
    group.allreduce(x).wait()
    assert [t.dtype for t in inner.pending] == [torch.float32]
    assert x.tolist() == [1, 1, 1]
    work = group._end_coalescing(device)
    work.wait()
    work.wait()
    assert x.tolist() == [2, 2, 2]


def test_overlapping_output_that_cannot_hold_the_result() -> None:
    windows = torch.zeros(4).as_strided((3, 2), (1, 1))
    step = LIBRARY["contiguous"](Call("all_gather_single", windows, torch.zeros(3, 2)), Lone())
    assert step is not None
    step[0].outputs.copy_(torch.arange(6.0).view(3, 2))
    assert step[1] is not None
    with pytest.raises(ValueError, match="elements share memory"):
        step[1]()
    step[0].outputs.copy_(torch.arange(4.0).as_strided((3, 2), (1, 1)))
    step[1]()
    assert windows.tolist() == [[0, 1], [1, 2], [2, 3]]


def test_lazily_conjugated_input() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j]).conj()
    step = LIBRARY["contiguous"](Call("all_gather_single", torch.zeros(2, dtype=x.dtype), x), Lone())
    assert step is not None
    assert not step[0].inputs.is_conj()
    assert torch.equal(torch.view_as_real(step[0].inputs), torch.tensor([[1.0, -2.0], [3.0, 1.0]]))


def test_every_lowering_is_documented_and_known() -> None:
    assert all(rewrite.__doc__ for rewrite in LIBRARY.values())
    assert {lowering.name for lowering in CPU_LOWERINGS} <= set(LIBRARY)
    assert all(lowering.applies and lowering.into and lowering.reason for lowering in CPU_LOWERINGS)
    with pytest.raises(BackendError, match="avg_as_summ"):
        select([Lowering("avg_as_summ", "", "", "")])
