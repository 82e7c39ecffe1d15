"""What torch.distributed can do with two simulated devices; see ``tests/test_sim_distributed.py``.

Each probe runs on both ranks, in the same order, one after the other in the same processes.
"""

from __future__ import annotations

import copy
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import rand as random_dtensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import Rank
from tests.sim.device import Sim, install
from tests.sim.model import Model, Run
from tests.sim.names import LIBRARY
from tests.sim.probes import same

LIMIT = timedelta(seconds=60)


class Pair:
    """One of two ranks, each with a device of its own."""

    def __init__(self, sim: Sim, rank: int) -> None:
        self.sim, self.rank, self.size = sim, rank, 2
        self.device = sim.device(rank)
        self.host_group: Any = dist.new_group(backend="gloo")

    def full(self, value: float, *shape: int) -> Tensor:
        return torch.full(shape, float(value), device=self.device)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device)

    def run(self, wrap: Callable[[Any], nn.Module], **options: Any) -> Run:
        return Run(str(self.device), wrap=wrap, stream=self.rank, **options)

    def host_run(self, wrap: Callable[[Any], nn.Module], **options: Any) -> Run:
        return Run("cpu", wrap=wrap, stream=self.rank, **options)

    def shard(self, kind: str, **options: Any) -> Callable[[Any], nn.Module]:
        """FSDP2 over both ranks of the device, or of the host."""
        mesh = init_device_mesh(kind, (2,))

        def wrap(model: Any) -> nn.Module:
            for block in model.blocks:
                fully_shard(block, mesh=mesh, **options)
            return fully_shard(model, mesh=mesh, **options)

        return wrap

    @contextmanager
    def folder(self) -> Iterator[str]:
        """The same temporary folder on both, gone when both are done with it."""
        with tempfile.TemporaryDirectory(prefix="accelbridge-sim-") as ours:
            found: list[Any] = [ours]
            dist.broadcast_object_list(found, src=0)
            yield found[0]
            dist.barrier(group=self.host_group)


Probe = Callable[[Pair], None]
PROBES: dict[str, Probe] = {}


def probe(function: Probe) -> Probe:
    PROBES[function.__name__] = function
    return function


def run_all(ctx: Rank, name: str) -> dict[str, str]:
    """Tracebacks by probe; "" where one passed."""
    sim = install(name)
    sim.module.set_device(ctx.rank)
    backend = f"cpu:gloo,{name}:{LIBRARY}"
    dist.init_process_group(backend, store=ctx.store(), rank=ctx.rank, world_size=ctx.size, timeout=LIMIT)
    pair = Pair(sim, ctx.rank)
    found = {}
    for title, function in PROBES.items():
        try:
            function(pair)
            found[title] = ""
        except BaseException:
            found[title] = traceback.format_exc()
        sim.native.clear_faults()
    return found


# ---------------------------------------------------------------------------------------------------- collectives


@probe
def reductions(pair: Pair) -> None:
    for op, expected in ((dist.ReduceOp.SUM, 3.0), (dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MAX, 2.0)):
        x = pair.full(pair.rank + 1, 4)
        dist.all_reduce(x, op=op)
        assert x.tolist() == [expected] * 4
    strided = pair.full(pair.rank + 1, 4, 2)[:, 0]
    dist.all_reduce(strided)
    assert strided.tolist() == [3.0] * 4
    x = pair.full(pair.rank + 1, 2)
    dist.reduce(x, 0)
    assert pair.rank or x.tolist() == [3.0] * 2


