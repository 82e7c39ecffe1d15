"""Gradients of parameters that every process holds whole: summed over the processes while the backward pass runs.

FSDP2 on a shard group of one does the same, but copies each unit's gradients twice more, and on a device without
streams its backward pass waits for every all-reduce. Here, as in torch's DDP, gradients travel in a few large buckets,
in the order in which the backward pass makes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_FIRST_BYTES, _BYTES = 2**20, 25 * 2**20
"""Sizes of the first and the other buckets, those of torch's DDP: the first one starts the traffic early."""


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    ready: int = 0
    """How many have their gradient."""
    views: list[Tensor] = field(default_factory=list)
    counts: Tensor | None = None
    """[parameters]: how many processes have a gradient of each; summed together with them."""
    absent: list[int] = field(default_factory=list)
    """Parameters that took no part in this process's backward pass."""
    work: Any = None


class Replicas:
    """Sums the gradients of ``parameters`` over ``group`` at the end of every backward pass that :attr:`sums`.

    A parameter that was used on some processes only counts as zero on the others, and one that was used on none
    keeps no gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets = list(_split(reversed([p for p in parameters if p.requires_grad])))
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._pass = -1
        """The backward pass in which the buckets are being filled; one that raised never finishes."""
        self._next = 0
        self.sums = True
        """False: gradients accumulate here, for a later pass to sum."""
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: Tensor) -> None:
        if not self.sums:
            return
        if self._pass != (now := torch._C._current_graph_task_id()):
            self._start(now)
        self._bucket_of[id(parameter)].ready += 1
        # In one order on all processes, whatever the order of their backward passes.
        while self._next < len(self._buckets) and self._complete(self._buckets[self._next]):
            self._launch(self._buckets[self._next])

    def _start(self, graph_task: int) -> None:
        self._pass, self._next = graph_task, 0
        for bucket in self._buckets:
            bucket.ready = 0
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # pyright: ignore[reportAttributeAccessIssue]

    def _complete(self, bucket: _Bucket) -> bool:
        return bucket.ready == len(bucket.parameters)

    def _launch(self, bucket: _Bucket) -> None:
        """Copy the gradients into one tensor, let go of them, and sum it."""
        self._next += 1
        parameters = bucket.parameters
        sizes = [p.numel() for p in parameters]
        flat = parameters[0].new_empty(sum(sizes) + len(sizes))
        *parts, bucket.counts = flat.split([*sizes, len(sizes)])
        bucket.views = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        bucket.absent = [i for i, p in enumerate(parameters) if p.grad is None]
        bucket.counts.fill_(1)
        for i in bucket.absent:
            bucket.views[i].zero_()
            bucket.counts[i] = 0
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._foreach_copy_([v for i, v in enumerate(bucket.views) if i not in bucket.absent], gradients)
        for parameter in parameters:
            parameter.grad = None
        bucket.work = dist.all_reduce(flat, group=self._group, async_op=True)

    def _finish(self) -> None:
        """At the end of the backward pass: what is summed becomes the gradients."""
        while self._next < len(self._buckets):
            self._launch(self._buckets[self._next])
        for bucket in self._buckets:
            bucket.work.wait()
            used = bucket.counts.tolist() if bucket.absent and bucket.counts is not None else None
            for i, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
                parameter.grad = None if used is not None and not used[i] else view
            bucket.work, bucket.views, bucket.counts = None, [], None


def _split(parameters: Iterable[nn.Parameter]) -> Iterable[_Bucket]:
    bucket, room = _Bucket([]), _FIRST_BYTES
    for parameter in parameters:
        bucket.parameters.append(parameter)
        room -= parameter.nbytes
        if room <= 0:
            yield bucket
            bucket, room = _Bucket([]), _BYTES
    if bucket.parameters:
        yield bucket
