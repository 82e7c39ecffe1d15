"""Losses. A loss is a sum over targets; the trainer divides by the count of the whole step, over all ranks and
microbatches, so that neither layout nor padding changes what a token weighs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

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


class NextTokenLoss:
    """Cross-entropy of ``model(tokens)`` or ``model(tokens, segments)`` against ``targets``.

    The model returns logits [B, S, V], or an object with such an attribute ``logits``. Document ids are passed
    where the model's forward has a parameter ``segments`` or ``segments_BS``; :attr:`note` says where it hasn't.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._segments = next((name for name in ("segments", "segments_BS") if name in parameters), None)

    @property
    def note(self) -> str:
        if self._segments:
            return ""
        return "the model takes no segments: tokens attend across the documents of a packed sample"

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        extra = {self._segments: batch["segments"]} if self._segments else {}
        out = model(batch["tokens"], **extra)
        logits_BSV = out if isinstance(out, Tensor) else getattr(out, "logits", None)
        if logits_BSV is None:
            raise ConfigError(
                f"the model returned a {type(out).__name__}; next-token loss needs logits [B, S, V] or an object "
                "with .logits; return one, or pass Trainer(config, loss=...)"
            )
        return ops.cross_entropy(logits_BSV.flatten(0, -2), batch["targets"].flatten(), IGNORE)

    def count(self, batch: Batch) -> Tensor:
        return (batch["targets"] != IGNORE).sum(dtype=torch.float32)
