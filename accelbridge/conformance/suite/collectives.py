"""COL: collectives, on a process group as the backend makes it. Oracle and bounds: ``oracle/collectives.py``.

What is asked of an operation is what ``torch.distributed`` documents for it, since the trainer issues its traffic
there. Data are small whole numbers by hash of rank and index: a sum is exact in any order, and a part that is missing,
doubled, shifted or swapped shows. Only the test of rounding (COL-002) uses other data.

What the same ids mean under the spmd execution model, which knows no ranks, is in ``collectives_spmd.py``.
"""

# torch.distributed re-exports without saying so, and stubs its functions with narrower types than it takes.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelbridge.backend import World
from accelbridge.conformance.bench import TYPED, Bench, is_unsupported
from accelbridge.conformance.oracle import collectives as oracle
from accelbridge.conformance.registry import case
from accelbridge.conformance.suite import collectives_spmd as spmd

_SIZES = (0, 1, 7, 8, 1000, 2**20 + 3)
_FEW = (1, 7, 1000)
_WHOLE = (torch.float32, torch.bfloat16, torch.int64)


def _parts(t: Bench, *shape: int, dtype: torch.dtype = torch.float32, name: str = "", low: int = -8) -> list[Tensor]:
    """What each rank contributes: small integers by hash, so that a sum is exact in any order."""
    label = f"{name}/{shape}/{dtype}"
    return [t.integers(*shape, low=low, high=8, name=f"{label}/rank{r}", dtype=dtype) for r in range(t.world.size)]


def _mine(t: Bench, parts: Sequence[Tensor]) -> Tensor:
    return t.put(parts[t.world.rank])


