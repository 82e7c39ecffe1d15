"""Losses. A loss is a sum over targets; the trainer divides by the count of the whole step, over all ranks and
microbatches, so that neither layout nor padding changes what a token weighs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from accelbridge import ops
from accelbridge.data.loader import IGNORE
from accelbridge.errors import ConfigError

Batch = Mapping[str, Tensor]


class Loss(Protocol):
    """What ``Trainer(config, loss=...)`` takes."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Sum of the losses of this batch's targets, a 0-d tensor with gradient."""
        ...

    def count(self, batch: Batch) -> Tensor:
        """How many targets that sum is over, a 0-d tensor."""
        ...


def check_loss(loss: object) -> None:
    """Raise ConfigError unless ``loss`` is one."""
    if not callable(loss) or not callable(getattr(loss, "count", None)):
        raise ConfigError(
            f"loss asked as a {type(loss).__name__}; it needs __call__(model, batch) -> sum of losses and "
            "count(batch) -> number of targets; see accelbridge.train.loss.Loss"
        )


def evaluate_batch(loss: Loss, model: nn.Module, batch: Batch) -> Tensor:
    """[sum of losses, number of targets] of the rows that are not padding (``sample_ids`` -1).

    Every rank runs as many forward passes, a batch of nothing but padding included, since sharded parameters are
    gathered by all. Next-token loss keeps the batch's shape; another one sees only the rows that count.
    """
    real = batch["sample_ids"] >= 0
    if isinstance(loss, NextTokenLoss):
        batch = {**batch, "targets": batch["targets"].masked_fill(~real.unsqueeze(-1), IGNORE)}
        return torch.stack([loss(model, batch), loss.count(batch)])
    some = bool(real.any())
    kept = {name: tensor[real] for name, tensor in batch.items()} if some else batch
    values = torch.stack([loss(model, kept).float(), loss.count(kept).float()])
    return values if some else torch.zeros_like(values)


class NextTokenLoss:
    """Cross-entropy of ``model(tokens)`` or ``model(tokens, segments)`` against ``targets``.

    The model returns logits [B, S, V], or an object with such an attribute ``logits``. Document ids are passed
    where the data has them and the model's forward a parameter ``segments`` or ``segments_BS``; :attr:`note` says where
    it hasn't.

    ``chunked``: the model's forward takes ``targets`` or ``targets_BS`` as well, and returns the sum of losses itself,
    so that logits need not exist whole. Raises ConfigError where it doesn't.
    """

    def __init__(self, model: nn.Module, chunked: bool = False) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._segments, self._targets = (
            next((known for known in (name, f"{name}_BS") if known in parameters), None)
            for name in ("segments", "targets")
        )
        self._chunked = chunked
        if chunked and self._targets is None:
            raise ConfigError(
                f"memory.chunked_loss asked; the forward of {type(model).__name__} takes no targets, so it cannot "
                "return the loss in place of logits; give it a parameter targets (int64 [B, S], -100: not counted), "
                "with which it returns accelbridge.ops.linear_cross_entropy of its last activations, or leave "
                "chunked_loss out"
            )

    @property
    def note(self) -> str:
        if self._segments:
            return ""
        return "the model takes no segments: tokens attend across the documents of a packed sample"

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        extra = {self._segments: batch["segments"]} if self._segments and "segments" in batch else {}
        if self._chunked:
            return model(batch["tokens"], **extra, **{str(self._targets): batch["targets"]})
        logits_BSV = model(batch["tokens"], **extra)
        if not isinstance(logits_BSV, Tensor):
            raise ConfigError(
                f"the model returned a {type(logits_BSV).__name__}; next-token loss needs logits [B, S, V] or an "
                "object with .logits; return one, or pass Trainer(config, loss=...)"
            )
        targets_N = batch["targets"].flatten()
        if isinstance(logits_BSV, DTensor):  # split along the vocabulary
            local_NV = logits_BSV.to_local().flatten(0, -2)
            return ops.vocab_parallel_cross_entropy(local_NV, targets_N, logits_BSV.device_mesh.get_group(), IGNORE)
        return ops.cross_entropy(logits_BSV.flatten(0, -2), targets_N, IGNORE)

    def count(self, batch: Batch) -> Tensor:
        return (batch["targets"] != IGNORE).sum(dtype=torch.float32)


def unpack_logits(_: nn.Module, __: object, output: object) -> object:
    """Forward hook: ``output.logits`` in place of an object that has it.

    Sharding looks for tensors in what a model returns, and cannot see into an object of any class.
    """
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


def gather_split(_: nn.Module, __: object, output: object) -> object:
    """Forward hook: whole tensors in place of those that tensor parallelism left split, for a loss that is not ours."""
    return tree_map(_gathered, output)


def _gathered(leaf: object) -> object:
    if isinstance(leaf, DTensor):
        return leaf.full_tensor()
    if is_dataclass(leaf) and not isinstance(leaf, type):  # pytrees don't look into it
        values = {field.name: getattr(leaf, field.name) for field in fields(leaf) if field.init}
        return replace(leaf, **{name: tree_map(_gathered, value) for name, value in values.items()})
    return leaf
