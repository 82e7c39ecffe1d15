"""The chip as a device. It has no ``torch`` module of its own: its tensors are the host's."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from accelbridge.backend import World
from accelbridge.portable.device import TorchDevice


class ToyDevice(TorchDevice):
    """One of ``chips`` virtual chips, which cannot tell its memory."""

    def __init__(self, chips: int) -> None:
        super().__init__("cpu")
        self._chips = chips

    def count(self) -> int:
        return self._chips

    def bind(self, world: World) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> Mapping[str, int | None]:
        return {"allocated": None, "peak": None, "total": None}
