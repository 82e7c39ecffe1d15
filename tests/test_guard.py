"""The debug guard on real gloo processes: what it must catch, on every rank and with both call sites, and
what it must let pass. A mismatch leaves the group usable, so one world runs all cases one after another."""

# pyright: reportPrivateImportUsage=false
# (torch.distributed re-exports without saying so)

from __future__ import annotations

import linecache
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accelbridge.backend import World
from accelbridge.cpu.collectives import CpuCollectives
from accelbridge.errors import BackendError, CollectiveMismatch
from accelbridge.portable.collectives import TorchCollectives
from accelbridge.portable.guard import differences
from accelbridge.portable.process_group import InterposedGroup
from tests.ranks import Rank, outcomes, run_ranks

reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# ------------------------------------------------------------ calls that differ between rank 0 and the others

Case = Callable[[int, int], object]
MISMATCHES: list[tuple[Case, str]] = []


def mismatch(found: str) -> Callable[[Case], Case]:
    """Register a case whose message must match the regular expression ``found``."""

    def register(fn: Case) -> Case:
        MISMATCHES.append((fn, found))
        return fn

    return register


@mismatch(r"tensors: float32\[4\] on rank 0; float32\[5\] on ranks 1, 2")
def shape(rank: int, size: int) -> object:
    if rank == 0:
        return dist.all_reduce(torch.ones(4))
    return dist.all_reduce(torch.ones(5))


@mismatch(r"tensors: float32\[4\] on rank 0; bfloat16\[4\] on ranks 1, 2")
def dtype(rank: int, size: int) -> object:
    if rank == 0:
        return dist.broadcast(torch.ones(4), 0)
    return dist.broadcast(torch.ones(4).bfloat16(), 0)


@mismatch(r"root: 0 on rank 0; 1 on ranks 1, 2")
def root(rank: int, size: int) -> object:
    if rank == 0:
        return dist.broadcast(torch.ones(4), 0)
    return dist.broadcast(torch.ones(4), 1)


@mismatch(r"reduce op: SUM on rank 0; MAX on ranks 1, 2")
def reduce_op(rank: int, size: int) -> object:
    if rank == 0:
        return dist.all_reduce(torch.ones(4))
    return dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX)


@mismatch(r"op: broadcast on rank 0; allreduce on ranks 1, 2")
def operation(rank: int, size: int) -> object:
    if rank == 0:
        return dist.broadcast(torch.ones(4), 0)
    return dist.all_reduce(torch.ones(4))


@mismatch(r"op: reduce_scatter_single on rank 0; all_gather_single on ranks 1, 2")
def order(rank: int, size: int) -> object:
    """Two calls that every rank makes, in another order."""
    small, large = torch.ones(2), torch.ones(2 * size)
    calls: list[Callable[[], object]] = [
        lambda: reduce_scatter_single(small, large),
        lambda: all_gather_single(large, small),
    ]
    for call in calls if rank == 0 else reversed(calls):
        call()
    return None


@mismatch(r"rank 0 sends float32\[3\] to rank 1, which expects float32\[5\]")
def gathered_shape(rank: int, size: int) -> object:
    if rank == 0:
        return dist.all_gather([torch.ones(3) for _ in range(size)], torch.ones(3))
    return dist.all_gather([torch.ones(5) for _ in range(size)], torch.ones(5))


@mismatch(r"rank 0 sends float32 x 2 to rank 1, which expects float32 x 1")
def splits(rank: int, size: int) -> object:
    ones = [1] * size
    if rank == 0:
        return dist.all_to_all_single(torch.ones(size), torch.ones(2 * size), ones, [2] * size)
    return dist.all_to_all_single(torch.ones(size), torch.ones(size), ones, ones)


@mismatch(r"rank 1 sends float32\[2\] to rank 0, which expects float32\[4\]")
def gather_shape(rank: int, size: int) -> object:
    if rank == 0:
        return dist.gather(torch.ones(4), [torch.ones(4) for _ in range(size)], 0)
    return dist.gather(torch.ones(2), None, 0)


@mismatch(r"tensors: float32\[2\], float32\[3\] on rank 0; float32\[2\] on ranks 1, 2")
def coalesced(rank: int, size: int) -> object:
    tensors = [torch.ones(2), torch.ones(3)][: 2 if rank == 0 else 1]
    with dist._coalescing_manager():
        for x in tensors:
            dist.all_reduce(x)
    return None


@mismatch(r"tensors: float32\[4\] on rank 0; float32\[6\] on ranks 1, 2")
def functional(rank: int, size: int) -> object:
    """Raised in Python code that C++ called."""
    import torch.distributed._functional_collectives as funcol

    group: Any = dist.group.WORLD
    if rank == 0:
        return funcol.all_reduce(torch.ones(4), "sum", group)
    return funcol.all_reduce(torch.ones(6), "sum", group)


