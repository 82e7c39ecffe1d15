"""The simulated device as torch sees it: ``install`` makes ``torch.<name>`` and the collective library ``simccl``.

A device cannot be unregistered, so a process installs one, once, and early: torch caches what it finds of the
HPU key the first time that anybody asks for an accelerator.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.sim import build
from tests.sim.names import DEVICES, HPU, LIBRARY

_installed: Sim | None = None


class Sim:
    """The installed device: its module, and the switches that tests turn."""

    def __init__(self, name: str, native: Any) -> None:
        self.name = name
        self.native = native
        self.module: Any = _device_module(name, native)

    def device(self, index: int = 0) -> torch.device:
        return torch.device(self.name, index)

    @contextmanager
    def capacity(self, size: int) -> Iterator[None]:
        """Devices of ``size`` bytes."""
        self.native.set_capacity(size)
        try:
            yield
        finally:
            self.native.set_capacity(8 << 30)

    @contextmanager
    def fault(self, op: str, nth: int = 1, message: str = "injected", sticky: bool = False) -> Iterator[None]:
        """The ``nth`` call of ``op`` raises; ``sticky``: so does everything after it, the device is lost."""
        self.native.set_fault(op, nth, message, sticky)
        try:
            yield
        finally:
            self.native.clear_faults()

    @contextmanager
    def hang(self, op: str) -> Iterator[None]:
        """Collectives ``op`` ("c10d::allreduce") never finish: waiting for one ends at the group's time limit."""
        self.native.set_hang(op)
        try:
            yield
        finally:
            self.native.clear_faults()

    @contextmanager
    def without(self, *ops: str) -> Iterator[None]:
        """The device has no kernels for ``ops``."""
        self.native.set_denied(set(ops))
        try:
            yield
        finally:
            self.native.clear_faults()


def install(name: str, devices: int = DEVICES) -> Sim:
    """Give this process the device ``name`` (:data:`HPU` or any other); again is fine for the same name."""
    global _installed
    if _installed is not None:
        if _installed.name != name:
            raise RuntimeError(f"this process has the device {_installed.name!r}; torch takes one, not {name!r} too")
        return _installed
    native = _load()
    native.set_device_count(devices)
    if name != HPU:
        torch.utils.rename_privateuse1_backend(name)
    native.install(name == HPU)
    sim = Sim(name, native)
    torch._register_device_module(name, sim.module)
    if name != HPU:
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(LIBRARY, _group_maker(native), devices=[name])
    _installed = sim
    return sim


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(build.MODULE, build.library())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _group_maker(native: Any) -> Callable[[dist.Store, int, int, timedelta], Any]:
    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return native.make_backend(dist.ProcessGroupGloo(store, rank, size, timeout), LIBRARY, timeout)

    return make


# ------------------------------------------------------------------------------------------------ torch.<name>


def _device_module(name: str, native: Any) -> types.ModuleType:
    """``torch.<name>``: what torch and its libraries look up in a device's module."""
    module: Any = types.ModuleType(f"torch.{name}")
    for part in (_state(native), _random(name, native), _memory(), _streams(name)):
        for attribute, value in part.items():
            setattr(module, attribute, value)
    module.get_device_name = lambda device=None: f"simulated {name}"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32]
    return module


def _index(device: Any = None) -> int:
    """The index that a device argument means."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _DeviceContext:
    """``torch.<name>.device``."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _state(native: Any) -> dict[str, Any]:
    accelerator = torch.accelerator
    exchange = torch._C._accelerator_exchangeDevice
    return {
        "_initialized": True,  # torch.utils.checkpoint keeps the device's random state only where it sees this
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_available": lambda: native.device_count() > 0,
        "device_count": native.device_count,
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(_index(device)),
        "synchronize": lambda device=None: accelerator.synchronize(_index(device)),
        "_exchange_device": lambda index: exchange(index) if index >= 0 else -1,
        "_maybe_exchange_device": lambda index: exchange(index) if index >= 0 else -1,
        "device": _DeviceContext,
        "_utils": types.SimpleNamespace(_get_device_index=lambda device, *_, **__: _index(device)),
    }


def _random(name: str, native: Any) -> dict[str, Any]:
    def generator(device: Any = None) -> torch.Generator:
        return native.default_generator(_index(device))

    def seed_all(seed: int) -> None:
        for index in range(native.device_count()):
            generator(index).manual_seed(seed)

    def seed_one(seed: int) -> None:
        generator().manual_seed(seed)

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        generator(device).set_state(state.cpu())

    found: dict[str, Any] = {
        "manual_seed": seed_one,
        "manual_seed_all": seed_all,
        "seed": lambda: generator().seed(),
        "initial_seed": lambda: generator().initial_seed(),
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": set_state,
    }
    if name == HPU:  # DTensor calls these for this type
        found |= {"set_rng_ctx": lambda kind: None, "unset_rng_ctx": lambda kind: None}
    return found


def _memory() -> dict[str, Any]:
    names = ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    resets = ("reset_peak_memory_stats", "reset_accumulated_memory_stats")

    def of_device(name: str) -> Callable[..., Any]:
        return lambda device=None: getattr(torch.accelerator, name)(_index(device))

    return {
        **{name: of_device(name) for name in (*names, *resets)},
        "mem_get_info": of_device("get_memory_info"),
        "empty_cache": torch.accelerator.empty_cache,
    }


class _StreamContext:
    """``torch.<name>.stream``; None leaves the current stream."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._before: Any = None

    def __enter__(self) -> torch.Stream | None:
        if self._stream is not None:
            self._before = torch.accelerator.current_stream(self._stream.device.index)
            torch.accelerator.set_stream(self._stream)
        return self._stream

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._before)


def _streams(name: str) -> dict[str, Any]:
    accelerator = torch.accelerator

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **made: Any) -> Any:
            if "stream_id" in made:  # torch's own way to wrap an existing one
                return super().__new__(cls, **made)
            return super().__new__(cls, device=torch.device(name, _index(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return super().__new__(
                cls, device=name, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
            )

    def default_stream(device: Any = None) -> torch.Stream:
        kind = accelerator.current_stream().device_type
        return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": _StreamContext,
        "StreamContext": _StreamContext,
        "current_stream": lambda device=None: accelerator.current_stream(_index(device)),
        "default_stream": default_stream,
        "set_stream": accelerator.set_stream,
    }
