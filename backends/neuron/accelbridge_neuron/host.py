"""Can this backend run here? The judgement on what :mod:`.driver` read: pure, and each outcome says its reason.

Neither torch nor the SDK is imported for it, and no device is opened.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from packaging.version import InvalidVersion, Version

from accelbridge.backend import DeviceInfo, Probe
from accelbridge.portable.torch_build import read_torch_build
from accelbridge.portable.visible import summary
from accelbridge_neuron import driver
from accelbridge_neuron.driver import Reading
from accelbridge_neuron.facts import CHIPS, REFUSED

DISTRIBUTION, PACKAGE = "torch-neuronx", "torch_neuronx"
INSTALL = "install torch-neuronx 2.33 of the torch that is used (awsdocs-neuron.readthedocs-hosted.com)"
OLDEST_NATIVE = "2.13"
"""The first torch with an official native build: torch-neuronx 2.13.3.0 and 2.14.3.0 are Neuron 2.33's."""
CORES = 8
"""Physical cores of a Trainium2 or Trainium3 (SDK, neuron-ls user guide; two make a logical one by default, LNC 2)."""


@dataclass(frozen=True)
class Software:
    """What is installed, by the metadata of distributions."""

    torch: str = ""
    sdk: str = ""
    """Version of torch-neuronx; "" where there is none."""
    importable: bool = False
    """Whether a package torch_neuronx would be found."""


def probe() -> Probe:
    """The answer for this host and environment. Never raises, opens no device."""
    found = judge(driver.read(), os.environ, installed())
    return replace(found, facts={"host": platform.node(), "python": platform.python_version(), **found.facts})


def installed() -> Software:
    """Read without importing anything."""
    build = read_torch_build()
    try:
        sdk = version(DISTRIBUTION)
    except PackageNotFoundError:
        sdk = ""
    return Software(build.version if build else "", sdk, find_spec(PACKAGE) is not None)


def judge(reading: Reading, environment: Mapping[str, str], software: Software) -> Probe:
    """What ``reading`` means to the installed ``software`` under ``environment``."""
    versions = {name: text for name, text in (("torch", software.torch), ("torch_neuronx", software.sdk)) if text}
    problem = _no_device(reading) or _wrong_chip(reading) or _wrong_software(software)
    cores, remarks = ([], []) if problem else _cores(reading)
    if not problem:
        cores, problem = _visible(cores, driver.visible_cores(environment))
    if problem:
        return Probe(False, problem, software=versions)
    return Probe(True, "; ".join([summary(cores), *remarks, *_held(reading)]), tuple(cores), versions)


# ------------------------------------------------------------------------------------------- devices and software


def _no_device(reading: Reading) -> str:
    if reading.names:
        return ""
    if reading.module:
        return (
            "the Neuron driver is loaded, but it shows no device; pass one in (docker run --device=/dev/neuron0), or "
            "see dmesg"
        )
    return f"no Neuron driver: /{driver.CLASS} is not there (install aws-neuronx-dkms)"


def _wrong_chip(reading: Reading) -> str:
    names = sorted(set(reading.names.values()))
    if len(names) > 1:
        return f"devices of several models on one host: {', '.join(name or 'unknown' for name in names)}"
    if f"AWS {names[0]}" in CHIPS.values():
        return ""
    return REFUSED.get(names[0], f'device_name "{names[0]}" is not one of Trainium2, Trainium3')


def _wrong_software(software: Software) -> str:
    if not software.torch:
        return f"torch is not installed; {INSTALL}"
    if not software.sdk or not software.importable:
        return f"devices are here, but no {PACKAGE}; {INSTALL}"
    try:
        torch, sdk = Version(software.torch), Version(software.sdk)
    except InvalidVersion as e:
        return f"versions that are none: {e}"
    if sdk < Version(OLDEST_NATIVE):
        return (
            f"torch-neuronx {sdk} is refused: before {OLDEST_NATIVE} it is the PyTorch/XLA package, which AWS no "
            f"longer supports for training from Neuron 2.30 on, or a pre-release; {INSTALL}"
        )
    if sdk.release[:2] != torch.release[:2]:
        return (
            f"torch-neuronx {sdk} is built for torch {sdk.release[0]}.{sdk.release[1]}, and torch {torch} is "
            f"installed; {INSTALL}"
        )
    return ""


# ------------------------------------------------------------------------------------------------- logical cores


def _cores(reading: Reading) -> tuple[list[DeviceInfo], list[str]]:
    """One entry per logical core, which is what a process takes, and what to say of how they were counted."""
    listed = {int(each["neuron_device"]): each for each in reading.listing or ()}
    cores: list[DeviceInfo] = []
    for number, name in reading.names.items():
        count, memory = _logical(listed.get(number))
        for place in range(count):
            path = f"/{driver.CLASS}/neuron{number}/neuron_core{place * (CORES // count)}"
            cores.append(DeviceInfo(len(cores), f"AWS {name}", memory, path))
    return cores, [] if reading.listing is not None else [f"logical cores counted by default (LNC 2): {reading.lister}"]


def _logical(listed: Mapping[str, Any] | None) -> tuple[int, int | None]:
    """Logical cores of a device, and bytes of each. What nc_count counts differs by release: physical or logical."""
    if listed is None:
        return CORES // 2, None
    group = int(listed.get("logical_neuroncore_config") or 1)
    count = int(listed.get("nc_count") or CORES // group)
    count = count // group if count == CORES else count
    memory = listed.get("memory_size")
    return count, int(memory) // count if memory else None


def _visible(cores: list[DeviceInfo], asked: str) -> tuple[list[DeviceInfo], str]:
    """Those that NEURON_RT_VISIBLE_CORES leaves: numbers and inclusive ranges, with commas (SDK, configuration guide).

    A rank of this run gets its own by its local rank, so a list that a launcher exports to all of them cannot work."""
    if not asked:
        return cores, ""
    shown: list[int] = []
    for part in asked.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return [], f'NEURON_RT_VISIBLE_CORES="{asked}": "{part}" is no core and no range of cores'
        shown += range(int(first), int(last or first) + 1)
    if beyond := [index for index in shown if index >= len(cores)]:
        return [], f'NEURON_RT_VISIBLE_CORES="{asked}" names core {beyond[0]}; here are 0 to {len(cores) - 1}'
    return [replace(cores[core], index=index) for index, core in enumerate(shown)], ""


def _held(reading: Reading) -> list[str]:
    """Devices on which neuron-ls sees processes: perhaps other ranks of this run, so it is no refusal."""
    if text := holders(reading):
        return [f"in use: {text}"]
    return []


def holders(reading: Reading) -> str:
    """``"neuron0 by pid 12 (python train.py)"`` for every device that neuron-ls sees in use."""
    return ", ".join(
        f"neuron{each['neuron_device']} by pid {process.get('pid')} ({process.get('command', '?')})"
        for each in reading.listing or ()
        for process in each.get("neuron_processes") or ()
    )
