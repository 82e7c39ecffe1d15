"""The device of a process: one logical core of a Trainium, "neuron:<local rank>".

Sources are facts NEURON-* of tests/contracts/neuron.toml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from accelbridge.backend import World
from accelbridge.errors import BackendError
from accelbridge.portable.device import TorchDevice
from accelbridge_neuron import driver
from accelbridge_neuron.host import CORES, holders, installed, judge

_FORKED = "in forked subprocess"
_BUSY = ("NC_BUSY", "NRT_RESOURCE", "status code 4", "status code 1005")


class NeuronDevice(TorchDevice):
    """``neuron:<local rank>``. The group is there before it is bound (:attr:`NeuronCollectives.before_device`)."""

    def __init__(self) -> None:
        super().__init__("neuron")
        self._visible = driver.visible_cores()  # later the SDK sets it to this rank's own core

    def count(self) -> int:
        # With a group, the SDK counts the processes of this host and not its cores.
        return len(judge(driver.read(), {driver.VISIBLE: self._visible}, installed()).devices)

    def bind(self, world: World) -> torch.device:
        load()
        with explained():
            self._module.set_device(world.local_rank)
            # The first touch starts the runtime, which is where a core that another process holds is refused.
            torch.zeros(1, device=self.type)
            self._module.synchronize()
        return torch.device(self.type, world.local_rank)

    def memory(self) -> Mapping[str, int | None]:
        # Numbers of the asynchronous allocator are those of the last synchronisation.
        self._module.synchronize()
        module = self._module
        total = getattr(module.get_device_properties(), "total_memory", None)
        return {"allocated": module.memory_allocated(), "peak": module.max_memory_allocated(), "total": total}

    def reset_peak_memory(self) -> None:
        self._module.synchronize()
        super().reset_peak_memory()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return "NRT_RESOURCE" in str(error) or super().is_out_of_memory(error)


def load() -> None:
    """Import the SDK, which makes the device and the group known to torch. Raises BackendError with its own words."""
    try:
        import torch_neuronx  # noqa: F401  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError, RuntimeError) as e:
        raise BackendError(
            f"asked: the device neuron; found: torch_neuronx does not load with torch {torch.__version__}; do: install "
            f"the torch-neuronx of this torch. It says: {e}"
        ) from e


@contextmanager
def explained() -> Iterator[None]:
    """The SDK's errors of starting a core, with what to do; its own words stay beneath."""
    try:
        yield
    except (RuntimeError, AssertionError) as e:
        text = str(e)
        if _FORKED in text:
            why, do = "this process was forked from one that uses Neuron", "start processes by spawn"
        elif "before the init_process_group" in text:
            why = "this process has used the device before, and the runtime takes a group only before it starts"
            do = "touch no neuron tensor before the trainer starts"
        elif any(mark in text for mark in _BUSY):
            why = f"a core that is in use: {holders(driver.read()) or 'neuron-ls shows no process'}"
            do = f"end it, or name free cores (a chip has {CORES // 2} logical ones) in NEURON_RT_VISIBLE_CORES"
        elif "more than one device per process" in text:
            why = f'NEURON_RT_VISIBLE_CORES="{driver.visible_cores()}", more than this rank\'s core'
            do = "unset it, or export to each rank its own core"
        elif "out of range" in text:
            why, do = "another rank's index", "leave the choice of the device to the backend"
        else:
            why, do = "the runtime does not start", "see neuron-ls and NEURON_RT_LOG_LEVEL=INFO"
        raise BackendError(f"asked: this process's Neuron core; found: {why}; do: {do}. It says: {text}") from e