@mismatch(r"root: 0 on rank 0; 1 on ranks 1, 2|tensors: .*")
def object_root(rank: int, size: int) -> object:
    if rank == 0:
        return dist.broadcast_object_list([1], 0)
    return dist.broadcast_object_list([1], 1)


def mismatches() -> list[str]:
    """The message of every case, in order; fails where a case does not raise."""
    rank, size = dist.get_rank(), dist.get_world_size()
    texts = []
    for case, _ in MISMATCHES:
        start = time.monotonic()
        with pytest.raises(CollectiveMismatch) as caught:
            case(rank, size)
        assert time.monotonic() - start < 5, f"{case.__name__} took too long to be found"
        texts.append(str(caught.value))
    x = torch.ones(2)
    dist.all_reduce(x)  # nothing has been sent, so the group still works
    assert x.tolist() == [size] * 2
    return texts


def absent() -> str:
    """Rank 1 comes to the second call only after the others have given up."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 1:
        time.sleep(3)
    start = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:
        dist.all_reduce(torch.ones(1), group=group)
    assert time.monotonic() - start < 6
    return str(caught.value)


def wrong(ctx: Rank) -> tuple[list[str], str, list[str]]:
    collectives = CpuCollectives()
    collectives.init(ctx.store(), World(ctx.rank, ctx.size), 30, check=True)
    texts, away = mismatches(), absent()
    collectives.shutdown()
    return texts, away, lives(ctx)


@pytest.fixture(scope="module")
def wrong_by_rank() -> list[Any]:
    """All of it in one world: starting processes is what takes the time."""
    return run_ranks(wrong, 3)


def test_every_mismatch_is_found_on_every_rank_with_the_call_sites(wrong_by_rank: list[Any]) -> None:
    for i, (case, found) in enumerate(MISMATCHES):
        for rank, (texts, _, _) in enumerate(wrong_by_rank):
            assert re.search(found, texts[i]), f"{case.__name__} on rank {rank}:\n{texts[i]}"
            assert "of ranks 0, 1, 2" in texts[i]
            sites = re.findall(r"rank \d: .* at (.*):(\d+)", texts[i])
            assert len(sites) == 3
            for file, line in sites:
                assert Path(file) == Path(__file__)
                text = linecache.getline(file, int(line))
                assert "dist." in text or "_single(" in text or "funcol." in text or "coalescing" in text, text


def test_a_rank_that_makes_no_call_is_named_everywhere(wrong_by_rank: list[Any]) -> None:
    for _, text, _ in wrong_by_rank:
        assert "ranks 0, 2 called it, rank 1 made no call" in text
        assert f"at {__file__}:" in text


# -------------------------------------------------------------------------------------- traffic that is right


def object_traffic(rank: int, size: int) -> None:
    """Objects of very different sizes, so that the ranks' tensors differ until c10d has padded them."""
    mine = "x" * (10 ** (rank + 1))
    every: list[Any] = [None] * size
    dist.all_gather_object(every, mine)
    assert [len(e) for e in every] == [10 ** (r + 1) for r in range(size)]
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(mine, gathered, 1)
    box: list[Any] = [mine if rank == 1 else None]
    dist.broadcast_object_list(box, 1)
    assert len(box[0]) == 100
    dist.scatter_object_list(box, ["y" * (r + 1) for r in range(size)] if rank == 0 else None, 0)
    assert box == ["y" * (rank + 1)]


def uneven_traffic(rank: int, size: int) -> None:
    """Shapes that differ between ranks and are right."""
    sent = [(rank + j) % 3 for j in range(size)]  # symmetric: what i sends to j, j sends to i
    out = torch.empty(sum(sent), 2)
    dist.all_to_all_single(out, torch.ones(sum(sent), 2), sent, sent)
    dist.all_to_all([torch.empty(n) for n in sent], [torch.ones(n) for n in sent])
    lists = [torch.empty(3) for _ in range(size)]
    dist.gather(torch.ones(3), lists if rank == 0 else None, 0)
    dist.scatter(torch.empty(3), lists if rank == 0 else None, 0)
    factor: Any = dist._make_nccl_premul_sum(float(rank + 1))
    x = torch.ones(2)
    dist.all_reduce(x, factor)
    assert x.tolist() == [size * (size + 1) / 2] * 2


def paired_traffic(rank: int, size: int) -> None:
    """Point to point between two ranks only, and equal calls from different lines."""
    if rank == 0:
        dist.send(torch.ones(2), 1)
    elif rank == 1:
        dist.recv(torch.empty(2), 0)
    if rank == 0:
        dist.broadcast(torch.ones(2), 0)
    else:
        dist.broadcast(torch.empty(2), 0)
    group = dist.new_group([0, 1])
    if rank < 2:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, torch.empty(1), 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    dist.barrier()


