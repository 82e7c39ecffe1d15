"""Deliberate faults, each of a kind that some trainer has had. The table has to show every one of them.

Each is a context manager that patches the running code and puts it back; with each comes a row and the cells that
must leave their bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accelbridge import Trainer, ops
from accelbridge.backend import Gradients
from accelbridge.portable.device import TorchDevice
from accelbridge.portable.execution import EagerExecution
from tests.parity.measure import Fault
from tests.parity.rows import MODEL, ROWS, Row


@contextmanager
def loss_averaged_per_rank() -> Iterator[None]:
    """A mean of the ranks' means: a token weighs more where a rank has fewer of them."""
    total = EagerExecution.sum

    def local(self: EagerExecution, x: Tensor) -> Tensor:
        # The step's count of targets is the one 0-d sum; losses are added up as a vector of steps.
        return x * self._layout.data_parallel if x.dim() == 0 else total(self, x)

    with patch.object(EagerExecution, "sum", local):
        yield


@contextmanager
def clipped_by_local_norm() -> Iterator[None]:
    """Every rank clips by the norm of its own shard."""

    def clip(self: EagerExecution, model: nn.Module, max_norm: float | None, loss: Tensor | None = None) -> Tensor:
        parameters = [p for p in model.parameters() if isinstance(p.grad, DTensor)]
        local = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
        norms = torch.stack(torch._foreach_norm(local))
        norm = norms.norm()
        self.gradients = Gradients(norm, torch.zeros_like(norm), parameters, norms)
        if max_norm is not None:
            torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    with patch.object(EagerExecution, "clip_grad_norm", clip):
        yield


@contextmanager
def dropped_microbatch() -> Iterator[None]:
    """The last microbatch of a step is forgotten."""
    step = Trainer.train_step

    def forgetful(self: Trainer, microbatches: list[dict[str, Tensor]]) -> dict[str, Any]:
        return step(self, microbatches[:-1])

    with patch.object(Trainer, "train_step", forgetful):
        yield


@contextmanager
def swapped_shards() -> Iterator[None]:
    """Ranks hold each other's shards of the first layer's largest matrix."""
    realise = EagerExecution.realise

    def swapped(self: EagerExecution, *args: Any, **kwargs: Any) -> nn.Module:
        model = realise(self, *args, **kwargs)
        parameter = model.get_parameter("layers.0.ffn.down.weight")
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            local = parameter.to_local()
            parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, local.contiguous())
            local.copy_(parts[1 - dist.get_rank()])
        return model

    with patch.object(EagerExecution, "realise", swapped):
        yield


@contextmanager
def generators_not_restored() -> Iterator[None]:
    """A resumed run draws from generators in whatever state they are."""
    from accelbridge.cpu.device import CpuDevice

    def ignore(self: TorchDevice, state: Mapping[str, Tensor]) -> None:
        return None

    with patch.object(CpuDevice, "set_rng_state", ignore):
        yield


@contextmanager
def tied_weight_counted_twice() -> Iterator[None]:
    """The embedding that is also the output projection counts twice in the norm."""
    copies = EagerExecution._copies

    def twice(self: EagerExecution, gradient: Tensor) -> float:
        is_embedding = gradient.shape[0] == MODEL["vocab_size"]
        return copies(self, gradient) / (2 if is_embedding else 1)

    with patch.object(EagerExecution, "_copies", twice):
        yield


@contextmanager
def dropout_keyed_by_microbatch() -> Iterator[None]:
    """Masks by the row's place in its microbatch instead of by the sample."""
    keys = ops.dropout_keys

    def by_row(seed: int, step: int, sample_ids_B: Tensor) -> Tensor:
        return keys(seed, step, torch.arange(len(sample_ids_B)))

    with patch.object(ops, "dropout_keys", by_row):
        yield


@dataclass(frozen=True)
class Case:
    """A fault, the row that has to show it, and the cells that do."""

    fault: Fault
    row: Row
    cells: frozenset[str]


def _row(name: str, part: str) -> Row:
    return replace(next(row for row in ROWS if row.name == name), parts=frozenset({"free", part}))


CASES: tuple[Case, ...] = (
    Case(loss_averaged_per_rank, _row("shard 2, ZeRO 3", "forced"), frozenset({"loss", "norm", "gradient"})),
    Case(clipped_by_local_norm, _row("shard 2, ZeRO 1", "forced"), frozenset({"norm", "gradient"})),
    Case(
        dropped_microbatch, _row("shard 2, ZeRO 1, accumulation 2", "forced"), frozenset({"loss", "norm", "gradient"})
    ),
    Case(swapped_shards, _row("shard 2, ZeRO 2", "forced"), frozenset({"loss", "norm", "gradient"})),
    Case(generators_not_restored, _row("nn.Dropout, shard 2", "same"), frozenset({"same"})),
    Case(tied_weight_counted_twice, _row("tied, shard 2", "forced"), frozenset({"norm", "gradient"})),
    Case(
        dropout_keyed_by_microbatch,
        _row("dropout 0.1, shard 2, accumulation 4", "forced"),
        frozenset({"loss", "norm", "gradient"}),
    ),
)
