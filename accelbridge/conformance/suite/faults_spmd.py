"""FLT under the spmd execution model: what can go wrong in the one process that drives all devices. ``faults.py`` names
these bodies; :data:`WHY` says of its other ids why they hold no question there."""

# torch.distributed re-exports without saying so.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelbridge.conformance.bench import TYPED, Bench
from accelbridge.conformance.oracle import collectives as oracle
from accelbridge.conformance.suite.spmd_support import Mesh, mesh
from accelbridge.conformance.suite.trainer_support import devices
from accelbridge.parallel.layout import Layout

WHY: Mapping[str, str] = {
    "FLT-001": "a sum is one operation on one global tensor, which has one shape; what does not fit is FLT-009's error",
    "FLT-002": "a sum is one operation on one global tensor, which no device can hold in a dtype of its own",
    "FLT-003": "all devices run one program: none of them can come to its operations in another order",
    "FLT-004": "all devices run one program: none can leave out what the others wait for, and no process is waited for",
    "FLT-005": "the process that is killed is the only one: nobody is left who could wait, or be told",
    "FLT-006": "the process that leaves is the only one, and takes all devices along: nobody is left to wait for it",
    "FLT-011": "there are no groups to be a member of; rows that are summed apart from the others are COL-013's",
    "FLT-012": "memory that runs out on one device ends the one program for all of them: what becomes of that error, "
    "and of what is computed next, is asked by MEM-007 and MEM-008",
    "FLT-017": "the process that is killed is the only one: it has no survivors; that a new one goes on from a "
    "checkpoint, bit for bit, is asked by CKP-001",
    "FLT-019": "the host queues one program for all devices: none can come late to it by itself; a host that comes "
    "late is in COL-015",
    "FLT-021": "all devices run one program: what is a sum in it is a sum for all of them",
    "FLT-022": "which row is read by all devices is said once, in the one program that they run",
}
"""Reason by id."""


def _works(on: Mesh, name: str) -> None:
    """All devices add up their rows as they should, and gradients with them."""
    rows = on.rows(2 * on.size + 1, 12, name=name)
    total, model = oracle.whole_sum(list(rows)), on.model(on.rows(3, 4))
    got = on.gradient(model, rows)
    on.equal({f"sum {name}": (on.split(rows).sum(0), total), f"gradient {name}": (got, total.view(3, 4))})


class _Lost(Exception):
    """What a step of the test fails with."""


class _Failing(torch.autograd.Function):
    """Fails on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise _Lost("a step was lost")


def again_after_a_failure(t: Bench) -> None:
    """After a step has failed in its backward pass, with work queued, the execution can be closed, and a new start in
    the same process works, in the same layout and in another ZeRO stage."""
    for zero in (3, 3, 1):
        with mesh(t, Layout(dp_shard=devices(t), zero=zero)) as on:
            _works(on, f"ZeRO {zero}")
            model, x = on.model(on.rows(12)), on.split(on.rows(on.size, 12))
            t.raises(_Lost, lambda m=model, x=x: (_Failing.apply(m(x)) + x.sum(0)).sum().backward())


def life_of_an_execution(t: Bench) -> None:
    """An execution that was closed refuses work by a typed error; closing it twice harms nothing; and it can be started
    again, as often as one likes, in another layout too."""
    execution, count = t.backend.execution, devices(t)
    layouts = {"dp_shard": Layout(dp_shard=count), "dp_replicate": Layout(dp_replicate=count)}
    for axis, layout in layouts.items():
        if axis in t.capabilities.layout_axes:
            with mesh(t, layout) as on:
                _works(on, axis)
                for _ in range(2):
                    execution.close()
                t.raises(TYPED, execution.place, {"rows": on.rows(count, 4)})


def wrong_arguments(t: Bench) -> None:
    """Shapes that do not fit, a dimension, a row or a number of parts that does not exist, and a sum of what cannot be
    added are errors, at once or when the step ends, and the devices work on."""
    with mesh(t) as on:
        x, wider = on.split(on.rows(on.size, 4)), on.split(on.rows(on.size, 5))
        calls: dict[str, Callable[[], Tensor]] = {
            "another size": lambda: x + wider,
            "another number of rows": lambda: x + on.split(on.rows(on.size + 1, 4)),
            "no such dimension": lambda: x.sum(2),
            "no such row": lambda: x[on.size],
            "a view of another size": lambda: x.view(on.size, 5),
            "rows of another size": lambda: torch.cat([x, wider]),
            "into another size": lambda: x.clone().copy_(wider),
            "no permutation": lambda: x.permute(0, 0),
        }
        for name, call in calls.items():
            error = t.raises(Exception, lambda call=call: on.execution.end_step({"got": call()}))
            t.note(f"FLT-009 {name}", type(error).__name__)
        _works(on, "after all of it")


def wrong_worlds(t: Bench) -> None:
    """A layout of more, or of fewer, devices than there are is refused by a typed error that names both numbers, and so
    are several processes where the backend declares that it does not take them; a right start works afterwards."""
    execution, count = t.backend.execution, devices(t)
    for wrong in (count + 1, 2 * count, *((count - 1,) if count > 1 else ())):
        layout = Layout(dp_shard=wrong)
        error = t.raises(TYPED, execution.start, dist.HashStore(), t.world, layout, 4.0, False, says=str(wrong))
        t.same(str(count) in str(error), True, f"{count} in {error}", "ERROR")
        t.run(execution.close)
    if not t.capabilities.several_processes:
        several = replace(t.world, size=2, local_size=2)
        t.raises(TYPED, execution.start, dist.HashStore(), several, Layout(dp_shard=count), 4.0, False, says="2")
        t.run(execution.close)
    with mesh(t) as on:
        _works(on, "right")
