"""TorchTPU without a TPU, as a backend of its own for tests: what it computes is the vendor's, what it sends is not.

    device        torch_tpu's own runtime, on XLA's CPU client (xla-cpu-pjrt) in the place of libtpu: one device per
                  process, whose runtime is told that it is alone. The count of TPUs on the PCI bus is made to answer 1
    collectives   simulated: tensors are copied to the host, sent by gloo, and copied back

Everything that is put in the place of something else is in this file. ``site`` writes the metadata of a distribution
that provides the backend; with that folder on the import path, ``xla-on-host`` is found like any other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest

from accelbridge.backend import Capabilities, Collectives, Device, DeviceInfo, Probe, Support, unsupported
from accelbridge.hookspecs import ENTRY_POINT_GROUP, hookimpl
from accelbridge_xla.eager.backend import TorchTpuBackend

needs_torch_tpu = pytest.mark.skipif(
    find_spec("torch_tpu") is None, reason="torch_tpu is not installed here; make test-tpu makes an environment with it"
)

NAME = "xla-on-host"
CHIP = "TorchTPU on XLA's CPU client"
DEVICES = 4
SIMULATED = "simulated: staged through the host's memory and sent by gloo, in the place of tpu_dist"
_SENT = ("all_gather", "broadcast", "all_to_all", "all_reduce", "reduce_scatter", "reduce")
_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What TorchTPU reads of a launcher: with a world of more than one process it asks for the slice of TPUs."""


def plugin_library() -> Path | None:
    """The shared object of XLA's CPU client as a PJRT plugin, where it is installed."""
    try:
        found = [each for each in files("xla-cpu-pjrt") or () if each.name == "xla_cpu_pjrt.so"]
    except PackageNotFoundError:
        return None
    return Path(str(found[0].locate())) if found else None


class OnHostBackend(TorchTpuBackend):
    """TorchTPU on a host."""

    name: ClassVar[str] = NAME
    process_group: ClassVar[str] = "gloo"
    chips = {"host": CHIP}

    @classmethod
    def probe(cls) -> Probe:
        found = super().probe()
        if plugin_library() is None:
            return replace(found, available=False, reason="xla-cpu-pjrt is not installed; see make test-tpu")
        devices = tuple(DeviceInfo(index, CHIP) for index in range(DEVICES))
        return replace(found, available=True, reason=f"{CHIP}; collectives simulated", devices=devices)

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        stated = super().capabilities(chip, software)
        table = {
            key: Support("emulated", SIMULATED) if cell and key[0] in _SENT else cell
            for key, cell in stated.table.items()
        }
        pinned = unsupported("XLA's CPU client has no allocator of host memory")
        return replace(stated, table=table, pinned_host_memory=pinned)

    @cached_property
    def device(self) -> Device:
        from backends.xla.tests.on_host_parts import OnHostDevice

        return OnHostDevice(self.probe)

    @cached_property
    def collectives(self) -> Collectives:
        from backends.xla.tests.on_host_parts import HostStagedCollectives

        return HostStagedCollectives()


@contextmanager
def alone() -> Iterator[None]:
    """Without what a launcher has set."""
    hidden = {name: os.environ.pop(name) for name in _LAUNCHERS if name in os.environ}
    try:
        yield
    finally:
        os.environ |= hidden


class Plugin:
    """The module that an entry point would name."""

    @hookimpl
    def accelbridge_backend(self) -> type[OnHostBackend]:
        return OnHostBackend


plugin = Plugin()


def site(folder: Path) -> Path:
    """Metadata of a distribution with this backend, in ``folder``, which goes on the import path."""
    info = folder / "accelbridge_xla_on_host-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelbridge-xla-on-host\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{NAME} = {__name__}:plugin\n")
    return folder


def _compiled() -> Path:
    folder = Path(sys.prefix) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """What makes the backend found, whose :func:`site` is ``folder``."""
    root = Path(__file__).parents[3]
    path = [folder, root, root / "backends" / "xla", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "ACCELBRIDGE_PROBE_SECONDS": "60",
        # The runtime is loaded when a process is bound; what autoloading does has a test of its own.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # Programs that XLA compiled before, for this environment; the vendor's own cache, of its third tier.
        "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT": str(_compiled()),
    }
