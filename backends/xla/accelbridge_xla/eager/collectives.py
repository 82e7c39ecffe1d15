"""Collectives of TorchTPU: its process group ``tpu_dist`` over device tensors, gloo over host tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping

from accelbridge.backend import World
from accelbridge.errors import BackendError
from accelbridge.portable.collectives import TorchCollectives
from accelbridge_xla.eager.vendor import load, tpu

GROUPS = "cpu:gloo,tpu:tpu_dist"
SLICE = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")
"""What every process of a run must find in its environment, with the same values."""


class TorchTpuCollectives(TorchCollectives):
    """Native groups: what ``tpu_dist`` lacks is unsupported, and said so in the capabilities."""

    library = "tpu_dist (TorchTPU)"

    def __init__(self) -> None:
        super().__init__(GROUPS)
        self.library = type(self).library

    def environment(self, world: World) -> Mapping[str, str]:
        """A run that stays on one host keeps its host traffic on the loopback interface. XLA logs what it compiles."""
        here = {"GLOO_SOCKET_IFNAME": "lo"} if world.local_size == world.size else {}
        return {**here, "TF_CPP_MIN_LOG_LEVEL": "2"}

    def launch_environment(self, processes: int) -> Mapping[str, str]:
        """Addresses and topology of the slice, by the vendor's own function, which writes them into ``os.environ``
        where they are not set already; called where the processes are started, since each would choose other ports."""
        load()
        before = dict(os.environ)
        try:
            tpu("distributed").set_tpu_launch_env(nproc_per_node=processes)
        except (RuntimeError, ValueError) as error:  # no topology of so many devices; no device
            raise BackendError(
                f"asked: {processes} processes on the TPUs of this host; found: {error}; do: start one process per "
                "device"
            ) from error
        return {name: value for name, value in os.environ.items() if before.get(name) != value}
