"""What a run's tensors take, by kind, on this process's devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from accelbridge.portable.sharded_adamw import local

if TYPE_CHECKING:
    from accelbridge.train.trainer import Trainer


def held(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes of the local ``parameters``, of the ``gradients`` that they get, and of the ``optimizer`` state; the last
    is that of AdamW, two moments, where the optimizer has none yet. Tensors that one process holds for several devices
    (spmd) count whole."""
    sizes = [(_bytes(p), p.requires_grad) for p in model.parameters()]
    trained = sum(size for size, trains in sizes if trains)
    state = sum(_bytes(t) for values in (optimizer.state.values() if optimizer else ()) for t in values.values())
    return {"parameters": sum(size for size, _ in sizes), "gradients": trained, "optimizer": state or 2 * trained}


def _bytes(value: object) -> int:
    return local(value.detach()).nbytes if isinstance(value, Tensor) else 0


class MemoryUse:
    """Peak memory of this process over the run, by kind, told again whenever the peak has grown."""

    def __init__(self) -> None:
        self._told = 0

    def grown(self, trainer: Trainer) -> dict[str, int] | None:
        """Bytes by kind if the peak is over 1 % above what was told last; None if not, or if the device cannot tell.

        ``peak`` is the allocator's, on the CPU the resident size of the process; ``other`` is what of it is no
        parameter, gradient or optimizer state: activations, gathered parameters, buffers, and on the CPU code as well.
        Where anything was put on the host, ``waiting_on_host`` and ``state_on_host`` say how much.
        """
        peak = trainer.prepared.target.backend.device.memory()["peak"]
        if peak is None or peak <= self._told * 1.01:
            return None
        self._told = peak
        kinds = held(trainer.model, trainer.optimizer)
        host = {} if trainer.host_pool is None else {"waiting_on_host": trainer.host_pool.high_water}
        if next(trainer.model.parameters()).device.type != trainer.execution.device.type:
            host["state_on_host"], kinds = sum(kinds.values()), {}
        return {**kinds, "other": max(0, peak - sum(kinds.values())), "peak": peak, **host}
