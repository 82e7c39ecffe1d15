"""Collectives of Neuron: the group comes before any use of the device, once in the life of a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.distributed as dist

from accelbridge.backend import Lowering, World
from accelbridge.errors import BackendError
from accelbridge.portable.collectives import TorchCollectives
from accelbridge_neuron.device import explained, load
from accelbridge_neuron.options import NeuronOptions

STRINGS = {"mixed": "cpu:gloo,neuron:neuron", "neuron": "neuron"}
NEFF_CACHE = "TORCH_NEURONX_NEFF_CACHE_DIR"
LOWERINGS = (
    Lowering(
        "nothing",
        applies="tensors without elements",
        into="a sum of one number",
        reason='Neuron\'s library refuses them ("tensors cannot have zero size in dimension 0", second hand)',
    ),
    Lowering(
        "uneven_all_to_all",
        applies="all_to_all_single with split sizes",
        into="one with equal splits, padded with zeros",
        reason='Neuron\'s library takes even splits only ("Only even split sizes are supported", second hand)',
    ),
    Lowering(
        "premul_as_sum",
        applies="PREMUL_SUM",
        into="SUM of copies that have been multiplied",
        reason="the vendor emulates it in a way that no document states",
    ),
    Lowering(
        "refused_product",
        applies="PRODUCT and bitwise operations",
        into="an error before the call",
        reason='Neuron\'s library lowers none of them ("AllReduce PRODUCT operation unsupported", second hand)',
    ),
    Lowering(
        "fp8_bytes",
        applies="float8 tensors",
        into="uint8 views for movement; a reduction is refused",
        reason="fp8 collectives fail in the vendor's own tests (second hand)",
    ),
)

_kept: tuple[World, bool, str] | None = None
"""The world, whether it is checked, and the string of this process's default group, once it has one."""


class NeuronCollectives(TorchCollectives):
    """``cpu:gloo,neuron:neuron``, or ``neuron`` beside a control group of gloo.

    The runtime takes one group in a process's life, before it starts; so :meth:`shutdown` ends what was made besides,
    and the next :meth:`init` in this process finds the default group as it was.
    """

    before_device: ClassVar[bool] = True

    def __init__(self, options: NeuronOptions | None = None) -> None:
        self._options = options or NeuronOptions()
        super().__init__(STRINGS[self._options.groups], LOWERINGS, control="gloo")
        self.library = "neuron"
        self._made: list[dist.ProcessGroup] = []

    def environment(self, world: World) -> Mapping[str, str]:
        folder = self._options.neff_cache
        # The SDK works these two out through the store where they are not set.
        wanted = {"LOCAL_RANK": str(world.local_rank), "LOCAL_WORLD_SIZE": str(world.local_size)}
        return {**wanted, **({NEFF_CACHE: folder} if folder else {})}

    def init(self, store: dist.Store, world: World, timeout_s: float, check: bool) -> None:
        if dist.is_initialized() and _kept is not None:
            self._again(world, check)
            return
        self._first(store, world, timeout_s, check)

    def _first(self, store: dist.Store, world: World, timeout_s: float, check: bool) -> None:
        global _kept
        load()
        with explained():
            super().init(store, world, timeout_s, check)
        _kept = (_place(world), check, self._backend)

    def _again(self, world: World, check: bool) -> None:
        assert _kept is not None
        if _kept != (_place(world), check, self._backend):
            raise BackendError(
                f"asked: a group of {self._backend} for rank {world.rank} of {world.size}, checked: {check}; found: "
                f"this process's one group, {_kept[2]} of rank {_kept[0].rank} of {_kept[0].size}, "
                f"checked: {_kept[1]}, which Neuron lets nobody make anew; do: start another process"
            )
        self._active = True

    def control_group(self, timeout_s: float) -> dist.ProcessGroup:
        group = super().control_group(timeout_s)
        self._made.append(group)
        return group

    def shutdown(self) -> None:
        made, self._made = self._made, []
        self._active = False
        for group in made:
            dist.destroy_process_group(group)


def _place(world: World) -> World:
    """What of a world a group depends on; a run has another id than the one before it."""
    return World(world.rank, world.size, world.local_rank, world.local_size)
