"""``torch.neuron`` of the double. A name that is not documented is a violation."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.contracts import violate
from torch_neuronx._runtime import FORKED, RUNTIME  # pyright: ignore[reportMissingImports]

TOTAL = 24 << 30


class Properties(NamedTuple):
    """What get_device_properties tells."""

    name: str
    total_memory: int


def _memory(key: str) -> Callable[..., int]:
    def read(device: Any = None) -> int:
        RUNTIME.index(device)
        return RUNTIME.stale.get(key, 0)

    return read


def synchronize(device: Any = None) -> None:
    """Wait for the device; what memory statistics show is as of now."""
    RUNTIME.start()
    torch.accelerator.synchronize(RUNTIME.index(device))
    RUNTIME.refresh()


def set_device(device: Any) -> None:
    index = RUNTIME.index(device)
    RUNTIME.start()
    torch.accelerator.set_device_index(index)


def device_count() -> int:
    return RUNTIME.sim.native.device_count()


def get_device_properties(device: Any = None) -> Properties:
    RUNTIME.index(device)
    return Properties(RUNTIME.chip, TOTAL)


def memory_stats(device: Any = None) -> dict[str, int]:
    RUNTIME.index(device)
    return {f"{kind}_bytes.current": RUNTIME.stale.get(kind, 0) for kind in ("allocated", "reserved")}


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(RUNTIME.index(device))


def _in_bad_fork() -> bool:
    import os

    return RUNTIME.started and RUNTIME.started_by != os.getpid()


def _lazy_init() -> None:
    """torch calls it before the first tensor of a process on the device."""
    if _in_bad_fork():
        raise RuntimeError(FORKED)
    RUNTIME.start()


class _Module(types.ModuleType):
    """Refuses what it does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in HOOKS:  # torch asks for these with hasattr
            raise AttributeError(name)
        raise violate("NEURON-DEV-001", f"torch.neuron.{name} was asked for")


HOOKS = frozenset({"set_rng_ctx", "unset_rng_ctx", "get_amp_supported_dtype", "graph", "CUDAGraph", "jiterator", "amp"})
DOCUMENTED = (
    "Stream",
    "Event",
    "stream",
    "current_stream",
    "default_stream",
    "set_stream",
    "device",
    "empty_cache",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "initial_seed",
    "get_rng_state",
    "set_rng_state",
    "reset_accumulated_memory_stats",
)


def module() -> types.ModuleType:
    """The module, over what the simulated device has."""
    found: Any = _Module("torch.neuron")
    below = RUNTIME.sim.module
    for name in (*DOCUMENTED, "StreamContext"):
        setattr(found, name, getattr(below, name))
    for name in ("_initialized", "_exchange_device", "_maybe_exchange_device", "_utils"):  # torch's own needs
        setattr(found, name, getattr(below, name))
    own = {
        "is_initialized": lambda: RUNTIME.started,
        "is_available": lambda: device_count() > 0,
        "init": RUNTIME.start,
        "_lazy_init": _lazy_init,
        "_is_in_bad_fork": _in_bad_fork,
        "device_count": device_count,
        "current_device": lambda: RUNTIME.local_rank,
        "set_device": set_device,
        "synchronize": synchronize,
        "get_device_name": lambda device=0: f"neuron:{RUNTIME.index(device)}",
        "get_device_properties": get_device_properties,
        "get_amp_supported_dtype": lambda: [torch.float32, torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
        "memory_stats": memory_stats,
        "memory_allocated": _memory("allocated"),
        "max_memory_allocated": _memory("peak"),
        "memory_reserved": _memory("reserved"),
        "max_memory_reserved": _memory("reserved"),
        "reset_peak_memory_stats": reset_peak_memory_stats,
    }
    for name, value in own.items():
        setattr(found, name, value)
    return found
