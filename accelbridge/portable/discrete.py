"""Devices with memory of their own, which processes of a host share out among themselves by index."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from accelbridge.backend import DeviceInfo, Graph, Probe, World
from accelbridge.errors import BackendError
from accelbridge.portable.device import TorchDevice
from accelbridge.portable.graphs import TorchGraph


class DiscreteDevice(TorchDevice):
    """A device that is opened when a process is bound to it; a vendor states the texts of its errors, and the flags
    that its arithmetic takes. ``probe`` is the backend's own."""

    visible: ClassVar[tuple[str, ...]]
    """Variables that leave only some devices visible."""
    used_up: ClassVar[tuple[str, ...]]
    """Parts of messages that say: the device's memory is used up."""
    busy: ClassVar[tuple[str, ...]] = ()
    """Parts of messages that say: another process has the device for itself."""
    flags: ClassVar[Mapping[str, Any]] = {}
    """Attributes of ``torch`` by dotted path ("backends.x.y") and the values that they get when a process is bound:
    the precision that the capabilities state. Set there and nowhere else."""
    lists: ClassVar[str] = ""
    """The command that lists what holds the devices."""
    graphs: ClassVar[str] = ""
    """The class of graphs in ``torch.<type>``; empty: none."""

    def __init__(self, type: str, probe: Callable[[], Probe]) -> None:
        super().__init__(type)
        self._probe = probe

    def count(self) -> int:
        return len(self._probe().devices)

    def bind(self, world: World) -> torch.device:
        """Open the device of this local rank. Raises BackendError where there is none, or it is taken or full."""
        found = self._probe()
        index = self._index(world, found)
        self._set_flags()
        device = torch.device(self.type, index)
        try:
            self._module.set_device(index)
            torch.empty(1, device=device)  # opens it, for which it needs some memory itself
            self._module.synchronize()
        except RuntimeError as error:
            raise self._refused(error, found.devices[index]) from error
        return device

    def is_out_of_memory(self, error: BaseException) -> bool:
        told = isinstance(error, RuntimeError) and any(text in str(error) for text in self.used_up)
        return told or super().is_out_of_memory(error)

    def graph(self) -> Graph:
        return TorchGraph(self.type, self.graphs) if self.graphs else super().graph()

    def _index(self, world: World, found: Probe) -> int:
        seen = len(found.devices)
        if world.local_rank < seen:
            return world.local_rank
        # Launchers that give every rank one device hide the others from it.
        if seen == 1 and any(os.environ.get(name) for name in self.visible):
            return 0
        why = f"{seen} visible here" if seen else found.reason
        raise BackendError(
            f"asked: a device for local rank {world.local_rank} of {world.local_size}; found: {why}; do: start at most "
            f"as many ranks as there are devices, or show each rank one by {self.visible[0]}"
        )

    def _set_flags(self) -> None:
        for path, value in self.flags.items():
            *owners, name = path.split(".")
            owner: Any = torch
            for part in owners:
                owner = getattr(owner, part)
            try:
                setattr(owner, name, value)
            except RuntimeError as error:  # torch refuses to mix its older and newer flags of precision
                raise BackendError(
                    f"asked: torch.{path} = {value!r}; found: {_first_line(error)}; do: set no flags of precision in "
                    "the script, this backend does"
                ) from error

    def _refused(self, error: RuntimeError, device: DeviceInfo) -> BackendError:
        name = f"device {device.index} ({device.chip})"
        see = f"see {self.lists}" if self.lists else "see which processes hold it"
        elsewhere = f"or leave it out by {self.visible[0]}"
        if any(text in str(error) for text in self.busy):
            why, do = "another process has it for itself", f"{see}; wait for it, {elsewhere}"
        elif self.is_out_of_memory(error):
            why, do = "its memory is used up by other processes", f"{see}; end them, {elsewhere}"
        else:
            why, do = "it cannot be opened", f"{see}, and the kernel's log; {elsewhere}"
        return BackendError(f"asked: {name}; found: {why} ({_first_line(error)}); do: {do}")


def unless_set(wanted: Mapping[str, str], other_names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """``wanted`` without the variables that the user has set by one of their other names."""
    return {
        name: value
        for name, value in wanted.items()
        if not any(other in os.environ for other in other_names.get(name, ()))
    }


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
