"""A double of AWS's torch_neuronx: see tests/contracts/neuron."""

from __future__ import annotations

import sys
from typing import Any

import torch

from torch_neuronx import neuron as _neuron  # pyright: ignore[reportMissingImports]
from torch_neuronx._runtime import RUNTIME as _RUNTIME  # pyright: ignore[reportMissingImports]

_module: Any = _neuron.module()
torch.neuron = sys.modules["torch.neuron"] = _module  # pyright: ignore[reportAttributeAccessIssue]

from torch_neuronx import _attention, _compile, _copies, _group  # noqa: E402, F401  # pyright: ignore[reportMissingImports]

device_count, synchronize, set_device = _module.device_count, _module.synchronize, _module.set_device
current_device, get_device_properties, empty_cache = (
    _module.current_device,
    _module.get_device_properties,
    _module.empty_cache,
)
get_dynamo_metrics = _module.get_dynamo_metrics = lambda: dict(_compile.metrics)
reset_dynamo_metrics = _module.reset_dynamo_metrics = lambda: _compile.metrics.update(compiles=0)


def is_neuron_runtime_initialized() -> bool:
    return _RUNTIME.started


def get_fallback_ops() -> list[str]:
    """Ops that the host has computed in the device's place since clear_op_tracking."""
    native = _RUNTIME.sim.native
    return [name for name in sorted(_RUNTIME.unimplemented) if native.calls(name) > _RUNTIME.counted.get(name, 0)]


def get_executed_ops() -> list[str]:
    """Ops that have run on the device since clear_op_tracking."""
    native = _RUNTIME.sim.native
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    return [name for name in sorted(names) if native.calls(name) > _RUNTIME.counted.get(name, 0)]


def clear_op_tracking() -> None:
    native = _RUNTIME.sim.native
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    _RUNTIME.counted = {name: native.calls(name) for name in names}


def _autoload() -> None:
    """The entry point of torch.backends."""


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    from tests.contracts import violate

    raise violate("NEURON-DEV-001", f"torch_neuronx.{name} was asked for")