@probe
def gathers_and_scatters(pair: Pair) -> None:
    mine = pair.full(pair.rank, 2)
    lists = [pair.empty(2) for _ in range(2)]
    dist.all_gather(lists, mine)
    assert [part.tolist() for part in lists] == [[0, 0], [1, 1]]
    whole = pair.empty(4)
    dist.all_gather_into_tensor(whole, mine)
    assert whole.tolist() == [0, 0, 1, 1]
    part = pair.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(4.0, device=pair.device))
    assert part.tolist() == [[0, 2], [4, 6]][pair.rank]
    dist.gather(mine, lists if pair.rank == 0 else None, dst=0)
    dist.scatter(part, [pair.full(i, 2) for i in range(2)] if pair.rank == 0 else None, src=0)
    assert part.tolist() == [pair.rank] * 2
    dist.broadcast(part, 1)
    assert part.tolist() == [1, 1]


@probe
def all_to_all(pair: Pair) -> None:
    out, mine = pair.empty(4), torch.arange(4.0, device=pair.device) + 10 * pair.rank
    dist.all_to_all_single(out, mine)
    assert out.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][pair.rank]
    outs = [pair.empty(2), pair.empty(2)]
    dist.all_to_all(outs, list(mine.chunk(2)))
    assert torch.cat(outs).tolist() == out.tolist()


@probe
def point_to_point(pair: Pair) -> None:
    other, got = 1 - pair.rank, pair.empty(2)
    ops = [dist.P2POp(dist.isend, pair.full(pair.rank, 2), other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.tolist() == [other] * 2
    if pair.rank == 0:
        dist.send(pair.full(5, 3), 1)
    else:
        got = pair.empty(3)
        dist.recv(got, 0)
        assert got.tolist() == [5] * 3
    dist.barrier()


@probe
def objects(pair: Pair) -> None:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": pair.rank})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    for device in (None, pair.device):
        sent: list[Any] = [pair.rank]
        dist.broadcast_object_list(sent, src=0, device=device)
        assert sent == [0]


@probe
def a_missing_wait_reads_nan(pair: Pair) -> None:
    x = pair.full(1, 4)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    assert x.isnan().all()
    work.wait()
    assert x.tolist() == [2] * 4
    count = torch.ones(4, dtype=torch.long, device=pair.device)
    work = dist.all_reduce(count, async_op=True)
    assert work is not None
    assert count.tolist() == [-1] * 4  # integers have no NaN
    work.wait()
    assert count.tolist() == [2] * 4


@probe
def a_device_sync_finishes_collectives(pair: Pair) -> None:
    x = pair.full(1, 4)
    dist.all_reduce(x, async_op=True)  # the handle is dropped, and the collective goes on
    assert x.isnan().all()
    pair.sim.module.synchronize()
    assert x.tolist() == [2] * 4


@probe
def what_is_seen_complete_may_be_read(pair: Pair) -> None:
    x = pair.full(1, 4)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    deadline = time.monotonic() + LIMIT.total_seconds()
    while not work.is_completed():
        assert time.monotonic() < deadline
    assert x.tolist() == [2] * 4


@probe
def host_tensors_are_refused(pair: Pair) -> None:
    alone = dist.new_group(backend=LIBRARY)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(2), group=alone)


@probe
def functional_collectives(pair: Pair) -> None:
    import torch.distributed._functional_collectives as functional

    world = dist.group.WORLD
    assert world is not None
    gathered = functional.all_gather_tensor(pair.full(pair.rank, 2), 0, world)
    assert gathered.tolist() == [0, 0, 1, 1]
    assert functional.all_reduce(pair.full(1, 2), "sum", world).tolist() == [2, 2]


@probe
def groups_and_meshes(pair: Pair) -> None:
    x = pair.full(1, 1)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    mesh = init_device_mesh(pair.sim.name, (2, 1), mesh_dim_names=("data", "tensor"))
    dist.all_reduce(x, group=mesh.get_group("data"))
    assert x.item() == 4


# ------------------------------------------------------------------------------------------------------- training


def _whole(run: Run) -> list[Tensor]:
    parameters = list(run.model.parameters())
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu() for p in parameters]


