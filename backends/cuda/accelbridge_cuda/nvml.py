"""What NVML tells of this host, as plain data. NVML opens no CUDA context, so a process may fork afterwards.

The library ``libnvidia-ml.so.1`` comes with the driver; it is called through ctypes, as torch itself does
(``torch/cuda/__init__.py``, ``_raw_device_count_nvml``). Signatures, constants and structs are those of ``nvml.h``
(NVIDIA NVML API Reference Guide, docs.nvidia.com/deploy/nvml-api). Nothing is judged here: see :mod:`.host`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LIBRARY = "libnvidia-ml.so.1"

DRIVER_NOT_LOADED, NO_PERMISSION, INSUFFICIENT_SIZE, VERSION_MISMATCH = 9, 4, 7, 18
"""Of ``nvmlReturn_t``: NVML_ERROR_DRIVER_NOT_LOADED, _NO_PERMISSION, _INSUFFICIENT_SIZE, _LIB_RM_VERSION_MISMATCH."""
PROHIBITED, EXCLUSIVE_PROCESS = 2, 3
"""Of ``nvmlComputeMode_t``."""
_TEXT = 96
"""Bytes of any text that is asked for: NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE are 96, the
driver's version takes up to 80."""


@dataclass(frozen=True)
class Instance:
    """One MIG device: a compute instance of a GPU instance."""

    uuid: str
    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``index`` is NVML's: ascending PCI address."""

    index: int
    name: str
    uuid: str
    vendor_id: int
    """Of PCI: 0x10de is NVIDIA."""
    compute_capability: tuple[int, int]
    memory_bytes: int | None = None
    minor: int | None = None
    """Of ``/dev/nvidiaN``."""
    compute_mode: int = 0
    processes: int | None = None
    """Processes that have opened it for computing; None where NVML doesn't tell."""
    mig: bool = False
    """Whether MIG mode is on."""
    instances: tuple[Instance, ...] = ()


@dataclass(frozen=True)
class Reading:
    """One look at a host."""

    loaded: bool
    """Whether the library could be loaded."""
    error: int = 0
    """What ``nvmlInit_v2`` returned; 0 is success."""
    error_text: str = ""
    driver: str = ""
    """Such as "550.54.15"."""
    cuda: int | None = None
    """Of the CUDA driver library, 1000 x major + 10 x minor, such as 12040; None where it isn't found."""
    gpus: tuple[Gpu, ...] = ()
    files: tuple[str, ...] = ()
    """Those of :data:`FILES` that there are."""

    def as_dict(self) -> dict[str, Any]:
        """JSON data; :meth:`from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reading:
        """A reading from JSON data. Raises TypeError for an unknown key."""
        gpus = [
            Gpu(
                **{
                    **gpu,
                    "compute_capability": tuple(gpu["compute_capability"]),
                    "instances": tuple(Instance(**each) for each in gpu.get("instances", ())),
                }
            )
            for gpu in data.get("gpus", ())
        ]
        return cls(**{**data, "gpus": tuple(gpus), "files": tuple(data.get("files", ()))})


FILES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")
"""Where the driver shows itself without NVML: its control device, WSL's device, and what the kernel module states."""


class _Pci(ctypes.Structure):
    """``nvmlPciInfo_t``."""

    _fields_ = [
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    ]


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``, in bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Refused(Exception):
    """A call that returned something other than success: ``code``."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Nvml:
    """The calls that are needed. One that this driver lacks counts as refused."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise _Refused(13) from None  # NVML_ERROR_FUNCTION_NOT_FOUND
        if code := int(function(*arguments)):
            raise _Refused(code)

    def text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(_TEXT)
        self.call(name, *arguments, buffer, ctypes.c_uint(_TEXT))
        return buffer.value.decode(errors="replace")

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int:
        value = kind()
        self.call(name, *arguments, ctypes.byref(value))
        return int(value.value)

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(device))
        return device

    def error_text(self, code: int) -> str:
        try:
            function = self._library.nvmlErrorString
        except AttributeError:
            return f"error {code}"
        function.restype = ctypes.c_char_p
        return (function(ctypes.c_int(code)) or b"").decode(errors="replace") or f"error {code}"


