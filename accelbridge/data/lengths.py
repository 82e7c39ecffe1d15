"""Batches of few lengths, for devices that compile a program for each."""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F

from accelbridge.data.loader import IGNORE, Batch

_log = logging.getLogger(__name__)


class Lengths:
    """Pads batches for next-token loss at the end, where it changes no loss: targets there are not counted, and a
    causal model lets no token see a later one.

    A batch of the first length that came stays as it is. Another is padded to the shortest length that came before and
    is not more than twice its own, else to a power of two or the longest; so there are few.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        """What a power of two is cut to: the model may have no positions beyond it."""
        self._known: set[int] = set()
        self._told: set[int] = set()

    def pad(self, batch: Batch) -> Batch:
        """``batch`` with ``tokens`` and ``targets`` [B, S], and ``segments`` where it has them, in a length of few."""
        length = batch["tokens"].shape[1]
        target = self._chosen(length)
        self._known.add(target)
        if target == length:
            return batch
        if length not in self._told:
            self._told.add(length)
            _log.info("batches of %d tokens are padded to %d: the device compiles a program for each length", length,
                      target)  # fmt: skip
        added = (0, target - length)
        padded = {"tokens": F.pad(batch["tokens"], added), "targets": F.pad(batch["targets"], added, value=IGNORE)}
        if "segments" in batch:
            last = batch["segments"][:, -1:].expand(-1, target - length)  # the last document goes on: ids stay in order
            padded["segments"] = torch.cat([batch["segments"], last], dim=1)
        return {**batch, **padded}

    def _chosen(self, length: int) -> int:
        if not self._known or length in self._known:
            return length
        near = [known for known in self._known if length < known <= 2 * length]
        return min(near, default=max(length, min(1 << (length - 1).bit_length(), self._longest)))
