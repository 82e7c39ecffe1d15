"""Process groups of any vendor that torch's c10d knows by a backend string."""

# pyright: reportPrivateImportUsage=false
# (torch.distributed re-exports without saying so)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accelbridge.backend import Collectives, Device, Lowering, World
from accelbridge.errors import BackendError
from accelbridge.portable.process_group import devices_of, register

INTERPOSED = "interposed"
"""The c10d backend name under which lowered or checked groups run."""


def join(
    device: Device, collectives: Collectives, store: dist.Store, world: World, timeout_s: float, check: bool = False
) -> torch.device:
    """Bind the device and make the default group, in the order that the vendor wants; returns the device."""
    if collectives.before_device:
        collectives.init(store, world, timeout_s, check)
        return device.bind(world)
    bound = device.bind(world)
    collectives.init(store, world, timeout_s, check)
    return bound


class TorchCollectives(Collectives):
    """Groups of ``backend``, a c10d backend string: one name, or "device:name,device:name".

    Native groups as long as there is nothing to lower and nothing to check; otherwise everything runs through
    :class:`~accelbridge.portable.process_group.InterposedGroup`. ``control`` is the backend string of control
    groups, by default what ``backend`` has for host tensors.
    """

    def __init__(self, backend: str, lowerings: Sequence[Lowering] = (), control: str = "") -> None:
        self.library = backend
        self._backend, self._lowerings, self._control = backend, tuple(lowerings), control
        self._active = False

    def environment(self, world: World) -> Mapping[str, str]:
        return {}

    def init_arguments(self, world: World) -> Mapping[str, Any]:
        """More arguments of ``init_process_group``, such as the ``device_id`` that a library wants to be told. Groups
        that are lowered or checked don't get them: torch would ask their C++ backend, which they have none of."""
        return {}

    def lowerings(self) -> Sequence[Lowering]:
        return self._lowerings

    def init(self, store: dist.Store, world: World, timeout_s: float, check: bool) -> None:
        if dist.is_initialized():
            raise BackendError("asked: a default process group; found: one exists; do: shut it down first")
        if not 0 <= world.rank < world.size:
            raise BackendError(
                f"asked: a process group of {world.size} ranks, this one rank {world.rank}; found: no such rank; "
                "do: number the ranks from 0 to one less than there are"
            )
        backend = self._backend
        if self._lowerings or check:
            register(INTERPOSED, backend, self._lowerings, check)
            backend = INTERPOSED
        more = self.init_arguments(world) if backend != INTERPOSED else {}
        # A store keeps the addresses of an earlier group, so every init in it gets keys of its own. It is counted
        # there, not in this process: reused workers may have different histories.
        run = dist.PrefixStore(f"{world.run_id}/{world.restart}", store)
        own = dist.PrefixStore(f"groups{run.add(f'inits/{world.rank}', 1)}", run)
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=own, rank=world.rank, world_size=world.size, timeout=limit, **more)
        self._active = True

    def control_group(self, timeout_s: float) -> dist.ProcessGroup:
        """A second group of all ranks over the host's network, for small objects and checkpoints.

        It shares nothing with the default group, so another thread may use it while a step runs. Every rank
        must call this, after :meth:`init`; :meth:`shutdown` destroys it too. It is never lowered or checked.
        """
        control = self._control or devices_of(self._backend).get("cpu")
        if not control:
            raise BackendError(
                f"asked: a control group; found: {self._backend!r} moves no host tensors; do: give "
                f"{type(self).__name__} a control backend"
            )
        group = dist.new_group(backend=control, timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        return group

    def shutdown(self) -> None:
        active, self._active = self._active, False
        if active and dist.is_initialized():
            dist.destroy_process_group()
