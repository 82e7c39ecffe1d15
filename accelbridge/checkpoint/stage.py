"""Staging: a copy of a state in host memory that is made once and filled again at every save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Stage:
    """Host buffers by name. The first copy pays for their memory; later ones of equal shapes reuse it.

    ``pinned``: buffers of tensors that lie on an accelerator are page-locked, and all copies are under way at once.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}
        self._locked: set[str] = set()
        """Names of the buffers that are page-locked."""

    def copy(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """``state`` in the buffers, complete on return; valid until the next call. A DTensor stays one, of this rank's
        part: torch's stager would copy its mesh as well, and warn about the groups of other ranks."""
        staged: dict[str, Any] = {}
        devices: set[torch.device] = set()
        for name, tensor in state.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
            buffer = self._buffer(name, local)
            waits = name in self._locked and local.device.type != "cpu"
            buffer.copy_(local, non_blocking=waits)
            if waits:
                devices.add(local.device)
            staged[name] = DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer
        for device in devices:
            torch.accelerator.synchronize(device)
        for gone in self._buffers.keys() - staged.keys():
            del self._buffers[gone]
        return staged

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        known = self._buffers.get(name)
        if known is None or known.shape != like.shape or known.dtype != like.dtype:
            pinned = self._pinned and like.device.type != "cpu" and _pins(like.device)
            known = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = known
            self._locked = self._locked | {name} if pinned else self._locked - {name}
        return known


def _pins(device: torch.device) -> bool:
    """torch pins for the accelerator that it knows as this machine's, and for no other."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device.type