def _equals_host(pair: Pair, **options: Any) -> None:
    """Ten steps of FSDP2: the same losses and final weights as on the host, bit for bit."""
    ours = pair.run(pair.shard(pair.sim.name, **options), steps=10)
    host = pair.host_run(pair.shard("cpu", **options), steps=10)
    assert ours.losses() == host.losses()
    for p, q in zip(_whole(ours), _whole(host), strict=True):
        same(p, q)


@probe
def fsdp2_equals_the_host(pair: Pair) -> None:
    _equals_host(pair)


@probe
def fsdp2_in_bfloat16_equals_the_host(pair: Pair) -> None:
    _equals_host(pair, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


@probe
def fsdp2_offloads_to_pinned_memory(pair: Pair) -> None:
    run = pair.run(pair.shard(pair.sim.name, offload_policy=CPUOffloadPolicy()))
    expected = pair.run(pair.shard(pair.sim.name)).losses()
    assert run.losses() == pytest.approx(expected, rel=1e-5)
    local = next(iter(run.model.parameters())).to_local()  # pyright: ignore[reportAttributeAccessIssue]
    assert local.device.type == "cpu"
    assert local.is_pinned()


@probe
def hybrid_sharding(pair: Pair) -> None:
    mesh = init_device_mesh(pair.sim.name, (2, 1), mesh_dim_names=("replicate", "shard"))
    losses = pair.run(lambda model: fully_shard(model, mesh=mesh)).losses()
    assert losses == pytest.approx(pair.run(pair.shard(pair.sim.name)).losses(), rel=1e-5)


@probe
def ddp_equals_the_host(pair: Pair) -> None:
    expected = pair.host_run(lambda m: DistributedDataParallel(m, process_group=pair.host_group)).losses()
    assert pair.run(lambda m: DistributedDataParallel(m, device_ids=[pair.rank])).losses() == expected
    small = {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True}
    assert pair.run(lambda m: DistributedDataParallel(m, **small)).losses() == expected


@probe
def fsdp1(pair: Pair) -> None:
    losses = pair.run(lambda m: FullyShardedDataParallel(m, device_id=pair.device, use_orig_params=True)).losses()
    assert losses[-1] < losses[0]


@probe
def tensor_parallelism(pair: Pair) -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    ours, x = copy.deepcopy(host).to(pair.device), torch.randn(4, 16)
    mesh = init_device_mesh(pair.sim.name, (2,))
    parallelize_module(ours, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(ours(x.to(pair.device)).cpu(), host(x))


@probe
def random_dtensors_differ_by_shard(pair: Pair) -> None:
    mesh = init_device_mesh(pair.sim.name, (2,))
    whole = random_dtensor(8, 4, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    assert not torch.equal(whole[:4].cpu(), whole[4:].cpu())


@probe
def sharded_checkpoint(pair: Pair) -> None:
    import torch.distributed.checkpoint as dcp

    shard = pair.shard(pair.sim.name)
    run = pair.run(shard, steps=1)
    run.losses()
    state, other = run.model.state_dict(), shard(Model().to(pair.device))
    with pair.folder() as folder:
        dcp.save(state, checkpoint_id=folder)
        dcp.load(other.state_dict(), checkpoint_id=folder)
        saving: Any = dcp.async_save(state, checkpoint_id=f"{folder}/async", process_group=pair.host_group)
        saving.result()
    for p, q in zip(other.parameters(), run.model.parameters(), strict=True):
        assert isinstance(p, DTensor)
        assert isinstance(q, DTensor)
        same(p.to_local(), q.to_local())


# --------------------------------------------------------------------------------------------------------- faults


@probe
def a_collective_fails(pair: Pair) -> None:
    with pair.sim.fault("c10d::allreduce", message="injected: link"), pytest.raises(RuntimeError, match="link"):
        dist.all_reduce(pair.full(1, 1))


@probe
def a_collective_hangs_until_its_time_limit(pair: Pair) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    with pair.sim.hang("c10d::allreduce"), pytest.raises(dist.DistBackendError, match="timed out after 1000 ms"):
        dist.all_reduce(pair.full(1, 1), group=group)
