"""Eager execution on Neuron: what the vendor compiles and refuses in a step of the portable one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelbridge.backend import Collectives, Device, World
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.parallel.layout import Layout
from accelbridge.portable.execution import AXES, EagerExecution
from accelbridge_neuron.facts import MULTIPLE, REPLICA_SIZES, replica_size

_INT32 = torch.iinfo(torch.int32)
_TAKEN = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


class NeuronExecution(EagerExecution):
    """Each shape is a program to compile; ops without a kernel run on the host, which is refused unless allowed."""

    compiles_shapes = True

    def __init__(self, device: Device, collectives: Collectives, fallback_ops: Sequence[str] = ()) -> None:
        super().__init__(device, collectives)
        self._allowed = frozenset(fallback_ops)
        self._stepping = False

    def start(self, store: dist.Store, world: World, layout: Layout, timeout_s: float, check: bool) -> None:
        check_groups(layout)
        self._stepping = False
        super().start(store, world, layout, timeout_s, check)

    def place(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in batch.items():
            check_dtype(name, tensor)
        return super().place(batch)

    def compile(self, unit: nn.Module) -> None:
        # One backend, whole graphs of static shapes: dynamic=True is refused, and other modes are ignored (ND 2.33).
        unit.forward = torch.compile(unit.forward, backend="neuron", fullgraph=True, dynamic=False)

    def microbatch(self, model: nn.Module, index: int, count: int) -> AbstractContextManager[None]:
        if not self._stepping:
            import torch_neuronx  # pyright: ignore[reportMissingImports]

            torch_neuronx.clear_op_tracking()  # what ran on the host while the model was made is no matter
            self._stepping = True
        return super().microbatch(model, index, count)

    def end_step(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if self._stepping:
            self._check_fallbacks()
        return super().end_step(values)

    def _check_fallbacks(self) -> None:
        import torch_neuronx  # pyright: ignore[reportMissingImports]

        found = sorted(set(torch_neuronx.get_fallback_ops()) - self._allowed)
        if found:
            raise Unsupported(
                f"asked: a training step on Neuron; found: {', '.join(found)} ran on the host instead "
                "(torch_neuronx.get_fallback_ops()); do: replace what calls it, or name it in "
                "backend.options.fallback_ops"
            )


def check_groups(layout: Layout) -> None:
    """Raise ConfigError for groups of a size that Neuron's collectives are not known to take."""
    for axis in AXES:
        size = getattr(layout, axis)
        if not replica_size(size):
            raise ConfigError(
                f"asked: parallel.{axis} {size}; found: groups on Neuron have "
                f"{', '.join(map(str, REPLICA_SIZES))} ranks or a multiple of {MULTIPLE}; do: set it to one of them"
            )
    if not replica_size(layout.size):
        raise ConfigError(
            f"asked: {layout.size} processes; found: groups on Neuron have {', '.join(map(str, REPLICA_SIZES))} ranks "
            f"or a multiple of {MULTIPLE}; do: start so many processes"
        )


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise ConfigError for a tensor of a batch that the device would change in silence, or not take."""
    if tensor.dtype not in _TAKEN:
        why = "would be computed in float32" if tensor.dtype is torch.float64 else "is not taken"
        raise ConfigError(
            f'asked: "{name}" of a batch in {tensor.dtype}; found: on Neuron it {why}; do: give it in one of '
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _TAKEN)}"
        )
    if tensor.dtype is torch.int64 and tensor.numel() and not tensor.is_meta:
        low, high = (int(bound) for bound in tensor.aminmax())
        if low < _INT32.min or high > _INT32.max:
            raise ConfigError(
                f'asked: "{name}" of a batch with {high if high > _INT32.max else low}; found: Neuron narrows int64 to '
                "int32; do: keep numbers within 32 bits"
            )
