"""Defects of collectives, as a vendor's library would have them: below ``torch.distributed``, in what the process group
of the CPU backend issues or in what comes back. No library is modified."""

# torch.distributed re-exports without saying so.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from accelbridge.conformance.mutants import Patch, benign, mutant
from accelbridge.portable import process_group
from accelbridge.portable.collectives import TorchCollectives
from accelbridge.portable.lowerings import REDUCTIONS, Call, copy_options, flatten, nested_map
from accelbridge.portable.process_group import InterposedGroup, RecordedWork

_SCATTERS = ("reduce_scatter", "reduce_scatter_single")
_GATHERS = ("allgather", "all_gather_single")


class Done(dist.Work):
    """A work that says it is done, whatever was to be done."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def instead(patch: Patch, change: Callable[[Call, Any], Call]) -> None:
    """The library does ``change(call, its group)`` when ``call`` is asked."""

    def _issue(inner: Any, self: Any, call: Call) -> Any:
        return inner(self, change(call, self._inner))

    patch(InterposedGroup, "_issue", _issue)


def afterwards(patch: Patch, spoil: Callable[[Call, Any], Callable[[], object] | None]) -> None:
    """Once a call is done, its results are spoilt by what ``spoil(call, group)`` returned when it was asked."""

    def _issue(inner: Any, self: Any, call: Call) -> Any:
        with torch.no_grad():
            then = spoil(call, self._inner)
        work, finish = inner(self, call)
        return work, [*finish, then] if then is not None else finish

    patch(InterposedGroup, "_issue", _issue)


def results(call: Call, group: Any) -> Iterator[Tensor]:
    """The tensors that the library writes on this rank and that hold something."""
    if call.writes_outputs(group.rank):
        yield from (x for x in flatten(call.outputs) if x.numel())


# ------------------------------------------------------------------------------------------------ wrong values


@mutant(
    "L1",
    "the last rank is missing",
    {"COL-001": "EXACT", "COL-003": ("BOUND", "EXACT"), "COL-023": "EXACT", "TRN-002": "EXACT"},
)
def rank_missing(patch: Patch) -> None:
    def change(call: Call, group: Any) -> Call:
        if call.op in REDUCTIONS and group.rank == group.size - 1 and group.size > 1:
            nothing = torch.ones_like if call.reduce_op == "PRODUCT" else torch.zeros_like
            if call.inputs is not None:
                return replace(call, inputs=nested_map(nothing, call.inputs))
            for x in flatten(call.outputs):
                x.copy_(nothing(x))
        return call

    instead(patch, change)


@mutant("L2", "rank 0 is counted twice", {"COL-001": "EXACT", "COL-006": "EXACT"})
def rank_counted_twice(patch: Patch) -> None:
    def change(call: Call, group: Any) -> Call:
        if call.op in ("allreduce", "reduce") and group.rank == 0:
            for x in flatten(call.outputs):
                x.add_(x)
        return call

    instead(patch, change)


@mutant(
    "L3",
    "two chunks are swapped",
    {"COL-001": "EXACT", "COL-007": "EXACT", "COL-008": "EXACT", "COL-010": "EXACT", "COL-023": "EXACT"},
)
def chunks_swapped(patch: Patch) -> None:
    def swap(parts: list[Tensor]) -> None:
        first, second = parts[0].clone(), parts[1].clone()
        parts[0].copy_(second)
        parts[1].copy_(first)

    def spoil(call: Call, group: Any) -> Callable[[], object] | None:
        outputs = list(results(call, group))
        if call.op in ("allgather", "gather") and len(outputs) > 1:
            return lambda: swap(outputs)
        if call.op in ("allreduce", "all_gather_single") and outputs and outputs[0].shape[0] >= 2 * group.size:
            rows = outputs[0].shape[0] // group.size
            return lambda: swap([outputs[0][:rows], outputs[0][rows : 2 * rows]])
        return None

    afterwards(patch, spoil)

    def change(call: Call, group: Any) -> Call:
        if call.op == "reduce_scatter_single" and group.size > 1:
            first, second, *rest = call.inputs.chunk(group.size)
            return replace(call, inputs=torch.cat([second, first, *rest]))
        return call

    instead(patch, change)


@mutant("L4", "the result is shifted by one element",
        {"COL-001": "EXACT", "COL-007": "EXACT", "COL-021": "EXACT"})  # fmt: skip
def shifted(patch: Patch) -> None:
    def spoil(call: Call, group: Any) -> Callable[[], object] | None:
        if call.op not in ("allreduce", *_GATHERS):
            return None
        return lambda: [x.copy_(x.roll(1)) for x in results(call, group)]

    afterwards(patch, spoil)


@mutant("L5", "the tail (numel mod 8) is not reduced", {"COL-001": "EXACT", "TRN-006": "NORM", "TRN-014": "NORM"})
def tail_not_reduced(patch: Patch) -> None:
    def spoil(call: Call, group: Any) -> Callable[[], object] | None:
        if call.op != "allreduce":
            return None
        before = [(x, x.clone(), x.numel() // 8 * 8) for x in results(call, group)]
        return lambda: [x.view(-1)[cut:].copy_(old.view(-1)[cut:]) for x, old, cut in before]

    afterwards(patch, spoil)


@mutant("L6", "AVG gives the sum", {"COL-003": "BOUND"})
def average_is_sum(patch: Patch) -> None:
    def change(call: Call, group: Any) -> Call:
        return call.with_reduce_op(dist.ReduceOp.SUM) if call.reduce_op == "AVG" else call

    instead(patch, change)


@mutant(
    "L7",
    "the output keeps what it held before",
    dict.fromkeys(("COL-001", "COL-005", "COL-007", "COL-014", "COL-017", "COL-019"), "EXACT"),
)
def stale_output(patch: Patch) -> None:
    def spoil(call: Call, group: Any) -> Callable[[], object]:
        before = [(x, x.clone()) for x in results(call, group)]
        return lambda: [x.copy_(old) for x, old in before]

    afterwards(patch, spoil)


@mutant("L8", "strided memory is taken as if it were dense", {"COL-016": "EXACT"})
def strides_ignored(patch: Patch) -> None:
    _without("contiguous", patch)


@mutant("L19", "halves are added in their own format, undeclared", {"COL-002": "BOUND"})
def low_precision(patch: Patch) -> None:
    _without("float32_reduce", patch)


def _without(name: str, patch: Patch) -> None:
    """What the host's library does by itself, where nothing puts it right."""

    def __init__(inner: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        self._lowerings = tuple(lowering for lowering in self._lowerings if lowering.name != name)

    patch(TorchCollectives, "__init__", __init__)


@mutant("L11", "a NaN is dropped", {"COL-004": ("BOUND", "EXACT")})
def nan_dropped(patch: Patch) -> None:
    def change(call: Call, group: Any) -> Call:
        if call.op == "allreduce":
            for x in flatten(call.outputs):
                x.nan_to_num_(nan=1.0, posinf=torch.inf, neginf=-torch.inf) if x.is_floating_point() else None
        return call

    instead(patch, change)


@mutant("L12", "the last rank's result differs in its lowest bit", {"COL-001": "EXACT", "COL-022": "EXACT"})
def last_bit_differs(patch: Patch) -> None:
    def spoil(call: Call, group: Any) -> Callable[[], object] | None:
        if call.op != "allreduce" or group.rank != group.size - 1:
            return None
        return lambda: [_flip_lowest_bit(x.view(-1)[-1:]) for x in results(call, group)]

    afterwards(patch, spoil)


@mutant("L16", "one rank is wrong by a unit in the last place", {"COL-001": "EXACT"})
def one_unit_off(patch: Patch) -> None:
    def spoil(call: Call, group: Any) -> Callable[[], object] | None:
        if call.op != "allreduce" or group.rank != 0:
            return None
        return lambda: [_flip_lowest_bit(x) for x in results(call, group)]

    afterwards(patch, spoil)


@mutant("L25", "sums come in an order of their own each time", {"COL-022": "EXACT"})
def unordered(patch: Patch) -> None:
    def spoil(call: Call, group: Any) -> Callable[[], object] | None:
        if call.op != "allreduce" or os.urandom(1)[0] % 2:
            return None
        return lambda: [_flip_lowest_bit(x) for x in results(call, group)]

    afterwards(patch, spoil)


def _flip_lowest_bit(x: Tensor) -> None:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    x.view(kind).bitwise_xor_(torch.ones((), dtype=kind))


@mutant("L27", "sums flush subnormal numbers to zero, undeclared", {"COL-018": "EXACT"})
def subnormals_flushed(patch: Patch) -> None:
    def spoil(call: Call, group: Any) -> Callable[[], object] | None:
        if call.reduce_op != "SUM":
            return None
        floats = [x for x in results(call, group) if x.is_floating_point()]
        return lambda: [x.masked_fill_(x.abs() < torch.finfo(x.dtype).tiny, 0.0) for x in floats]

    afterwards(patch, spoil)


@mutant("L28", "8-bit floats travel as numbers, so that a NaN loses its code", {"COL-020": "EXACT"})
def codes_lost(patch: Patch) -> None:
    def spoil(call: Call, group: Any) -> Callable[[], object] | None:
        eights = [x for x in results(call, group) if x.is_floating_point() and x.element_size() == 1]
        return lambda: [x.copy_(x.float().nan_to_num(0.0)) for x in eights]

    afterwards(patch, spoil)


@mutant("L29", "a sum of 8-bit floats is made in their own format, undeclared", {"COL-020": "ERROR"})
def eights_added(patch: Patch) -> None:
    def _issue(inner: Any, self: Any, call: Call) -> Any:
        tensors = list(flatten(call.outputs))
        if call.op != "allreduce" or tensors[0].dtype.itemsize > 1 or not tensors[0].is_floating_point():
            return inner(self, call)
        wide = [x.float() for x in tensors]
        work, finish = inner(self, replace(call, outputs=wide))
        return work, [*finish, lambda: [x.copy_(w) for x, w in zip(tensors, wide, strict=True)]]

    patch(InterposedGroup, "_issue", _issue)


# --------------------------------------------------------------------------------- wrong ranks, groups and order


@mutant(
    "L9",
    "another root is taken",
    {"COL-005": "EXACT", "COL-006": "EXACT", "COL-010": ("EXACT", "RAISED"), "FLT-009": "ERROR"},
)
def wrong_root(patch: Patch) -> None:
    def change(call: Call, group: Any) -> Call:
        if call.op not in ("broadcast", "reduce"):
            return call
        return replace(call, options=copy_options(call.options, rootRank=(call.options.rootRank + 1) % group.size))

    instead(patch, change)

    def spoil(call: Call, group: Any) -> Callable[[], object] | None:
        if call.op != "gather" or call.root != group.rank:
            return None
        return lambda: [x.zero_() for x in results(call, group)]

    afterwards(patch, spoil)


@mutant("L10", "a subgroup runs on the world", {"COL-013": "EXACT", "COL-014": "EXACT", "FLT-011": "EXACT"})
def subgroup_is_world(patch: Patch) -> None:
    def __init__(inner: Any, self: Any, name: Any, request: Any, group: Any, *rest: Any) -> None:
        inner(self, name, request, group, *rest)
        if dist.is_initialized() and request.group_size < dist.get_world_size():
            world: Any = c10d._get_default_group()
            self._inner = world._inner

    patch(InterposedGroup, "__init__", __init__)


@mutant(
    "L17",
    "the chunks of reduce_scatter lie in reversed rank order",
    {"COL-008": "EXACT", "COL-023": "EXACT", "TRN-003": "EXACT"},
)
def chunks_reversed(patch: Patch) -> None:
    def change(call: Call, group: Any) -> Call:
        if call.op == "reduce_scatter_single":
            return replace(call, inputs=torch.cat(list(reversed(call.inputs.chunk(group.size)))))
        if call.op == "reduce_scatter":
            return replace(call, inputs=[list(reversed(chunks)) for chunks in call.inputs])
        return call

    instead(patch, change)


@mutant("L18", "all_to_all reads its input at the offsets of the output's splits", {"COL-009": "EXACT"})
def split_offsets_swapped(patch: Patch) -> None:
    def change(call: Call, group: Any) -> Call:
        if call.op != "all_to_all_single" or not call.extra[0]:
            return call
        received, sent = call.extra
        wrapped = torch.cat([call.inputs, call.inputs, call.inputs])  # past its end, it reads what lies there
        starts = [sum(received[:i]) for i in range(group.size)]
        parts = [wrapped[start : start + length] for start, length in zip(starts, sent, strict=True)]
        return replace(call, inputs=torch.cat(parts))

    instead(patch, change)


@mutant("L24", "tags are ignored", {"COL-011": "EXACT"})
def tags_ignored(patch: Patch) -> None:
    def change(call: Call, group: Any) -> Call:
        return replace(call, extra=(call.extra[0], 0)) if call.op in ("send", "recv") else call

    instead(patch, change)


@mutant("L15", "a work says it is done when it is not", {"COL-015": "EXACT", "COL-019": "EXACT"})
def done_early(patch: Patch) -> None:
    def wait(inner: Any, self: Any, timeout: timedelta = timedelta(0)) -> bool:
        _ALIVE.append(self._work)
        return True

    patch(RecordedWork, "wait", wait)


_ALIVE: list[Any] = []


@mutant("L23", "the barrier does not wait", {"COL-012": "ORDER", "FLT-019": "ORDER"})
def barrier_open(patch: Patch) -> None:
    def issue(inner: Any, self: Any, call: Call) -> Any:
        return Done() if call.op == "barrier" else inner(self, call)

    patch(process_group._Inner, "issue", issue)


# ------------------------------------------------------------------------------------------------------- benign


@benign("B5", "sums go along a tree and not round a ring", ("COL-001", "COL-002", "COL-003", "COL-015", "COL-022"))
def tree(patch: Patch) -> None:
    def issue(inner: Any, self: Any, call: Call) -> Any:
        """Everything to rank 0, which adds in pairs, and from there to all: another order, other roundings."""
        if call.op != "allreduce" or call.reduce_op != "SUM":
            return inner(self, call)
        for x in flatten(call.outputs):
            every = [torch.empty_like(x) for _ in range(self.size)]
            inner(self, Call("allgather", [every], [x], c10d.AllgatherOptions())).wait()
            while len(every) > 1:
                every = [torch.stack(every[i : i + 2]).sum(0, dtype=x.dtype) for i in range(0, len(every), 2)]
            x.copy_(every[0])
        return Done()

    patch(process_group._Inner, "issue", issue)
