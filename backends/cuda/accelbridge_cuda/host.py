"""Can this backend run here? The judgement on what :mod:`.nvml` read: pure, and each outcome says its reason.

Neither torch nor a library of CUDA is loaded for it, and no context is created.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from accelbridge.backend import DeviceInfo, Probe
from accelbridge.kernels.installed import triton_software
from accelbridge.portable.torch_build import TorchBuild, numbers, read_torch_build
from accelbridge.portable.visible import Visible, one_chip, select, summary
from accelbridge_cuda import nvml
from accelbridge_cuda.nvml import Gpu, Instance, Reading

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
VENDOR = 0x10DE
MINIMUM_DRIVERS = {12: "525.60.13", 13: "580"}
"""CUDA major version -> the oldest Linux driver that runs all of its minor versions: NVIDIA CUDA Toolkit Release Notes,
table "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version Compatibility"."""
INDEXES = {12: "cu126 or cu128", 13: "cu130"}
"""CUDA major version -> wheel indexes of torch 2.9 and later, which have none for CUDA 11 (pytorch/pytorch#147383);
pytorch.org/get-started/locally lists those of now."""
BLACKWELL_SINCE = (12, 8)
"""The first CUDA whose wheels of torch hold code for compute capability 10.0 and 12.0; those of 12.6 end at 9.0, and
hold none that a driver could compile for a later one: torch/cuda/__init__.py, PYTORCH_RELEASES_CODE_CC (torch 2.13),
and .ci/manywheel/build_cuda.sh of torch 2.10, TORCH_CUDA_ARCH_LIST."""
BLACKWELL_INDEXES = {12: "cu128 (torch 2.9 to 2.11) or cu129 (torch 2.12 and 2.13)", 13: "cu130"}
"""RELEASE.md of pytorch/pytorch, by pytorch/pytorch#182849 (12.8 ends with 2.11) and #188443 (12.9 in 2.12, 2.13)."""
INSTALL = "pytorch.org/get-started/locally"
LIBRARIES = {"cudnn": "nvidia-cudnn-cu{major}", "nccl": "nvidia-nccl-cu{major}"}
"""What torch's wheels from PyPI depend on, by which its versions can be told without loading it."""


@dataclass(frozen=True)
class _Device:
    """What a process would see as one device: a GPU, or a MIG device of it."""

    gpu: Gpu
    instance: Instance | None = None

    @property
    def uuid(self) -> str:
        return self.instance.uuid if self.instance else self.gpu.uuid


def probe() -> Probe:
    """The answer for this host and environment. Never raises; loads ``libnvidia-ml.so.1``, and closes its files."""
    build = read_torch_build()
    found = judge(nvml.read(), os.environ, build)
    facts = {"host": platform.node(), "python": platform.python_version(), **found.facts}
    return replace(found, software={**found.software, **libraries(build), **triton_software()}, facts=facts)


def libraries(build: TorchBuild | None) -> dict[str, str]:
    """Versions of cuDNN and NCCL as far as distributions tell them (a torch that brings its own tells none)."""
    major = (numbers((build.built_for.get("cuda") if build else None) or "") or (0,))[0]
    found: dict[str, str] = {}
    for name, distribution in LIBRARIES.items():
        try:
            found[name] = version(distribution.format(major=major))
        except PackageNotFoundError:
            continue
    return found


def judge(reading: Reading, environment: Mapping[str, str], build: TorchBuild | None) -> Probe:
    """What ``reading`` means to the installed torch under ``environment``."""
    software = {}
    if build is not None:
        software["torch"] = build.version
        if cuda := build.built_for.get("cuda"):
            software["cuda"] = cuda
    facts = {"driver": reading.driver} if reading.driver else {}
    problem = _no_driver(reading)
    if problem and build is not None and build.kinds and not build.built_for.get("cuda"):
        problem = f"{problem}; besides, {_wrong_torch(reading, build)}"  # who chose this backend here needs both
    problem = problem or _look_alike(reading) or _wrong_torch(reading, build) or _old_driver(reading, build)
    if problem:
        return Probe(False, problem, software=software, facts=facts)
    devices, remark, problem = _visible(reading.gpus, environment)
    if problem:
        return Probe(False, problem, software=software, facts=facts)
    infos = tuple(_info(index, device) for index, device in enumerate(devices))
    if problem := _no_code(infos, reading, build):
        return Probe(False, problem, software=software, facts=facts)
    busy = [index for index, device in enumerate(devices) if _busy(device.gpu)]
    if len(busy) == len(devices):
        return Probe(False, _all_busy(devices), software=software, facts=facts)
    remarks = [f"{summary(infos)}, driver {reading.driver}", remark, _some_busy(busy, devices, environment)]
    return Probe(True, "; ".join(filter(None, remarks)), infos, software, facts)


def chip(probe: Probe, mixed: str) -> tuple[str, str]:
    """The chip that a plan is made for (:meth:`accelbridge.backend.Backend.chip`). Raises BackendError."""
    return one_chip(probe, mixed, arch_number, VISIBLE)


def arch_number(chip: str) -> int:
    """``"NVIDIA H100 80GB HBM3 (sm90)"`` -> 90; one without an architecture comes last."""
    found = re.search(r"\(sm(\d+)\)$", chip)
    return int(found[1]) if found else 1 << 16


# ------------------------------------------------------------------------------------------- driver and library


def _no_driver(reading: Reading) -> str:
    if not reading.loaded:
        if reading.files:
            return (
                f"a driver is there ({reading.files[0]}), but {nvml.LIBRARY} is not; install the driver's libraries of "
                "the same version, in a container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            )
        return f"no NVIDIA driver: {nvml.LIBRARY} is not installed"
    if reading.error == nvml.DRIVER_NOT_LOADED:
        return f"{nvml.LIBRARY} is installed, but the kernel module nvidia is not loaded; load it, or see dmesg"
    if reading.error == nvml.VERSION_MISMATCH:
        return (
            f"{nvml.LIBRARY} and the loaded kernel module are of different driver versions ({reading.error_text}); "
            "restart the host, or load the module of the installed driver"
        )
    if reading.error == nvml.NO_PERMISSION:
        return f"{nvml.LIBRARY} may not open the driver ({reading.error_text}); see the permissions of /dev/nvidiactl"
    if reading.error:
        return f"{nvml.LIBRARY} cannot be used: {reading.error_text} (error {reading.error}); see nvidia-smi"
    if not reading.gpus:
        return f"driver {reading.driver} is there, but it shows no GPU; see nvidia-smi -L"
    return ""


def _look_alike(reading: Reading) -> str:
    """Other vendors ship a library that answers as NVML, so that tools made for it go on working."""
    others = sorted({gpu.vendor_id for gpu in reading.gpus if gpu.vendor_id != VENDOR})
    if not others:
        return ""
    gpu = next(gpu for gpu in reading.gpus if gpu.vendor_id != VENDOR)
    whose = "AMD, for which there is the backend rocm" if gpu.vendor_id == 0x1002 else "another vendor"
    return (
        f'{nvml.LIBRARY} answers for "{gpu.name}" of PCI vendor {gpu.vendor_id:04x} ({whose}), not of NVIDIA '
        f"({VENDOR:04x}); it is another vendor's look-alike; choose that vendor's backend"
    )


def _wrong_torch(reading: Reading, build: TorchBuild | None) -> str:
    install = f"install torch from the wheel index {_index(reading)} ({INSTALL})"
    if build is None:
        return f"torch is not installed; {install}"
    if build.built_for.get("cuda"):
        return ""
    kinds = build.kinds
    if kinds:
        other = f"ROCm {kinds['hip']}" if "hip" in kinds else ", ".join(f"{name} {kinds[name]}" for name in kinds)
        return f"torch {build.version} is built for {other}, not for CUDA; {install}"
    return f"torch {build.version} is built for CPUs only; {install}"


def _index(reading: Reading) -> str:
    """The index whose torch this driver runs."""
    if not reading.driver:
        return "named cu and a version, such as cu130"
    majors = [major for major in MINIMUM_DRIVERS if _serves(reading, major)]
    new = any(gpu.compute_capability[0] > 9 for gpu in reading.gpus)
    if not majors:
        return f"{'cu128' if new else 'cu126'} or newer, with a newer driver"
    return (BLACKWELL_INDEXES if new else INDEXES)[max(majors)]


def _serves(reading: Reading, major: int) -> bool:
    minimum = MINIMUM_DRIVERS.get(major)
    by_package = reading.cuda is not None and reading.cuda // 1000 >= major  # also by a forward-compatibility package
    return by_package or (minimum is not None and numbers(reading.driver) >= numbers(minimum))


def _old_driver(reading: Reading, build: TorchBuild | None) -> str:
    cuda = (build.built_for.get("cuda") if build else None) or ""
    major = (numbers(cuda) or (0,))[0]
    if build is None or not major or _serves(reading, major):
        return ""
    if major not in MINIMUM_DRIVERS and reading.cuda is None:
        return ""  # newer than the table, and the driver doesn't tell what it can do
    older = [known for known in MINIMUM_DRIVERS if known < major and _serves(reading, known)]
    other = f", or torch from the wheel index {INDEXES[max(older)]} ({INSTALL})" if older else ""
    needs = f"driver {MINIMUM_DRIVERS[major]} or newer" if major in MINIMUM_DRIVERS else f"a driver of CUDA {major}"
    return (
        f"driver {reading.driver} is too old for torch {build.version}, which is built for CUDA {cuda} and needs "
        f"{needs}; install a newer driver{other}"
    )


def lacks_code(chip: str, cuda: str | None) -> bool:
    """Whether torch's wheels for this CUDA hold no code for ``chip``; those of other builds may hold any."""
    return 100 <= arch_number(chip) < 1 << 16 and numbers(cuda or "") < BLACKWELL_SINCE and bool(numbers(cuda or ""))


def _no_code(devices: Sequence[DeviceInfo], reading: Reading, build: TorchBuild | None) -> str:
    cuda = build.built_for.get("cuda") if build else None
    without = next((device.chip for device in devices if lacks_code(device.chip, cuda)), None)
    if build is None or without is None:
        return ""
    older = any(not lacks_code(device.chip, cuda) for device in devices)
    return (
        f"torch {build.version} is built for CUDA {cuda}, whose wheels hold no code for {without}; install torch from "
        f"the wheel index {_index(reading)} ({INSTALL}){f', or leave that GPU out by {VISIBLE}' if older else ''}"
    )


# ------------------------------------------------------------------------------------------------- visibility


def _visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[list[_Device], str, str]:
    """The devices that a process gets, a remark, and the problem where there is none."""
    text = environment.get(VISIBLE)
    if problem := _ambiguous_order(gpus, text, environment):
        return [], "", problem
    shown, chosen = _choose(gpus, text)
    if not chosen:
        do = "see nvidia-smi -L for their UUIDs" if _names_instances(text) else f"name some of 0 to {len(gpus) - 1}"
        return [], "", f'{VISIBLE}="{text}" leaves no GPU visible: {shown.remark}; {do}'
    remark = f'{VISIBLE}="{text}": {shown.remark}' if shown.remark else ""
    if any(device.instance for device in chosen):
        # MIG User Guide, CUDA Device Enumeration: a process opens one compute instance, and no GPU beside it.
        first = next(device for device in chosen if device.instance)
        more = f"MIG: a process opens one instance of the {len(chosen)} visible" if len(chosen) > 1 else ""
        return [first], "; ".join(filter(None, [remark, more])), ""
    whole = [device for device in chosen if not device.gpu.mig]
    if not whole:
        return (
            [],
            "",
            (
                "MIG mode is on, and the visible GPUs have no instances; create some (nvidia-smi mig -cgi ... -C), or "
                "switch MIG mode off"
            ),
        )
    if len(whole) < len(chosen):
        remark = "; ".join(filter(None, [remark, f"{len(chosen) - len(whole)} in MIG mode without instances left out"]))
    return whole, remark, ""


def _names_instances(text: str | None) -> bool:
    return text is not None and text.strip().startswith("MIG-")


def _choose(gpus: Sequence[Gpu], text: str | None) -> tuple[Visible, list[_Device]]:
    if _names_instances(text):
        instances = [_Device(gpu, instance) for gpu in gpus for instance in gpu.instances]
        shown = select(text, [device.uuid for device in instances], "MIG-", abbreviated=True)
        return shown, [instances[index] for index in shown.indices]
    shown = select(text, [gpu.uuid for gpu in gpus], "GPU-", abbreviated=True)
    chosen: list[_Device] = []
    for index in shown.indices:
        gpu = gpus[index]
        chosen += [_Device(gpu, instance) for instance in gpu.instances] or [_Device(gpu)]
    return shown, chosen


def _ambiguous_order(gpus: Sequence[Gpu], text: str | None, environment: Mapping[str, str]) -> str:
    """CUDA numbers devices from the fastest unless told otherwise (CUDA C++ Programming Guide, CUDA_DEVICE_ORDER), NVML
    by PCI address: with several models the two differ, and by how much can't be told from outside."""
    numbered = text is not None and re.match(r"\s*\d", text) is not None
    several = len({gpu.name for gpu in gpus}) > 1
    if not (numbered and several) or environment.get(ORDER) == "PCI_BUS_ID":
        return ""
    models = " and ".join(dict.fromkeys(gpu.name for gpu in gpus))
    return (
        f'{VISIBLE}="{text}" on a host with {models}: CUDA numbers them from the fastest, the driver by PCI address; '
        f"set {ORDER}=PCI_BUS_ID as well, or name GPUs by their UUID (nvidia-smi -L)"
    )


def _info(index: int, device: _Device) -> DeviceInfo:
    gpu, instance = device.gpu, device.instance
    name, memory = (instance.name, instance.memory_bytes) if instance else (gpu.name, gpu.memory_bytes)
    path = f"/dev/nvidia{gpu.minor}" if gpu.minor is not None else ""
    return DeviceInfo(index, f"{name} (sm{gpu.compute_capability[0]}{gpu.compute_capability[1]})", memory, path)


# ------------------------------------------------------------------------------------------------------- busy


def _busy(gpu: Gpu) -> bool:
    taken = gpu.compute_mode == nvml.EXCLUSIVE_PROCESS and bool(gpu.processes)
    return taken or gpu.compute_mode == nvml.PROHIBITED


def _all_busy(devices: Sequence[_Device]) -> str:
    which = "the visible GPU is" if len(devices) == 1 else f"all {len(devices)} visible GPUs are"
    if all(device.gpu.compute_mode == nvml.PROHIBITED for device in devices):
        return f"{which} in compute mode prohibited; set another (nvidia-smi -c DEFAULT)"
    return (
        f"{which} in exclusive-process mode and taken by other processes, or prohibited; wait for them (nvidia-smi "
        "lists them), or set compute mode default (nvidia-smi -c DEFAULT)"
    )


def _some_busy(busy: Sequence[int], devices: Sequence[_Device], environment: Mapping[str, str]) -> str:
    if not busy:
        return ""
    free = ",".join(device.uuid for index, device in enumerate(devices) if index not in busy)
    listed = ", ".join(map(str, busy))
    return f"device {listed} is taken or prohibited (compute mode): set {VISIBLE}={free} to leave it out"
