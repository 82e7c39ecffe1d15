"""The runtime of the double: when it starts, in which process, and which core it owns."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.contracts import violate
from tests.sim.device import Sim, install

TOO_LATE = "Neuron runtime should not be initialized before the init_process_group."
SEVERAL = "Attempted to have more than one device per process in distributed setup"
FORKED = (
    "Cannot re-initialize Neuron runtime in forked subprocess. To use Neuron with multiprocessing, use the 'spawn' "
    "start method"
)


@dataclass
class Runtime:
    """One per process, of the process that imported the package."""

    sim: Sim
    chip: str = field(default_factory=lambda: os.environ.get("NEURON_DOUBLE_CHIP", "trn2"))
    started_by: int = 0
    """Process id in which it started; 0: it has not."""
    grouped: bool = False
    local_rank: int = 0
    stale: dict[str, Any] = field(default_factory=dict)
    """Statistics of the allocator, as of the last synchronisation."""
    unimplemented: set[str] = field(default_factory=set)
    """Ops ("aten::sort") that the host computes; a test sets them."""
    counted: dict[str, int] = field(default_factory=dict)
    """Calls of ops when tracking was cleared."""

    @property
    def started(self) -> bool:
        return self.started_by != 0

    def start(self) -> None:
        """What any use of the device does first."""
        if self.started_by and self.started_by != os.getpid():
            raise RuntimeError(FORKED)
        if self.started:
            return
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not self.grouped:
            raise violate("NEURON-GRP-001", "the device was used before init_process_group")
        if os.environ.get("NEURON_DOUBLE_BUSY"):
            raise RuntimeError("Failed to initialize Neuron Runtime: NRT_EXEC status code 1005 NC_BUSY")
        self.started_by = os.getpid()
        torch.accelerator.set_device_index(self.local_rank)
        self.refresh()

    def joined(self, rank: int, size: int) -> None:
        """The default group is being made: this process owns its local rank's core from now on."""
        if self.started:
            raise AssertionError(TOO_LATE)
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        cores = os.environ.get("NEURON_RT_VISIBLE_CORES", "")
        if "-" in cores or "," in cores:
            raise AssertionError(SEVERAL)
        os.environ.setdefault("NEURON_RT_VISIBLE_CORES", str(self.local_rank))
        self.sim.native.set_device_count(int(os.environ.get("LOCAL_WORLD_SIZE", size)))
        self.grouped = True

    def index(self, device: Any = None) -> int:
        """The index that a device argument means, if it is this process's."""
        asked = device if isinstance(device, int) else None if device is None else torch.device(device).index
        if asked is None:
            return self.local_rank
        if self.grouped and asked != self.local_rank:
            only = self.local_rank
            raise RuntimeError(
                f"Device index {asked} is out of range. Valid range is {only} to {only} for this process"
            )
        return asked

    def refresh(self) -> None:
        """Read the allocator's statistics, and look whether another rank's core was used."""
        accelerator = torch.accelerator
        self.stale = {
            "allocated": accelerator.memory_allocated(self.local_rank),
            "peak": accelerator.max_memory_allocated(self.local_rank),
            "reserved": accelerator.memory_reserved(self.local_rank),
        }
        for other in range(self.sim.native.device_count()):
            if self.grouped and other != self.local_rank and accelerator.memory_allocated(other):
                raise violate("NEURON-DEV-004", f"a tensor on neuron:{other} in the process of {self.local_rank}")


RUNTIME = Runtime(install("neuron"))