def training_traffic(rank: int, size: int, folder: str) -> None:
    """Two FSDP2 steps (plain and HSDP), tensor redistribution, and a checkpoint written and read."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for dims, names in (((size,), ("shard",)), ((2, size // 2), ("replicate", "shard"))):
        mesh = init_device_mesh("cpu", dims, mesh_dim_names=names)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(4, 5)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        dcp.save(state, checkpoint_id=f"{folder}/{len(dims)}")
        dcp.load(state, checkpoint_id=f"{folder}/{len(dims)}")
        whole = state["0.weight"].full_tensor()
        split = DTensor.from_local(whole, mesh, [Replicate()] * len(dims)).redistribute(mesh, [Shard(0)] * len(dims))
        assert torch.equal(split.full_tensor(), whole)


def right(ctx: Rank, folder: str) -> None:
    collectives = CpuCollectives()
    collectives.init(ctx.store(), World(ctx.rank, ctx.size), 30, check=True)
    assert isinstance(dist.group.WORLD, InterposedGroup)
    object_traffic(ctx.rank, ctx.size)
    uneven_traffic(ctx.rank, ctx.size)
    paired_traffic(ctx.rank, ctx.size)
    training_traffic(ctx.rank, ctx.size, folder)
    two_threads(ctx, collectives)
    keys(ctx)
    collectives.shutdown()


def two_threads(ctx: Rank, collectives: TorchCollectives) -> None:
    """A control group works beside the default group, on a thread of its own."""
    control = collectives.control_group(30)
    assert not isinstance(control, InterposedGroup)
    sums: list[int] = []

    def gossip() -> None:
        for i in range(30):
            every: list[Any] = [None] * ctx.size
            dist.all_gather_object(every, ctx.rank + i, group=control)
            sums.append(sum(every))

    thread = threading.Thread(target=gossip)
    thread.start()
    for _ in range(30):
        dist.all_reduce(torch.ones(10))
    thread.join(30)
    assert sums == [sum(range(ctx.size)) + i * ctx.size for i in range(30)]


def keys(ctx: Rank) -> None:
    """The guard takes its keys back: at most one per rank stays."""
    store = ctx.store()
    counts = []
    for _ in range(2):
        for _ in range(25):
            dist.all_reduce(torch.ones(1))
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    assert counts[1] - counts[0] <= 2 * ctx.size, counts


def test_right_traffic_passes(tmp_path: Path) -> None:
    run_ranks(right, 4, str(tmp_path))


# ----------------------------------------------------------------------------------------- life of the groups


def lives(ctx: Rank) -> list[str]:
    """Init and shut down again with other options, in one process; the guard is what makes the difference."""
    world, store, seen = World(ctx.rank, ctx.size), ctx.store(), []
    native = TorchCollectives("gloo")
    native.init(store, world, 30, check=False)
    seen.append(type(dist.group.WORLD).__name__)
    x = torch.ones(2)
    dist.all_reduce(x, dist.ReduceOp.MAX if ctx.rank else dist.ReduceOp.SUM)  # passes, and means nothing
    with pytest.raises(BackendError, match="default process group"):
        TorchCollectives("gloo").init(store, world, 30, check=False)
    native.shutdown()
    native.shutdown()
    for collectives, check in ((CpuCollectives(), False), (native, True), (CpuCollectives(), True)):
        collectives.init(store, world, 30, check)
        seen.append(type(dist.group.WORLD).__name__)
        x = torch.full((3,), 1 / 3).bfloat16()
        dist.all_reduce(x)
        collectives.shutdown()
        assert not dist.is_initialized()
    assert native.environment(world) == {}
    return seen


def test_groups_can_be_made_again_with_other_options(wrong_by_rank: list[Any]) -> None:
    for _, _, seen in wrong_by_rank:
        assert seen == ["ProcessGroup", "InterposedGroup", "InterposedGroup", "InterposedGroup"]


# ------------------------------------------------------------------------------------------ without processes


def test_differences_name_the_ranks() -> None:
    base: dict[str, Any] = {"op": "a", "reduce op": "", "root": None, "tensors": ["x"]}
    one = {**base, "sends": [None, "p"], "expects": [None, None]}
    other = {**base, "sends": [None, None], "expects": ["q", None]}
    assert differences([one, one | {"sends": [None, None]}], [4, 9]) == []
    assert differences([one, other], [4, 9]) == ["rank 4 sends p to rank 9, which expects q"]
    assert differences([one, other | {"op": "b"}], [4, 9]) == ["op: a on rank 4; b on rank 9"]


def fails(ctx: Rank) -> None:
    if ctx.rank == 0:
        time.sleep(60)
    if ctx.rank == 1:
        raise ValueError("broken")
    os._exit(7)


def test_ranks_reports_hangs_failures_and_deaths() -> None:
    found = outcomes(fails, 3, timeout=2)
    assert [o.error for o in found] == ["timeout", "ValueError", "died"]
    assert "broken" in found[1].traceback
    assert "exit code 7" in found[2].message
