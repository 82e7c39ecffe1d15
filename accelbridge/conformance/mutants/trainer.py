"""Defects of the sharded trainer, and of the parts of eager execution that it stands on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accelbridge.backend import Gradients
from accelbridge.conformance.mutants import Patch, mutant
from accelbridge.data import loader
from accelbridge.guards.guards import Guards
from accelbridge.memory import recompute
from accelbridge.portable import execution
from accelbridge.portable.execution import EagerExecution
from accelbridge.portable.sharded_adamw import local
from accelbridge.train import groups, optim, trainer
from accelbridge.train.loss_scale import LossScale
from accelbridge.train.trainer import Trainer


@contextmanager
def _alone() -> Iterator[None]:
    """No sum over ranks meanwhile."""
    with mock.patch.object(dist, "all_reduce"):
        yield


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@mutant(
    "T1", "gradients summed, not averaged: each rank divides by its own targets",
    {"TRN-002": "EXACT", "TRN-003": "EXACT", "TRN-009": "BOUND", "TRN-020": "EXACT"},
)  # fmt: skip
def summed(patch: Patch) -> None:
    def total(inner: Any, self: Any, x: Tensor) -> Tensor:
        return x if x.dim() == 0 else inner(self, x)  # the step's count of targets is the one scalar

    patch(EagerExecution, "sum", total)


@mutant("T2", "every microbatch divides by its own targets", {"TRN-004": "EXACT"})
def unscaled_accumulation(patch: Patch) -> None:
    def accumulate(inner: Any, self: Any, microbatches: list[Any]) -> tuple[Tensor, Tensor]:
        parts = [inner(self, [batch]) for batch in microbatches]
        return torch.stack([loss for loss, _ in parts]).sum(), torch.stack([count for _, count in parts]).sum()

    patch(Trainer, "accumulate", accumulate)


@mutant("T3", "clips by the norm of this rank's shards", {"TRN-006": ("NORM", "BOUND")})
def local_norm(patch: Patch) -> None:
    def clip(inner: Any, *args: Any) -> Tensor:
        with _alone():
            return inner(*args)

    patch(EagerExecution, "clip_grad_norm", clip)


@mutant("T4", "the optimizer's moments are cleared at each step", {"TRN-009": "BOUND", "TRN-010": "BOUND"})
def forgetful_optimizer(patch: Patch) -> None:
    def step(inner: Any, optimizer: torch.optim.Optimizer, mask: Tensor) -> None:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].zero_()
        inner(optimizer, mask)

    patch(trainer, "masked_step", step)


@mutant("T5", "the last microbatch is dropped", {"TRN-001": "EXACT", "TRN-004": "EXACT"})
def dropped_microbatch(patch: Patch) -> None:
    def step(inner: Any, self: Any, microbatches: list[Any]) -> Any:
        return inner(self, microbatches[:-1] or microbatches)

    patch(Trainer, "train_step", step)


@mutant("T6", "a mean of the ranks' means", {"TRN-005": "EXACT"})
def mean_of_means(patch: Patch) -> None:
    def total(inner: Any, self: Any, x: Tensor) -> Tensor:
        return x * self._layout.data_parallel if x.dim() == 0 else inner(self, x)

    patch(EagerExecution, "sum", total)


@mutant("T7", "vectors are decayed and matrices are not", {"TRN-009": ("BOUND", "SQNR"), "TRN-010": "BOUND"})
def wrong_decay(patch: Patch) -> None:
    def rule(inner: Any, dimensions: int, group: Any, config: Any) -> Any:
        return inner(1 if dimensions >= 2 else 2, group, config)

    patch(groups, "_rule", rule)


@mutant("T8", "each rank reports its own loss", {"TRN-007": "LOSS"})
def local_loss(patch: Patch) -> None:
    def read(inner: Any, self: Any, shares: Sequence[Tensor]) -> list[float]:
        return (torch.stack(list(shares)) * self._layout.data_parallel).tolist()

    patch(EagerExecution, "read_sums", read)


@mutant("T9", "each rank skips an update by its own gradients", {"TRN-011": "EXACT", "TRN-017": "EXACT"})
def skips_alone(patch: Patch) -> None:
    def step(inner: Any, self: Any, optimizer: torch.optim.Optimizer, norm: Tensor, mask: Tensor | None = None) -> None:
        own = torch.stack([local(p.grad).norm() for p in _parameters(optimizer) if p.grad is not None]).norm()
        inner(self, optimizer, own, mask)

    def judge(inner: Any, self: Any, gradients: Gradients) -> Tensor:
        own = gradients.norms.norm()
        return inner(self, gradients._replace(norm=own, loss=torch.zeros_like(own)))

    patch(LossScale, "step", step)
    patch(Guards, "mask", judge)


@mutant("T10", "parameters are kept in bfloat16", {"TRN-008": "EXACT"})
def low_master(patch: Patch) -> None:
    def step(inner: Any, optimizer: torch.optim.Optimizer, mask: Tensor) -> None:
        inner(optimizer, mask)
        for parameter in _parameters(optimizer):
            part = local(parameter.data)
            part.copy_(part.bfloat16())

    patch(trainer, "masked_step", step)


@mutant("T11", "every rank gets the first rank's data", {"TRN-002": "EXACT", "TRN-020": "EXACT"})
def same_data(patch: Patch) -> None:
    def deal(inner: Any, batches: int, batch_size: int, coordinates: range, data_parallel: int) -> Any:
        return inner(batches, batch_size, range(len(coordinates)), data_parallel)

    patch(loader, "_deal", deal)


@mutant("T12", "a resumed run takes the batch before once more", {"TRN-016": "LOSS", "CKP-001": "LOSS"})
def repeated_batch(patch: Patch) -> None:
    def step(inner: Any, self: Any, number: int) -> Any:
        return inner(self, max(0, number - self.behind))

    def make(inner: Any, self: Any) -> None:
        inner(self)
        self.loader.behind = int(self.prepared.resume is not None)

    patch(loader.Loader, "step", step)
    patch(Trainer, "setup", make)


@mutant("T13", "what is frozen is updated", {"TRN-012": "EXACT"})
def thawed(patch: Patch) -> None:
    def nothing(inner: Any, model: nn.Module, config: Any) -> None:
        return None

    def as_any(inner: Any, dimensions: int, group: Any, config: Any) -> Any:
        return replace(inner(dimensions, group, config), frozen=False)

    patch(trainer, "freeze", nothing)
    patch(groups, "_rule", as_any)


@mutant("T14", "sharding makes two of a parameter that is used twice", {"TRN-013": "EXACT"})
def untied(patch: Patch) -> None:
    def ties(inner: Any, model: nn.Module) -> list[Any]:
        for _, *others in inner(model):
            for module, name in others:
                module.register_parameter(name, nn.Parameter(getattr(module, name).detach().clone()))
        return []

    patch(execution, "_ties", ties)


@mutant("T15", "the padding of uneven shards counts in the norm", {"TRN-014": ("NORM", "BOUND")})
def padded_norm(patch: Patch) -> None:
    def clip(inner: Any, self: Any, model: nn.Module, max_norm: float | None, loss: Tensor | None = None) -> Tensor:
        norm = inner(self, model, None, loss)
        sharded = [p for p in model.parameters() if isinstance(p, DTensor) and p.grad is not None]
        padding = sum(-p.shape[0] % self._layout.dp_shard * (p.numel() // p.shape[0]) for p in sharded)
        norm = (norm.square() + padding).sqrt()
        self.gradients = self.gradients._replace(norm=norm)
        if max_norm is not None:
            for p in model.parameters():
                if p.grad is not None:
                    local(p.grad).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    patch(EagerExecution, "clip_grad_norm", clip)


@mutant("T16", "parameters are never updated", {"TRN-001": "EXACT", "TRN-019": "LIMIT"})
def never_updated(patch: Patch) -> None:
    def step(inner: Any, optimizer: torch.optim.Optimizer, mask: Tensor) -> None:
        return None

    patch(trainer, "masked_step", step)


@mutant("T17", "recomputation starts from inputs that were kept in bfloat16", {"TRN-015": "EXACT"})
def rounded_recomputation(patch: Patch) -> None:
    def flagged(inner: Any, run: Any) -> Any:
        call, passes = inner(run), count()

        def rounded(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return value.bfloat16().to(value.dtype) if is_float else value

        def again(*args: Any) -> Any:
            return call(*map(rounded, args)) if next(passes) else call(*args)

        return again

    patch(recompute, "_flagged", flagged)


@mutant("T18", "the rates and decays of groups are forgotten", {"TRN-010": "BOUND"})
def no_groups(patch: Patch) -> None:
    def rules(inner: Any, shapes: Any, config: Any) -> Any:
        return {name: groups._rule(len(shape), None, config) for name, shape in shapes.items()}

    patch(optim, "rules", rules)
