"""Which devices TorchTPU would find here, as the operating system tells: it is not imported, and no chip is opened."""

from __future__ import annotations

import os
import platform
from importlib.util import find_spec
from pathlib import Path

from accelbridge.backend import DeviceInfo, Probe
from accelbridge_xla import runtimes
from accelbridge_xla.hardware import PCI, generation

VERSIONS = ("torch", "torch_tpu", "libtpu", "jax")
LIBRARY_VARIABLE = "TPU_LIBRARY_PATH"
"""The file of the PJRT plugin to load in the place of libtpu's (torch_tpu 0.2.0 reads it)."""
_VFIO = Path("/dev/vfio")


def probe(pci: Path = PCI, vfio: Path = _VFIO) -> Probe:
    """See :meth:`accelbridge.backend.Backend.probe`."""
    software = {name: found for name in VERSIONS if (found := runtimes.version_of(name))}
    facts = {"host": platform.node(), "python": platform.python_version(), "runtime": runtimes.EAGER}
    devices, reason = devices_on(pci, vfio)
    if refusal := runtimes.refusal():
        return Probe(False, refusal, software=software, facts=facts)
    if devices and not _has_library():
        reason = (
            f"{reason}, but libtpu is not installed; install torch_tpu with what it asks for, or set "
            f"{LIBRARY_VARIABLE} to a libtpu.so"
        )
        return Probe(False, reason, software=software, facts=facts)
    return Probe(bool(devices), reason, devices, software, facts)


def devices_on(pci: Path, vfio: Path) -> tuple[tuple[DeviceInfo, ...], str]:
    """Devices, and what to say of them.

    One per PCI function of a TPU that is handed to user space through VFIO, as torch_tpu counts them
    (_internal/utils/hardware.py of 0.2.0, _scan_pci_tpus).
    """
    functions = [folder for folder in _folders(pci) if generation(folder)]
    if not functions:
        return (), "no TPU on the PCI bus"
    open_to_us = [folder for folder in functions if _group(folder, vfio)]
    if not open_to_us:
        return (), (
            f"{len(functions)} x TPU on the PCI bus, none of them in {vfio}, through which TorchTPU opens them; bind "
            "them to vfio-pci, and hand the devices to this container"
        )
    chips = [found.name for folder in open_to_us if (found := generation(folder))]
    devices = tuple(
        DeviceInfo(index, chip, path=str(folder))
        for index, (chip, folder) in enumerate(zip(chips, open_to_us, strict=True))
    )
    return devices, f"{len(devices)} x {chips[0]} on the PCI bus"


def _folders(pci: Path) -> list[Path]:
    try:
        return sorted(pci.iterdir())
    except OSError:
        return []


def _group(function: Path, vfio: Path) -> bool:
    """Whether the IOMMU group of a PCI function is in ``vfio``."""
    try:
        return (vfio / os.readlink(function / "iommu_group").rpartition("/")[2]).exists()
    except OSError:
        return False


def _has_library() -> bool:
    return find_spec("libtpu") is not None or os.path.isfile(os.environ.get(LIBRARY_VARIABLE, ""))
