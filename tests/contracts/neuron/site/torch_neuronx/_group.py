"""The group of the double: gloo behind what the vendor's library takes and refuses, for whoever calls it.

torch's kernels of c10d's ops on the device's key are replaced, which is where every collective passes: those of
torch.distributed, functional ones, FSDP2's and DTensor's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from tests.contracts import violate
from torch_neuronx._runtime import RUNTIME  # pyright: ignore[reportMissingImports]

_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
_SUM, _AVG, _MIN, _MAX = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
LOWERED: dict[Any, Any] = {getattr(op, "value", op): op for op in (_SUM, _AVG, _MIN, _MAX)}
_default: Any = None
_library = torch.library.Library("c10d", "IMPL")
calls: list[tuple[str, int]] = []
"""Of every collective: its name, and the size of its group."""


def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """What init_process_group and new_group call for "neuron"."""
    global _default
    inner = dist.ProcessGroupGloo(store, rank, size, timeout)
    if size not in (1, 2, 4, 8, 16) and size % 32:
        raise violate("NEURON-GRP-006", f"a group of {size} ranks")
    made = RUNTIME.sim.native.make_backend(inner, "neuron", timeout)
    if not dist.is_initialized():  # it is the default group that is being made
        RUNTIME.joined(rank, size)
        _default = made
    return made


def _flat(nested: Any) -> list[Tensor]:
    if isinstance(nested, Tensor):
        return [nested]
    return [tensor for each in nested for tensor in _flat(each)]


def _check(name: str, backend: Any, tensors: Any) -> None:
    RUNTIME.start()
    calls.append((name, backend.size()))
    for tensor in _flat(tensors):
        if tensor.device.type != "neuron":
            raise RuntimeError(f"{name} requires all tensors on neuron device, found CPU tensors")
        if tensor.dtype in _FP8:
            raise violate("NEURON-GRP-004", f"{name} of {tensor.dtype}")
        if tensor.dim() and tensor.shape[0] == 0:
            raise RuntimeError(f"{name}: tensors cannot have zero size in dimension 0")


def _reduction(op: Any) -> dist.ReduceOp:
    code = op.op()
    if code not in LOWERED:
        raise RuntimeError(f"AllReduce {dist.ReduceOp.RedOpType(code).name} operation unsupported")
    return dist.ReduceOp(LOWERED[code])


def _backend(group: Any) -> Any:
    return dist.ProcessGroup.unbox(group)._get_backend(torch.device("neuron"))


def _options(kind: Any, *, op: Any = None, root: int | None = None, asynchronous: bool = True) -> Any:
    options = kind()
    if op is not None:
        options.reduceOp = _reduction(op)
    if root is not None:
        options.rootRank = root
    options.asyncOp = asynchronous
    return options


def _kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def put(call: Callable[..., Any]) -> Callable[..., Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch's own is replaced
            _library.impl(name, call, "PrivateUse1")
        return call

    return put


@_kernel("allreduce_")
def _allreduce(tensors: list[Tensor], group: Any, op: Any, sparse: Any, wait: bool = True, limit: int = -1) -> Any:
    backend = _backend(group)
    _check("allreduce", backend, tensors)
    work = backend.allreduce(tensors, _options(c10d.AllreduceOptions, op=op, asynchronous=wait))
    return tensors, work.boxed()


@_kernel("allreduce_coalesced_")
def _allreduce_coalesced(tensors: list[Tensor], group: Any, op: Any, wait: bool = True, limit: int = -1) -> Any:
    backend = _backend(group)
    _check("allreduce_coalesced", backend, tensors)
    options = _options(c10d.AllreduceCoalescedOptions, op=op, asynchronous=wait)
    return backend.allreduce_coalesced(tensors, options).boxed()


@_kernel("broadcast_")
def _broadcast(
    tensors: list[Tensor], group: Any, root: int, root_tensor: int, wait: bool = True, limit: int = -1
) -> Any:
    backend = _backend(group)
    _check("broadcast", backend, tensors)
    work = backend.broadcast(tensors, _options(c10d.BroadcastOptions, root=root, asynchronous=wait))
    return tensors, work.boxed()


@_kernel("reduce_")
def _reduce(
    tensors: list[Tensor], group: Any, op: Any, root: int, root_tensor: int, wait: bool = True, limit: int = -1
) -> Any:
    backend = _backend(group)
    _check("reduce", backend, tensors)
    return backend.reduce(tensors, _options(c10d.ReduceOptions, op=op, root=root, asynchronous=wait)).boxed()


@_kernel("_allgather_base_")
def _allgather_base(out: Tensor, mine: Tensor, group: Any, wait: bool = True, limit: int = -1) -> Any:
    backend = _backend(group)
    _check("_allgather_base", backend, [out, mine])
    return out, backend._allgather_base(out, mine, _options(c10d.AllgatherOptions, asynchronous=wait)).boxed()


@_kernel("allgather_")
def _allgather(outs: list[list[Tensor]], mine: list[Tensor], group: Any, wait: bool = True, limit: int = -1) -> Any:
    backend = _backend(group)
    _check("allgather", backend, [outs, mine])
    return outs, backend.allgather(outs, mine, _options(c10d.AllgatherOptions, asynchronous=wait)).boxed()


@_kernel("allgather_into_tensor_coalesced_")
def _allgather_coalesced(outs: list[Tensor], mine: list[Tensor], group: Any, wait: bool = True) -> Any:
    backend = _backend(group)
    _check("allgather_into_tensor_coalesced", backend, [outs, mine])
    works = [
        backend._allgather_base(out, one, _options(c10d.AllgatherOptions, asynchronous=wait))
        for out, one in zip(outs, mine, strict=True)
    ]
    return _last(works).boxed()


@_kernel("_reduce_scatter_base_")
def _reduce_scatter_base(out: Tensor, all: Tensor, group: Any, op: Any, wait: bool = True, limit: int = -1) -> Any:
    backend = _backend(group)
    _check("_reduce_scatter_base", backend, [out, all])
    options = _options(c10d.ReduceScatterOptions, op=op, asynchronous=wait)
    return out, backend._reduce_scatter_base(out, all, options).boxed()


@_kernel("reduce_scatter_")
def _reduce_scatter(
    outs: list[Tensor], all: list[list[Tensor]], group: Any, op: Any, wait: bool = True, limit: int = -1
) -> Any:
    backend = _backend(group)
    _check("reduce_scatter", backend, [outs, all])
    return outs, backend.reduce_scatter(
        outs, all, _options(c10d.ReduceScatterOptions, op=op, asynchronous=wait)
    ).boxed()


@_kernel("reduce_scatter_tensor_coalesced_")
def _reduce_scatter_coalesced(
    outs: list[Tensor], all: list[Tensor], group: Any, op: Any, wait: bool = True, limit: int = -1
) -> Any:
    backend = _backend(group)
    _check("reduce_scatter_tensor_coalesced", backend, [outs, all])
    works = [
        backend._reduce_scatter_base(out, one, _options(c10d.ReduceScatterOptions, op=op, asynchronous=wait))
        for out, one in zip(outs, all, strict=True)
    ]
    return _last(works).boxed()


@_kernel("gather_")
def _gather(
    outs: list[list[Tensor]], mine: list[Tensor], group: Any, root: int, wait: bool = True, limit: int = -1
) -> Any:
    backend = _backend(group)
    _check("gather", backend, [outs, mine])
    return backend.gather(outs, mine, _options(c10d.GatherOptions, root=root, asynchronous=wait)).boxed()


@_kernel("scatter_")
def _scatter(
    outs: list[Tensor], all: list[list[Tensor]], group: Any, root: int, wait: bool = True, limit: int = -1
) -> Any:
    backend = _backend(group)
    _check("scatter", backend, [outs, all])
    return outs, backend.scatter(outs, all, _options(c10d.ScatterOptions, root=root, asynchronous=wait)).boxed()


@_kernel("alltoall_base_")
def _alltoall_base(
    out: Tensor, mine: Tensor, group: Any, received: Sequence[int], sent: Sequence[int], wait: bool = True,
    limit: int = -1,
) -> Any:  # fmt: skip
    backend = _backend(group)
    _check("alltoall_base", backend, [out, mine])
    for sizes in (received, sent):
        if len(set(sizes)) > 1:
            raise RuntimeError(f"alltoall_base: Only even split sizes are supported. Got {list(sizes)}")
    options = _options(c10d.AllToAllOptions, asynchronous=wait)
    return backend.alltoall_base(out, mine, list(received), list(sent), options).boxed()


@_kernel("alltoall_")
def _alltoall(outs: list[Tensor], mine: list[Tensor], group: Any, wait: bool = True, limit: int = -1) -> Any:
    backend = _backend(group)
    _check("alltoall", backend, [outs, mine])
    if len({tuple(tensor.shape) for tensor in mine}) > 1:
        raise RuntimeError(f"alltoall: Only even split sizes are supported. Got {[list(t.shape) for t in mine]}")
    return outs, backend.alltoall(outs, mine, _options(c10d.AllToAllOptions, asynchronous=wait)).boxed()


@_kernel("barrier")
def _barrier(tensor: Tensor, group: Any, devices: Sequence[int], wait: bool = True, limit: int = -1) -> Any:
    backend = _backend(group)
    if backend is not _default:
        name = dist.ProcessGroup.unbox(group).group_name
        raise NotImplementedError(f"Barrier is implemented only for default group, called barrier on {name}")
    RUNTIME.start()
    return backend.barrier(c10d.BarrierOptions()).boxed()


def _absent(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise violate("NEURON-GRP-008", f"{name} was called")

    return refuse


for _name in ("send", "recv_", "recv_any_source_", "monitored_barrier_", "allgather_coalesced_"):
    _kernel(_name)(_absent(_name.rstrip("_")))


def _last(works: list[Any]) -> Any:
    """One work for all: the others, issued before it, are waited for first."""
    for work in works[:-1]:
        work.wait()
    return works[-1]


dist.Backend.register_backend("neuron", make, devices=["neuron"])
