"""Which devices are here, as the operating system tells: nothing of torch_xla is imported and no chip is opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from accelbridge.backend import Chip

PLATFORM_VARIABLE = "PJRT_DEVICE"
VIRTUAL_VARIABLE = "CPU_NUM_DEVICES"
CACHE_VARIABLE = "XLA_PERSISTENT_CACHE_PATH"
"""Names the folder in which torch_xla keeps compiled programs from one process to the next (torch_xla 2.9.0)."""
VIRTUAL = "torch_xla on virtual CPU devices"
"""Name of the "chip" where XLA's CPU client stands in for one: evidence for the vendor's runtime, for no chip."""

ONE_PROCESS = "the XLA backend runs on one host, where one process drives all devices"

_VENDOR = "0x1ae0"
PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Generation:
    """One generation of TPU: its name, how many devices the runtime shows per PCI function, and its peak."""

    name: str
    devices: int
    bfloat16_flops: float
    """Dense FLOP/s per device, from the vendor's page of that generation (docs.cloud.google.com/tpu/docs)."""


GENERATIONS = {
    "0x005e": Generation("TPU v4", 1, 275e12),
    "0x0063": Generation("TPU v5e", 1, 197e12),
    "0x0062": Generation("TPU v5p", 1, 459e12),
    "0x006f": Generation("TPU v6e", 1, 918e12),
    "0x0076": Generation("TPU v7", 2, 2307e12 / 2),
}
"""By PCI device id."""


@dataclass(frozen=True)
class Found:
    """What this host offers: ``count`` devices of ``chip``, or none and the reason."""

    chip: str
    count: int
    reason: str


def find(pci: Path = PCI) -> Found:
    """Look at the environment and the PCI bus.

    Virtual devices have to be asked for twice, by ``PJRT_DEVICE=CPU`` and by their number: importing torch_xla sets
    the former by itself wherever it finds no chip, and a library that is installed is not an accelerator.
    """
    platform = os.environ.get(PLATFORM_VARIABLE, "")
    if platform == "CPU":
        return _virtual()
    if platform not in ("", "TPU"):
        return Found("", 0, f"{PLATFORM_VARIABLE}={platform} is set; this backend drives TPU and CPU")
    functions = [found for folder in _folders(pci) if (found := generation(folder))]
    if not functions:
        return Found(
            "",
            0,
            f"no TPU on the PCI bus; set {PLATFORM_VARIABLE}=CPU and {VIRTUAL_VARIABLE}=4 for virtual CPU devices",
        )
    first = functions[0]
    count = sum(each.devices for each in functions)
    return Found(first.name, count, f"{len(functions)} x {first.name} on the PCI bus")


def _virtual() -> Found:
    text = os.environ.get(VIRTUAL_VARIABLE, "")
    if not text.isdecimal() or int(text) < 1:
        return Found(
            "",
            0,
            f"{PLATFORM_VARIABLE}=CPU is set, {VIRTUAL_VARIABLE} is {text or 'not'}; set it to a number, such as 4",
        )
    return Found(VIRTUAL, int(text), f"{text} virtual CPU devices ({VIRTUAL_VARIABLE}); evidence for no chip")


def _folders(pci: Path) -> list[Path]:
    try:
        return sorted(pci.iterdir())
    except OSError:
        return []


def generation(function: Path) -> Generation | None:
    """The TPU behind a folder of the PCI bus, or None."""
    try:
        vendor, device = ((function / name).read_text().strip() for name in ("vendor", "device"))
    except OSError:
        return None
    return GENERATIONS.get(device) if vendor == _VENDOR else None


def chip(name: str) -> Chip:
    """Facts of a chip. Memory is not tabulated: the runtime tells it once the chip is open."""
    for each in GENERATIONS.values():
        if each.name == name:
            return Chip(name, peak_flops={"bfloat16": each.bfloat16_flops})
    return Chip(name)


def without_cache() -> str:
    """Why the compiled programs that the environment asks to be kept will not be found again; "" where they will, or
    nobody asked."""
    folder = os.environ.get(CACHE_VARIABLE)
    if not folder or find().chip != VIRTUAL:
        return ""
    return (
        f"{CACHE_VARIABLE} {folder} asked; XLA's CPU client writes programs there and cannot read them again "
        "(torch_xla 2.9.0: UNIMPLEMENTED), so that every process compiles anew; leave it out on virtual devices"
    )
