"""The chip's collective library, "toyccl": gloo under another name, which refuses AVG as several vendors' do.

What gloo itself gets wrong is lowered here too; see ``accelbridge.portable.lowerings`` for what each name does.
"""

# pyright: reportPrivateImportUsage=false
# (torch.distributed re-exports without saying so)

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from accelbridge.backend import Lowering, World
from accelbridge.portable.collectives import TorchCollectives
from accelbridge.portable.lowerings import reduce_op_name
from accelbridge.portable.process_group import native_group

LOWERINGS = (
    Lowering("contiguous", "strided tensors", "contiguous copies", "gloo takes strided memory as if it were dense"),
    Lowering("avg_as_sum", "AVG", "SUM, then a division", "toyccl has no AVG"),
    Lowering("premul_as_sum", "PREMUL_SUM", "SUM of multiplied inputs", "gloo has no PREMUL_SUM"),
    Lowering("float32_reduce", "sums of 16-bit floats", "sums in float32", "gloo rounds at every addition"),
    Lowering("nan_minmax", "MIN and MAX", "the same over integers", "gloo keeps a NaN or drops it"),
    Lowering("fp8_bytes", "8-bit floats", "bytes", "gloo moves no 8-bit floats"),
    Lowering("list_all_to_all", "all_to_all over lists", "all_to_all_single", "older gloo has none over lists"),
)

OPS = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "send", "recv", "recv_anysource",
    "barrier", "allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "alltoall", "all_to_all_single",
    "_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "alltoall_base",
)  # fmt: skip


class ToyGroup(dist.ProcessGroup):
    """gloo, without AVG."""

    def __init__(self, gloo: dist.ProcessGroup) -> None:
        super().__init__(gloo.rank(), gloo.size())  # pyright: ignore[reportCallIssue]
        self._gloo = gloo

    def getBackendName(self) -> str:
        return "toyccl"


def _forward(op: str) -> Callable[..., Any]:
    def call(self: ToyGroup, *arguments: Any) -> Any:
        for options in arguments:
            if hasattr(options, "reduceOp") and reduce_op_name(options.reduceOp) == "AVG":
                raise RuntimeError(f"toyccl: {op} with AVG is not implemented")
        return getattr(self._gloo, op)(*arguments)

    return call


for _op in OPS:
    if hasattr(dist.ProcessGroup, _op):  # names differ between releases of torch
        setattr(ToyGroup, _op, _forward(_op))


def _create(request: Any, options: Any) -> ToyGroup:
    return ToyGroup(native_group("gloo")(request, options))


class ToyCollectives(TorchCollectives):
    """Registers toyccl with torch when the first group is made, and not before."""

    def __init__(self) -> None:
        super().__init__("toyccl", LOWERINGS, control="gloo")

    def environment(self, world: World) -> Mapping[str, str]:
        return {"GLOO_SOCKET_IFNAME": "lo"} if world.local_size == world.size else {}

    def init(self, store: dist.Store, world: World, timeout_s: float, check: bool) -> None:
        if not hasattr(dist.Backend, "TOYCCL"):
            dist.Backend.register_backend("toyccl", _create, extended_api=True, devices=["cpu"])
        super().init(store, world, timeout_s, check)