def _garbage(t: Bench, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """On the device, for what is to be overwritten. (Not NaN: whole numbers have none.)"""
    return t.put(torch.full(shape, 77).to(dtype))


def _floats(t: Bench, op: str, variant: str) -> list[torch.dtype]:
    """Those that training needs, and what else the backend says that it reduces."""
    more = [d for d in (torch.float16, torch.float64) if t.supported(op, str(d).removeprefix("torch."), variant)]
    return [torch.float32, torch.bfloat16, *more]


# ------------------------------------------------------------------------------------------------- each operation


@case("COL-001", "core", worlds=(2,), spmd=spmd.sums_exact)
def all_reduce_exact(t: Bench) -> None:
    """all_reduce SUM of hashed integers is exact, with the same bits on every rank."""
    for size in _SIZES:
        for dtype in _WHOLE:
            parts = _parts(t, size, dtype=dtype)
            x = _mine(t, parts)
            t.run(dist.all_reduce, x)
            t.equal(x, oracle.whole_sum(parts), name=f"{size} {dtype}")


@case("COL-002", "train", worlds=(3,), spmd=spmd.reduction_precision)
def reduction_precision(t: Bench) -> None:
    """Sums of normal and of wide-ranged numbers stay within the bound of the declared reduction precision.

    all_reduce and reduce_scatter_tensor over 3 x 1001 elements; at least 3 ranks, since 2 make one rounding only. The
    precision is float32, or the dtype's own where that is wider, unless the fact ``reduce.precision.<dtype>`` says
    otherwise.
    """
    for dtype in _floats(t, "all_reduce", "sum"):
        name = str(dtype).removeprefix("torch.")
        wider = "float64" if dtype is torch.float64 else "float32"
        reduced = str(t.capabilities.facts.get(f"reduce.precision.{name}", wider))
        for kind in (t.normal, t.wide):
            names = [f"{kind.__name__}/rank{rank}" for rank in range(t.world.size)]
            parts = [kind(1001 * t.world.size, name=label, dtype=dtype) for label in names]
            want, bound = oracle.exact_sum(parts), oracle.sum_bound(parts, reduced)
            x = _mine(t, parts)
            t.run(dist.all_reduce, x)
            t.within(x, want, bound, name=f"all_reduce {name} {kind.__name__}")
            chunk = _garbage(t, 1001, dtype=dtype)
            t.run(dist.reduce_scatter_tensor, chunk, _mine(t, parts))
            want, bound = (oracle.chunk(whole, t.world.rank, t.world.size) for whole in (want, bound))
            t.within(chunk, want, bound, name=f"reduce_scatter {name} {kind.__name__}")


@case("COL-003", "train", worlds=(3,), spmd=spmd.mean_and_product)
def average_and_product(t: Bench) -> None:
    """AVG is the sum over the number of ranks within 2 units in the last place; PRODUCT of powers of two is exact.

    Of each element two ranks hold something, so that it does not matter whether a library divides first. all_reduce
    and reduce_scatter_tensor.
    """
    size, n = 997 * t.world.size, t.world.size
    for dtype in _floats(t, "all_reduce", "avg"):
        holders = torch.arange(size) % n
        every = [part.where(holders != r, 0) for r, part in enumerate(_parts(t, size, dtype=dtype, name="avg", low=1))]
        want = oracle.exact_sum(every) / n
        bound = 2.0 * oracle.units_in_last_place(want, dtype)
        x, chunk = _mine(t, every), _garbage(t, 997, dtype=dtype)
        t.run(dist.all_reduce, x, op=dist.ReduceOp.AVG)
        t.within(x, want, bound, name=f"AVG {dtype}")
        t.run(dist.reduce_scatter_tensor, chunk, _mine(t, every), op=dist.ReduceOp.AVG)
        want, bound = (oracle.chunk(whole, t.world.rank, n) for whole in (want, bound))
        t.within(chunk, want, bound, name=f"reduce_scatter AVG {dtype}")
        powers = [_powers(part) for part in _parts(t, size, dtype=torch.float64, name="product")]
        x = t.put(powers[t.world.rank].to(dtype))
        t.run(dist.all_reduce, x, op=dist.ReduceOp.PRODUCT)
        t.equal(x, torch.stack(powers).prod(0).to(dtype), name=f"PRODUCT {dtype}")


def _powers(x: Tensor) -> Tensor:
    """Of two, from 2^-2 to 2^2, with signs."""
    exponents = (x / 4).trunc()
    return torch.exp2(exponents).where(exponents >= 0, -torch.exp2(exponents))


@case("COL-004", "train", worlds=(3,), spmd=spmd.extremes_and_nan)
def extremes_and_nan(t: Bench) -> None:
    """MIN and MAX are exact; a NaN, or +inf and -inf, on any ranks make a SUM, AVG and PRODUCT NaN on all of them.

    Whether MIN and MAX give NaN too is the fact ``reduce.minmax_nan`` ("propagates", else "undefined").
    """
    n, size = t.world.size, 999
    for dtype in _floats(t, "all_reduce", "max"):
        clean = [t.normal(size, name=f"{dtype}/rank{r}", dtype=dtype) for r in range(n)]
        for op, pick in ((dist.ReduceOp.MIN, torch.amin), (dist.ReduceOp.MAX, torch.amax)):
            x = _mine(t, clean)
            t.run(dist.all_reduce, x, op=op)
            t.equal(x, pick(torch.stack(clean), 0), name=f"{op} {dtype}")
        # NaN at every seventh element, on each rank in turn; opposite infinities at the one after it.
        dirty, place = [part.clone() for part in _parts(t, size, dtype=dtype, low=1)], torch.arange(size)
        for r, part in enumerate(dirty):
            part[(place % 7 == 0) & (place // 7 % n == r)] = torch.nan
            if r < 2:
                part[place % 7 == 1] = torch.inf if r else -torch.inf
        stacked = torch.stack(dirty).double()
        wants = {dist.ReduceOp.SUM: stacked.sum(0), dist.ReduceOp.AVG: stacked.sum(0) / n}
        for op, want in {**wants, dist.ReduceOp.PRODUCT: stacked.prod(0)}.items():
            x = _mine(t, dirty)
            t.run(dist.all_reduce, x, op=op)
            bound = 8.0 * n * oracle.units_in_last_place(want.nan_to_num(0.0, 0.0, 0.0), dtype)
            t.within(x, want, bound, name=f"NaN {op} {dtype}")
        if t.capabilities.facts.get("reduce.minmax_nan") == "propagates":
            for op, pick in ((dist.ReduceOp.MIN, torch.amin), (dist.ReduceOp.MAX, torch.amax)):
                x = _mine(t, dirty)
                t.run(dist.all_reduce, x, op=op)
                t.equal(x, pick(torch.stack(dirty), 0), name=f"NaN {op} {dtype}")


@case("COL-005", "core", worlds=(2,), spmd=spmd.read_by_every_row)
def broadcast_from_every_root(t: Bench) -> None:
    """broadcast gives every rank the bits of the root, whichever rank that is, and leaves the root's own alone."""
    for root in range(t.world.size):
        for size in _SIZES[:-1]:
            for dtype in _WHOLE:
                parts = _parts(t, size, dtype=dtype, name=f"root{root}")
                x = _mine(t, parts)
                t.run(dist.broadcast, x, root)
                t.equal(x, parts[root], name=f"from {root} {size} {dtype}")


@case("COL-006", "train", worlds=(3,), spmd=spmd.into_every_row)
def reduce_to_every_root(t: Bench) -> None:
    """reduce SUM is exact at the root, whichever rank that is. (torch promises nothing of the others' buffers.)"""
    for root in range(t.world.size):
        for size in _FEW:
            parts = _parts(t, size, name=f"root{root}")
            x = _mine(t, parts)
            t.run(dist.reduce, x, root)
            if t.world.rank == root:
                t.equal(x, oracle.whole_sum(parts), name=f"to {root} {size}")
    # The others check something too: what they held must have arrived.
    parts = _parts(t, 9, name="all")
    for root in range(t.world.size):
        x = _mine(t, parts)
        t.run(dist.reduce, x, root, op=dist.ReduceOp.MAX)
        if t.world.rank == root:
            t.equal(x, torch.stack(parts).amax(0), name=f"MAX to {root}")


@case("COL-007", "core", worlds=(2,), spmd=spmd.read_in_order)
def all_gather_in_rank_order(t: Bench) -> None:
    """all_gather, into a list and into one tensor, gives the bits of all ranks in rank order."""
    n = t.world.size
    for size in _SIZES[:-1]:
        for dtype in _WHOLE:
            parts = _parts(t, size, dtype=dtype)
            out = _garbage(t, n * size, dtype=dtype)
            t.run(dist.all_gather_into_tensor, out, _mine(t, parts))
            t.equal(out, torch.cat(parts), name=f"into tensor {size} {dtype}")
            listed = [_garbage(t, size, dtype=dtype) for _ in range(n)]
            t.run(dist.all_gather, listed, _mine(t, parts))
            for rank, got in enumerate(listed):
                t.equal(got, parts[rank], name=f"list {size} {dtype} of {rank}")


@case("COL-008", "core", worlds=(2,), spmd=spmd.sums_split_again)
def reduce_scatter_chunks(t: Bench) -> None:
    """reduce_scatter, of one tensor and of a list, gives chunk i of the exact sum to rank i."""
    n = t.world.size
    for size in _SIZES[:-1]:
        for dtype in _WHOLE:
            parts = _parts(t, n * size, dtype=dtype)
            want = oracle.chunk(oracle.whole_sum(parts), t.world.rank, n)
            out = _garbage(t, size, dtype=dtype)
            t.run(dist.reduce_scatter_tensor, out, _mine(t, parts))
            t.equal(out, want, name=f"tensor {size} {dtype}")
            out = _garbage(t, size, dtype=dtype)
            chunks = [t.put(oracle.chunk(parts[t.world.rank], r, n)) for r in range(n)]
            t.run(dist.reduce_scatter, out, chunks)
            t.equal(out, want, name=f"list {size} {dtype}")


@case("COL-009", "train", worlds=(3,), spmd=spmd.rows_exchanged)
def all_to_all_splits(t: Bench) -> None:
    """all_to_all_single is right with equal splits and with uneven ones, some of them 0; done twice, it gives back x.

    Two-dimensional rows, and one rank that sends nothing at all.
    """
    n, rank = t.world.size, t.world.rank
    even = [[5] * n for _ in range(n)]
    uneven = [[(3 * i + 2 * j) % 5 for j in range(n)] for i in range(n)]
    silent = [[0] * n, *[[(i + 2 * j) % 4 for j in range(n)] for i in range(1, n)]]
    for name, splits in (("even", even), ("uneven", uneven), ("one is silent", silent)):
        parts = [t.integers(sum(row), 4, low=-99, high=99, name=f"{name}/{i}") for i, row in enumerate(splits)]
        sent, received = splits[rank], [row[rank] for row in splits]
        out, back = _garbage(t, sum(received), 4), _garbage(t, sum(sent), 4)
        given = (None, None) if name == "even" else (received, sent)
        t.run(dist.all_to_all_single, out, _mine(t, parts), *given)
        t.equal(out, oracle.exchanged(parts, splits, rank), name=name)
        t.run(dist.all_to_all_single, back, out, *reversed(given))
        t.equal(back, parts[rank], name=f"{name}, and back")


@case("COL-010", "train", worlds=(3,), spmd=spmd.placed_and_read)
def scatter_and_gather(t: Bench) -> None:
    """scatter from and gather to every root give each rank its part, and the root all parts in rank order."""
    n, rank = t.world.size, t.world.rank
    for root in range(n):
        for size in _FEW:
            parts = _parts(t, size, name=f"root{root}")
            out = _garbage(t, size)
            t.run(dist.scatter, out, [t.put(part) for part in parts] if rank == root else None, src=root)
            t.equal(out, parts[rank], name=f"scatter from {root} {size}")
            listed = [_garbage(t, size) for _ in range(n)] if rank == root else None
            t.run(dist.gather, _mine(t, parts), listed, dst=root)
            for other, got in enumerate(listed or []):
                t.equal(got, parts[other], name=f"gather to {root} {size} of {other}")


@case("COL-011", "train", worlds=(3,), spmd=spmd.neighbours)
def point_to_point(t: Bench) -> None:
    """send and recv, in a ring, crossing, and several between the same two ranks, arrive in the order of sending.

    Where the backend declares that tags are matched (fact ``p2p.tags`` = "matched"), a receiver may ask in another
    order; else (the default, "ignored") only the order of sending counts.
    """
    n, rank = t.world.size, t.world.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    parts = _parts(t, 100)
    out = _garbage(t, 100)
    ops = [dist.P2POp(dist.isend, _mine(t, parts), after), dist.P2POp(dist.irecv, out, before)]
    _wait(t, t.run(dist.batch_isend_irecv, ops))
    t.equal(out, parts[before], name="ring")
    peer = {0: 1, 1: 0}.get(rank)
    if peer is not None:  # both receive first: neither may wait for the other's send
        ops = [dist.P2POp(dist.irecv, out, peer), dist.P2POp(dist.isend, _mine(t, parts), peer)]
        _wait(t, t.run(dist.batch_isend_irecv, ops))
        t.equal(out, parts[peer], name="crossing")
    _several(t, order=(0, 1, 2), name="several, in order")
    if t.capabilities.facts.get("p2p.tags") == "matched":
        _several(t, order=(2, 0, 1), name="several, by tag")


def _several(t: Bench, order: Sequence[int], name: str) -> None:
    """Three messages with tags from rank 0 to the last one, which asks for them in ``order``."""
    messages = [t.integers(64, low=-99, high=99, name=f"{name}/{i}") for i in range(3)]
    last = t.world.size - 1
    if t.world.rank == 0:
        works = [t.run(dist.isend, t.put(message), last, tag=i + 1) for i, message in enumerate(messages)]
        _wait(t, works)
    if t.world.rank == last:
        for i in order:
            out = _garbage(t, 64)
            t.run(dist.recv, out, 0, tag=i + 1)
            t.equal(out, messages[i], name=f"{name}: {i}")


def _wait(t: Bench, works: Sequence[Any]) -> None:
    for work in works:
        t.run(work.wait)


@case("COL-012", "core", worlds=(2,), spmd=spmd.synchronize_waits_for_all)
def barrier_waits(t: Bench) -> None:
    """No rank leaves a barrier before the slowest has come to it; each rank in turn comes 100 ms late.

    Who has come is written in a store, so that no two clocks are compared.
    """
    assert t.store is not None
    t.run(dist.barrier)
    for sleeper in range(t.world.size):
        if t.world.rank == sleeper:
            time.sleep(0.1)
            t.store.set(f"came/{sleeper}", "1")
        t.run(dist.barrier)
        t.same(t.store.check([f"came/{sleeper}"]), True, f"rank {sleeper} had come when the barrier opened", "ORDER")


# ------------------------------------------------------------------------------------------------------- groups


@case("COL-013", "train", worlds=(4,), spmd=spmd.halves_do_not_mix)
def concurrent_subgroups(t: Bench) -> None:
    """Subgroups {0, 2} and {1, 3} work at the same time without mixing; who is no member has rank -1 there and keeps
    its data."""
    groups = [t.run(dist.new_group, list(ranks)) for ranks in ((0, 2), (1, 3))]
    rank, which = t.world.rank, t.world.rank % 2
    own, other, members = groups[which], groups[1 - which], (which, which + 2)
    t.same((dist.get_rank(own), dist.get_rank(other)), (members.index(rank), -1), "rank in both groups", "RANKS")
    for size in _FEW:
        parts = _parts(t, size)
        together = [parts[member] for member in members]
        x, out = _mine(t, parts), _garbage(t, 2 * size)
        t.run(dist.all_reduce, x, group=own)
        t.equal(x, oracle.whole_sum(together), name=f"all_reduce {size}")
        t.run(dist.all_gather_into_tensor, out, _mine(t, parts), group=own)
        t.equal(out, torch.cat(together), name=f"all_gather {size}")
        x = _mine(t, parts)
        t.run(dist.broadcast, x, members[1], group=own)
        t.equal(x, together[1], name=f"broadcast {size}")
    # torch warns here, and does nothing.
    x = _mine(t, _parts(t, 9, name="no member"))
    t.run(dist.all_reduce, x, group=other)
    t.equal(x, _parts(t, 9, name="no member")[rank], name="a call of no member")


@case("COL-014", "train", worlds=(2,), group=False, spmd=spmd.one_way_is_identity)
def alone_is_identity(t: Bench) -> None:
    """In a group of one rank, the world or a subgroup of it, every collective is the identity."""
    assert t.store is not None
    collectives = t.backend.collectives
    alone_too = [] if collectives.before_device else [(dist.HashStore(), World(run_id="alone"))]
    for store, world in (*alone_too, (t.store, t.world)):  # a group that lasts has one size
        t.run(collectives.init, store, world, 60.0, False)
        try:
            alone = [t.run(dist.new_group, [rank]) for rank in range(world.size)]
            _identity(t, alone[world.rank], world.rank)
            if world.size == 1:
                _identity(t, None, 0)
        finally:
            t.run(collectives.shutdown)


def _identity(t: Bench, group: Any, me: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = _parts(t, 6, 5, dtype=dtype)[t.world.rank]
        known = t.capabilities.support("all_reduce", str(dtype).removeprefix("torch."), "product")
        product = [dist.ReduceOp.PRODUCT] if known else []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, *product):
            _alone(t, x, f"all_reduce {op}", lambda given, out, op=op: dist.all_reduce(out.copy_(given), op, group))
        calls: dict[str, Callable[[Tensor, Tensor], Any]] = {
            "broadcast": lambda given, out: dist.broadcast(out.copy_(given), me, group),
            "reduce": lambda given, out: dist.reduce(out.copy_(given), me, group=group),
            "all_gather": lambda given, out: dist.all_gather([out], given, group),
            "all_gather_into_tensor": lambda given, out: dist.all_gather_into_tensor(out, given, group),
            "reduce_scatter": lambda given, out: dist.reduce_scatter(out, [given], group=group),
            "reduce_scatter_tensor": lambda given, out: dist.reduce_scatter_tensor(out, given, group=group),
            "all_to_all_single": lambda given, out: dist.all_to_all_single(out, given, group=group),
            "scatter": lambda given, out: dist.scatter(out, [given], me, group),
            "gather": lambda given, out: dist.gather(given, [out], me, group),
        }
        for name, call in calls.items():
            _alone(t, x, name, call)
    t.run(dist.barrier, group)


def _alone(t: Bench, x: Tensor, name: str, call: Callable[[Tensor, Tensor], Any]) -> None:
    out = _garbage(t, *x.shape, dtype=x.dtype)
    with t.must_not_raise():
        call(t.put(x), out)
    t.equal(out, x, name=f"{name} {x.dtype}")


# ------------------------------------------------------------------------------------------- time, order, memory


@case("COL-015", "core", worlds=(2,), spmd=spmd.steps_queued)
def asynchronous(t: Bench) -> None:
    """After wait() the value is there: 1,000 all_reduces of what the device still computes when they are issued.

    What follows a wait reads the result at once, on the device. In some repeats one rank comes late, so that a wait
    which does not wait shows.
    """
    repeats, size, late = 1000, 256, {0: 10, 1: 50, 2: 500, 3: 999}
    parts = _parts(t, repeats, size)
    mine, found = _mine(t, parts), []
    for i in range(repeats):
        if late.get(4 * i // repeats) == i and i % t.world.size == t.world.rank:
            time.sleep(0.05)
        slow = mine[i] * 1.0  # queued where the device works by itself
        work = t.run(dist.all_reduce, slow, async_op=True)
        t.run(work.wait)
        found.append(slow + 0.0)
    t.equal(torch.stack(found), oracle.whole_sum(parts))


@case("COL-016", "train", worlds=(3,), spmd=spmd.views)
def strided_tensors(t: Bench) -> None:
    """Transposed, sliced, strided and offset tensors are right by value, or refused by a typed error: never wrong.

    all_reduce, broadcast, reduce, all_gather_into_tensor, reduce_scatter over a list, all_to_all_single. A dense view
    with an offset must work.
    """
    n, rank = t.world.size, t.world.rank
    for layout in ("offset", "transposed", "columns", "every second row"):
        parts = _parts(t, 6, 4, name=layout)
        total = oracle.whole_sum(parts)
        _strided(t, layout, "all_reduce", parts, total, lambda x, out: dist.all_reduce(x))
        _strided(t, layout, "broadcast", parts, parts[1], lambda x, out: dist.broadcast(x, 1))
        want = total if rank == 2 else None
        _strided(t, layout, "reduce", parts, want, lambda x, out: dist.reduce(x, 2))
        gathered = torch.cat(parts)
        _strided(t, layout, "all_gather", parts, gathered, lambda x, out: dist.all_gather_into_tensor(out, x))
        splits = [[2] * n for _ in range(n)]
        _strided(t, layout, "all_to_all", parts, oracle.exchanged(parts, splits, rank), _all_to_all)
        _strided(t, layout, "reduce_scatter", parts, total, lambda x, out: dist.reduce_scatter(out, [x] * n))


def _all_to_all(x: Tensor, out: Tensor) -> None:
    dist.all_to_all_single(out, x)


def _laid_out(t: Bench, x: Tensor, layout: str) -> Tensor:
    """The host tensor ``x`` [rows, columns] on the device, in other places of memory."""
    rows, columns = x.shape
    memory = t.put(torch.full((3 * rows * columns + 8,), 55.0))
    if layout == "transposed":
        view = memory[: rows * columns].view(columns, rows).t()
    elif layout == "columns":
        view = memory[: 3 * rows * columns].view(rows, 3 * columns)[:, columns : 2 * columns]
    elif layout == "every second row":
        view = memory[: 2 * rows * columns].view(2 * rows, columns)[::2]
    else:
        view = memory[3 : 3 + rows * columns].view(rows, columns)
    return view.copy_(t.put(x))


def _strided(
    t: Bench, layout: str, name: str, parts: list[Tensor], want: Tensor | None, call: Callable[[Tensor, Tensor], Any]
) -> None:
    """``call(x, out)`` on tensors that are laid out so; the result is in ``out`` where it writes that, else in x."""
    x = _laid_out(t, parts[t.world.rank], layout)
    whole = torch.full(want.shape if want is not None else parts[0].shape, 77.0)
    out = _laid_out(t, whole, layout)
    try:
        call(x, out)
    except TYPED as error:
        if layout == "offset":
            t.fail("ERROR", f"{name} of a dense view: {error}")
        return
    if want is not None:
        in_place = name in ("all_reduce", "broadcast", "reduce")
        t.equal(x if in_place else out, want, name=f"{name} {layout}")


@case("COL-017", "train", worlds=(3,), spmd=spmd.in_place)
def shared_memory(t: Bench) -> None:
    """Input and output that are the same chunk give the bits of separate ones; overlapping ones too, or an error.

    all_gather_into_tensor from its own chunk of the output and reduce_scatter_tensor into its own chunk of the input
    are what sharded training does; views that overlap otherwise may be refused, by a typed error.
    """
    n, rank, size = t.world.size, t.world.rank, 333
    parts = _parts(t, n * size)
    total = oracle.whole_sum(parts)
    pieces = [oracle.chunk(part, 0, n) for part in parts]
    for shift, name in ((rank * size, "own chunk"), (size // 2, "overlap")):
        memory = _garbage(t, n * size)
        memory[shift : shift + size] = _mine(t, pieces)
        if _done(t, name, lambda m=memory, s=shift: dist.all_gather_into_tensor(m, m[s : s + size])):
            t.equal(memory, torch.cat(pieces), name=f"all_gather {name}")
        memory = _mine(t, parts)
        if _done(t, name, lambda m=memory, s=shift: dist.reduce_scatter_tensor(m[s : s + size], m)):
            t.equal(memory[shift : shift + size], oracle.chunk(total, rank, n), name=f"reduce_scatter {name}")
    x, out = _mine(t, parts), _garbage(t, size)
    t.run(dist.reduce_scatter_tensor, out, x)
    t.equal(out, oracle.chunk(total, rank, n), name="separate")
    t.equal(x, parts[rank], name="the input of a separate call stays")


def _done(t: Bench, name: str, call: Callable[[], Any]) -> bool:
    """Whether ``call`` was made rather than refused."""
    try:
        call()
    except TYPED as error:
        if name == "own chunk":
            t.fail("ERROR", f"{name}: {error}")
        return False
    return True


@case("COL-018", "train", worlds=(3,), spmd=spmd.subnormals)
def subnormals(t: Bench) -> None:
    """Subnormal float32 summands are kept, or count as 0 where ``ftz.float32`` = "flushed" says so; -0 + -0 = -0."""
    tiny = 2.0**-149
    parts = [part.double() * tiny for part in _parts(t, 500, dtype=torch.float64, low=1)]
    kept = torch.stack(parts).sum(0).float()
    flushed = t.capabilities.facts.get("ftz.float32") == "flushed"
    x = t.put(parts[t.world.rank].float())
    t.run(dist.all_reduce, x)
    t.equal(x, torch.zeros(500) if flushed else kept, name="subnormal")
    zeros = torch.zeros(8)
    zeros[::2] = -0.0
    x = t.put(zeros)
    t.run(dist.all_reduce, x)
    t.equal(x.signbit(), zeros.signbit(), name="sign of zero")


@case("COL-019", "train", worlds=(3,), spmd=spmd.many_in_one_graph)
def many_in_flight(t: Bench) -> None:
    """500 small collectives that are in flight together, of several kinds, are all right, in whatever order they are
    waited for; one rank starts late."""
    n, rank = t.world.size, t.world.rank
    if rank == n - 1:
        time.sleep(0.1)
    pending: list[tuple[Any, Tensor, Tensor, str]] = []
    parts = _parts(t, 500, 30)
    for i in range(500):
        rows = [part[i] for part in parts]
        x, out = t.put(rows[rank]), _garbage(t, 10)
        if i % 3 == 0:
            pending.append((dist.all_reduce(x, async_op=True), x, oracle.whole_sum(rows), f"all_reduce {i}"))
        elif i % 3 == 1:
            pending.append((dist.broadcast(x, i % n, async_op=True), x, rows[i % n], f"broadcast {i}"))
        else:
            want = oracle.chunk(oracle.whole_sum(rows), rank, n)
            work = dist.reduce_scatter_tensor(out, x, async_op=True)
            pending.append((work, out, want, f"reduce_scatter {i}"))
    for work, got, want, name in reversed(pending):
        t.run(work.wait)
        t.equal(got + 0, want, name=name)


@case("COL-020", "fp8", worlds=(3,), spmd=spmd.bytes_moved)
def fp8_moves_bits(t: Bench) -> None:
    """all_gather and broadcast of 8-bit floats move every bit pattern; a sum of them is refused by a typed error,
    unless the backend declares one (then: right to the precision of ``reduce.precision.<dtype>``, COL-002)."""
    codes = torch.arange(256, dtype=torch.int64)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        parts = [((codes * 3 + 85 * r) % 256).to(torch.uint8) for r in range(t.world.size)]
        mine = _mine(t, parts).view(dtype)
        out = t.put(torch.zeros(256 * t.world.size, dtype=torch.uint8)).view(dtype)
        t.run(dist.all_gather_into_tensor, out, mine)
        t.equal(out.view(torch.uint8), torch.cat(parts), name=f"all_gather {dtype}")
        t.run(dist.broadcast, mine, 1)
        t.equal(mine.view(torch.uint8), parts[1], name=f"broadcast {dtype}")
        if not t.supported("all_reduce", str(dtype).removeprefix("torch."), "sum"):
            t.raises(TYPED, dist.all_reduce, _mine(t, parts).view(dtype))


@case("COL-021", "train", worlds=(3,), spmd=spmd.every_dtype)
def every_dtype(t: Bench) -> None:
    """Every dtype is reduced, gathered and broadcast exactly, or refused by a typed error on every rank."""
    kinds = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
    for dtype in (*kinds, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        parts = _parts(t, 50, dtype=torch.int64, low=0, name=str(dtype))
        parts = [part.to(dtype) for part in parts]
        largest = torch.stack(parts).double().amax(0).to(dtype)
        x, y, out = _mine(t, parts), _mine(t, parts), _garbage(t, 50 * t.world.size, dtype=dtype)
        plain = {
            "MAX": (x, largest, lambda x=x: dist.all_reduce(x, op=dist.ReduceOp.MAX)),
            "broadcast": (y, parts[1], lambda y=y: dist.broadcast(y, 1)),
            "all_gather": (out, torch.cat(parts), lambda o=out, p=parts: dist.all_gather_into_tensor(o, _mine(t, p))),
        }
        if dtype is not torch.bool:  # what a sum of truth values is, nobody says
            z = _mine(t, parts)
            plain["SUM"] = (z, oracle.whole_sum(parts), lambda z=z: dist.all_reduce(z))
        for name, (got, want, call) in plain.items():
            _right_or_refused(t, f"{name} {dtype}", dtype, got, want, call)


def _right_or_refused(
    t: Bench, name: str, dtype: torch.dtype, got: Tensor, want: Tensor, call: Callable[[], Any]
) -> None:
    needed = dtype in (torch.float32, torch.bfloat16, torch.int64)
    try:
        call()
    except Exception as error:
        good = not needed and (is_unsupported(error) or isinstance(error, (ValueError, TypeError)))
        t.same(good, True, f"{name} refused: {type(error).__name__}: {str(error).splitlines()[0]}", "ERROR")
        return
    t.equal(got, want, name=name)


@case("COL-022", "train", worlds=(3,), spmd=spmd.deterministic)
def deterministic(t: Bench) -> None:
    """Where the backend declares itself deterministic: all_reduce and reduce_scatter of the same data give the same
    bits 50 times over, and all_reduce gives them on every rank."""
    t.needs(t.capabilities.deterministic, "determinism")
    n, size = t.world.size, 3000
    parts = [t.wide(size, name=f"rank{r}") for r in range(n)]
    reduced, scattered = [], []
    for _ in range(50):
        x, out = _mine(t, parts), _garbage(t, size // n)
        t.run(dist.all_reduce, x)
        t.run(dist.reduce_scatter_tensor, out, _mine(t, parts))
        reduced.append(x)
        scattered.append(out)
    everywhere = [torch.empty_like(reduced[0]) for _ in range(n)]
    t.run(dist.all_gather, everywhere, reduced[0])
    first, chunk = reduced[0].cpu(), scattered[0].cpu()
    t.equal(torch.stack(reduced), first.expand(50, -1), name="all_reduce")
    t.equal(torch.stack(scattered), chunk.expand(50, -1), name="reduce_scatter")
    t.equal(torch.stack(everywhere), first.expand(n, -1), name="across ranks")


@case(
    "COL-023",
    "scale",
    worlds=(8, 3, 5, 6, 7),
    timeout_s=300.0,
    spmd="how many devices there are is fixed when the runtime starts; COL-001 and COL-005 to COL-011 ask of numbers "
    "of rows that these do not divide, and of fewer rows than devices",
)
def other_world_sizes(t: Bench) -> None:
    """What COL-001, 007, 008 and 009 assert, at 8 ranks and at numbers of ranks that are no power of two."""
    for body in (all_reduce_exact, all_gather_in_rank_order, reduce_scatter_chunks, all_to_all_splits):
        body(t)