def _or_none(read: Callable[[], int]) -> int | None:
    try:
        return read()
    except _Refused:
        return None


def read(load: Callable[[str], Any] = ctypes.CDLL, root: Path = Path("/")) -> Reading:
    """Look at this host. Raises nothing for what a host may lack; ``load`` and ``root`` are for tests."""
    files = tuple(file for file in FILES if (root / file.lstrip("/")).exists())
    try:
        nvml = _Nvml(load(LIBRARY))
    except OSError:
        return Reading(False, files=files)
    try:
        nvml.call("nvmlInit_v2")
    except _Refused as refused:
        return Reading(True, refused.code, nvml.error_text(refused.code), files=files)
    try:
        return _read(nvml, files)
    except _Refused as refused:
        return Reading(True, refused.code, nvml.error_text(refused.code), files=files)
    finally:
        with suppress(_Refused):  # closes its files; a library that is gone has none open
            nvml.call("nvmlShutdown")


def _read(nvml: _Nvml, files: tuple[str, ...]) -> Reading:
    driver = nvml.text("nvmlSystemGetDriverVersion")
    # v2 asks libcuda itself, so that a forward-compatibility package counts; it is an error where there is none.
    cuda = _or_none(lambda: nvml.number("nvmlSystemGetCudaDriverVersion_v2", kind=ctypes.c_int))
    count = nvml.number("nvmlDeviceGetCount_v2")
    gpus: list[Gpu] = []
    for index in range(count):
        with suppress(_Refused):  # one that fell off the bus, or that this user may not open, is none of ours
            gpus.append(_gpu(nvml, index))
    return Reading(True, driver=driver, cuda=cuda, gpus=tuple(gpus), files=files)


def _gpu(nvml: _Nvml, index: int) -> Gpu:
    device = nvml.handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.call("nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
    pci = _Pci()
    nvml.call("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(pci))
    mig = _mig_enabled(nvml, device)
    return Gpu(
        index,
        nvml.text("nvmlDeviceGetName", device),
        nvml.text("nvmlDeviceGetUUID", device),
        int(pci.pciDeviceId) & 0xFFFF,  # the device's id is above it
        (major.value, minor.value),
        _or_none(lambda: _memory(nvml, device)),
        _or_none(lambda: nvml.number("nvmlDeviceGetMinorNumber", device)),
        _or_none(lambda: nvml.number("nvmlDeviceGetComputeMode", device)) or 0,
        _or_none(lambda: _processes(nvml, device)),
        mig,
        tuple(_instances(nvml, device)) if mig else (),
    )


def _memory(nvml: _Nvml, device: ctypes.c_void_p) -> int:
    memory = _Memory()
    nvml.call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
    return int(memory.total)


def _processes(nvml: _Nvml, device: ctypes.c_void_p) -> int:
    """How many, without a buffer for them: NVML then says how large it must be."""
    count = ctypes.c_uint(0)
    try:
        nvml.call("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), None)
    except _Refused as refused:
        if refused.code != INSUFFICIENT_SIZE:
            raise
    return int(count.value)


def _mig_enabled(nvml: _Nvml, device: ctypes.c_void_p) -> bool:
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        nvml.call("nvmlDeviceGetMigMode", device, ctypes.byref(current), ctypes.byref(pending))
    except _Refused:  # no MIG in this GPU
        return False
    return current.value == 1  # NVML_DEVICE_MIG_ENABLE


def _instances(nvml: _Nvml, device: ctypes.c_void_p) -> list[Instance]:
    found: list[Instance] = []
    for index in range(_or_none(lambda: nvml.number("nvmlDeviceGetMaxMigDeviceCount", device)) or 0):
        with suppress(_Refused):  # places that no instance takes
            instance = nvml.handle("nvmlDeviceGetMigDeviceHandleByIndex", device, ctypes.c_uint(index))
            uuid, name = nvml.text("nvmlDeviceGetUUID", instance), nvml.text("nvmlDeviceGetName", instance)
            memory = _or_none(lambda handle=instance: _memory(nvml, handle))
            found.append(Instance(uuid, name, memory))
    return found
