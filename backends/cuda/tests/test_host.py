"""Probing: what NVML may say, and what it means. Readings are data files; see tests/data/probes/README.md."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelbridge.backend import Probe
from accelbridge.errors import BackendError
from accelbridge.portable.torch_build import TorchBuild, read_torch_build
from accelbridge_cuda import host, nvml
from accelbridge_cuda.nvml import Reading

DATA = Path(__file__).parents[3] / "tests" / "data" / "probes" / "cuda"
CUDA126 = TorchBuild("2.13.0+cu126", {"cuda": "12.6", "hip": None})
CUDA12 = TorchBuild("2.10.0+cu128", {"cuda": "12.8", "hip": None})
CUDA13 = TorchBuild("2.13.0+cu130", {"cuda": "13.0", "hip": None})
CUDA14 = TorchBuild("3.1.0+cu140", {"cuda": "14.0", "hip": None})
CPU = TorchBuild("2.13.0+cpu", {"cuda": None, "hip": None})
ROCM = TorchBuild("2.13.0+rocm7.1", {"cuda": None, "hip": "7.1.25424"})
A100, H100 = "NVIDIA A100-SXM4-80GB (sm80)", "NVIDIA H100 80GB HBM3 (sm90)"


def reading(name: str) -> Reading:
    return Reading.from_dict(json.loads((DATA / f"{name}.json").read_text())["reading"])


def judge(name: str, environment: Mapping[str, str] | None = None, build: TorchBuild | None = CUDA12) -> Probe:
    return host.judge(reading(name), environment or {}, build)


# ------------------------------------------------------------------------------------------------- what is there


@pytest.mark.parametrize(
    ("name", "chip", "memory"),
    [
        ("a100", A100, 81920),
        ("h100", H100, 81559),
        ("h200", "NVIDIA H200 (sm90)", 143771),
        ("b200", "NVIDIA B200 (sm100)", 183359),
    ],
)
def test_a_machine_is_listed(name: str, chip: str, memory: int) -> None:
    found = judge(name)
    assert found.available, found.reason
    assert [(d.index, d.chip, d.path) for d in found.devices] == [(i, chip, f"/dev/nvidia{i}") for i in range(8)]
    assert {device.memory_bytes for device in found.devices} == {memory * 2**20}
    assert found.reason.startswith(f"8 x {chip}, driver ")
    assert found.software == {"torch": "2.10.0+cu128", "cuda": "12.8"}
    assert found.facts["driver"] == reading(name).driver


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_every_file_is_whole_and_names_its_sources(path: Path) -> None:
    data = json.loads(path.read_text())
    assert set(data) == {"what", "sources", "reading"}
    assert data["sources"]
    assert json.loads(json.dumps(Reading.from_dict(data["reading"]).as_dict())) == data["reading"]


@pytest.mark.parametrize(
    ("name", "build", "reason"),
    [
        ("no-driver", CUDA12, "no NVIDIA driver: libnvidia-ml.so.1 is not installed"),
        ("no-library", CUDA12, "a driver is there (/dev/nvidiactl), but libnvidia-ml.so.1 is not; install"),
        ("module-not-loaded", CUDA12, "the kernel module nvidia is not loaded"),
        ("version-mismatch", CUDA12, "of different driver versions (Driver/library version mismatch); restart"),
        ("no-gpu", CUDA12, "it shows no GPU"),
        ("look-alike", CUDA12, '"MetaX C500" of PCI vendor 9999 (another vendor)'),
        ("look-alike-amd", ROCM, "(AMD, for which there is the backend rocm)"),
        ("h100", None, "torch is not installed; install torch from the wheel index cu126 or cu128 (pytorch.org/"),
        ("h100", CPU, "torch 2.13.0+cpu is built for CPUs only; install torch from the wheel index cu126 or cu128"),
        ("b200", CPU, "install torch from the wheel index cu130"),
        ("h100", ROCM, "torch 2.13.0+rocm7.1 is built for ROCm 7.1.25424, not for CUDA; install torch from the wheel"),
        ("old-driver", CUDA12, "driver 470.103.01 is too old for torch 2.10.0+cu128, which is built for CUDA 12.8 and "
         "needs driver 525.60.13 or newer; install a newer driver"),
        ("old-driver", CPU, "install torch from the wheel index cu126 or newer, with a newer driver (pytorch.org/"),
        ("b200", CUDA14, "which is built for CUDA 14.0 and needs a driver of CUDA 14; install a newer driver, or torch "
         "from the wheel index cu130"),
        ("h100", CUDA13, "driver 550.127.05 is too old for torch 2.13.0+cu130, which is built for CUDA 13.0 and needs "
         "driver 580 or newer; install a newer driver, or torch from the wheel index cu126 or cu128"),
        ("b200", CUDA126, "torch 2.13.0+cu126 is built for CUDA 12.6, whose wheels hold no code for NVIDIA B200 "
         "(sm100); install torch from the wheel index cu130 (pytorch.org/get-started/locally)"),
        ("busy", CUDA12, "all 2 visible GPUs are in exclusive-process mode and taken by other processes"),
        ("prohibited", CUDA12, "all 2 visible GPUs are in compute mode prohibited"),
        ("a100-mig-empty", CUDA12, "MIG mode is on, and the visible GPUs have no instances; create some"),
    ],
)  # fmt: skip
def test_what_cannot_run_says_why(name: str, build: TorchBuild | None, reason: str) -> None:
    found = judge(name, build=build)
    assert not found.available
    assert reason in found.reason
    assert found.devices == ()


@pytest.mark.parametrize(
    "chip", ["NVIDIA B200 (sm100)", "NVIDIA B300 SXM6 AC (sm103)", "NVIDIA GeForce RTX 5090 (sm120)"]
)
def test_blackwell_needs_a_wheel_that_holds_its_code(chip: str) -> None:
    for cuda, lacking in (("12.6", True), ("12.8", False), ("12.9", False), ("13.0", False), (None, False)):
        assert host.lacks_code(chip, cuda) is lacking
    assert not host.lacks_code(H100, "12.6")
    assert not host.lacks_code("NVIDIA Thing", "12.6")  # of which nothing is known


def test_an_old_driver_of_a_new_gpu_is_told_a_wheel_that_serves_both() -> None:
    old = replace(reading("b200"), cuda=12080, driver="570.86.15")
    found = host.judge(old, {}, CUDA126)
    assert not found.available
    assert "from the wheel index cu128 (torch 2.9 to 2.11) or cu129 (torch 2.12 and 2.13)" in found.reason
    assert host.judge(old, {}, CUDA12).available


def test_a_mixed_host_may_leave_the_new_gpu_out() -> None:
    both = replace(reading("h100"), gpus=(*reading("h100").gpus[:1], *reading("b200").gpus[1:2]))
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert "or leave that GPU out by CUDA_VISIBLE_DEVICES" in host.judge(both, environment, CUDA126).reason
    assert host.judge(both, {**environment, "CUDA_VISIBLE_DEVICES": "0"}, CUDA126).available


def test_a_forward_compatibility_package_makes_an_old_driver_serve() -> None:
    assert judge("forward-compat").available
    assert not judge("forward-compat", build=CUDA13).available


def test_one_taken_gpu_is_named_with_what_leaves_it_out() -> None:
    found = judge("busy-one")
    assert found.available
    assert len(found.devices) == 2  # an index means the same to CUDA, whoever has taken the GPU
    assert "device 0 is taken or prohibited (compute mode): set CUDA_VISIBLE_DEVICES=GPU-" in found.reason
    free = found.reason.split("CUDA_VISIBLE_DEVICES=")[1].split()[0]
    assert len(judge("busy-one", {"CUDA_VISIBLE_DEVICES": free}).devices) == 1


# -------------------------------------------------------------------------------------------------- visibility

U3 = "GPU-00000000-0000-0000-0000-000000000003"


@pytest.mark.parametrize(
    ("text", "minors", "remark"),
    [
        ("2,0", [2, 0], ""),
        (" 2 , 0 ", [2, 0], ""),
        ("1gpu2,2ampere", [1, 2], ""),
        ("0,9,1", [0], '"9" is no device here; what follows it is not read, 1 before it stay'),
        ("0,-1,1", [0], '"-1" is no device here'),
        (U3, [2], ""),
        (U3 + ",0", [2], '"0" is no device here'),
        ("GPU-00000000-0000-0000-0000-0000000000", [], "is no device here"),
        ("", [], "it is empty"),
        ("-1", [], '"-1" is no device here'),
        ("9", [], '"9" is no device here'),
        ("0,0", [], '"0" is named twice'),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(text: str, minors: list[int], remark: str) -> None:
    found = judge("a100", {"CUDA_VISIBLE_DEVICES": text})
    assert found.available == bool(minors)
    assert [(d.index, d.path) for d in found.devices] == [(i, f"/dev/nvidia{minor}") for i, minor in enumerate(minors)]
    assert remark in found.reason
    assert remark or "CUDA_VISIBLE_DEVICES" not in found.reason


def test_a_mig_instance_is_one_device_with_its_own_memory() -> None:
    one = judge("a100-mig", {"CUDA_VISIBLE_DEVICES": "MIG-00000000-0000-0000-0000-000000000003"})
    assert [(d.chip, d.memory_bytes) for d in one.devices] == [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb (sm80)", 9728 * 2**20)
    ]
    assert "MIG:" not in one.reason
    every = judge("a100-mig")  # beside an instance CUDA shows no other device, not even the whole second GPU
    assert len(every.devices) == 1
    assert "MIG: a process opens one instance of the 8 visible" in every.reason
    assert [d.chip for d in judge("a100-mig", {"CUDA_VISIBLE_DEVICES": "1"}).devices] == [A100]
    none = judge("a100-mig", {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert not none.available
    assert none.reason.endswith("see nvidia-smi -L for their UUIDs")


# ------------------------------------------------------------------------------------------------ mixed models


def test_mixed_models_are_refused_or_planned_for_as_the_lowest() -> None:
    found = judge("mixed")
    assert found.available
    with pytest.raises(BackendError) as refused:
        host.chip(found, "refuse")
    text = str(refused.value)
    for part in (A100, H100, "CUDA_VISIBLE_DEVICES", "backend.options.mixed: lowest"):
        assert part in text
    chip, note = host.chip(found, "lowest")
    assert chip == A100
    assert note.startswith(f"several models here, 1 x {A100}, 1 x {H100}: planned for {A100}, the lowest")
    assert host.chip(judge("h100"), "refuse") == (H100, "")


def test_indices_on_a_mixed_host_need_an_order() -> None:
    ambiguous = judge("mixed", {"CUDA_VISIBLE_DEVICES": "0"})
    assert not ambiguous.available
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID as well, or name GPUs by their UUID" in ambiguous.reason
    ordered = judge("mixed", {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [device.chip for device in ordered.devices] == [H100]


def test_architectures_are_ordered_by_number() -> None:
    assert host.arch_number("NVIDIA B200 (sm100)") > host.arch_number(H100) > host.arch_number(A100)
    assert host.arch_number("something") > host.arch_number("NVIDIA B200 (sm100)")


# --------------------------------------------------------------------------------------------- NVML, and torch


class Library:
    """A stand-in for libnvidia-ml.so.1: one H100, and calls that are refused by name."""

    def __init__(self, **refused: int) -> None:
        self.refused = refused
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or (name in self.refused and self.refused[name] < 0):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name in self.refused:
                return self.refused[name]
            self.answer(name, arguments)
            return 7 if name == "nvmlDeviceGetComputeRunningProcesses_v3" else 0

        return call

    def answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        texts = {
            "nvmlSystemGetDriverVersion": b"550.127.05",
            "nvmlDeviceGetName": b"NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetUUID": b"GPU-1",
        }
        numbers = {
            "nvmlSystemGetCudaDriverVersion_v2": 12040,
            "nvmlDeviceGetCount_v2": 1,
            "nvmlDeviceGetMinorNumber": 3,
            "nvmlDeviceGetComputeMode": 3,
        }
        if name in texts:
            arguments[-2].value = texts[name]
        elif name in numbers:
            arguments[-1]._obj.value = numbers[name]
        elif name == "nvmlDeviceGetCudaComputeCapability":
            arguments[1]._obj.value, arguments[2]._obj.value = 9, 0
        elif name == "nvmlDeviceGetPciInfo_v3":
            arguments[1]._obj.pciDeviceId = 0x233010DE
        elif name == "nvmlDeviceGetMemoryInfo":
            arguments[1]._obj.total = 85 * 10**9
        elif name == "nvmlDeviceGetComputeRunningProcesses_v3":
            arguments[1]._obj.value = 2


def test_nvml_is_read_and_closed(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    library = Library(nvmlDeviceGetMigMode=3)
    found = nvml.read(lambda name: library, tmp_path)
    (gpu,) = found.gpus
    assert gpu == nvml.Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-1", 0x10DE, (9, 0), 85 * 10**9, 3, 3, 2)
    assert (found.driver, found.cuda, found.files) == ("550.127.05", 12040, ("/dev/nvidiactl",))
    assert library.called[0] == "nvmlInit_v2"
    assert library.called[-1] == "nvmlShutdown"


def test_what_a_driver_does_not_tell_stays_unknown() -> None:
    silent = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMinorNumber")
    library = Library(nvmlDeviceGetMigMode=3, nvmlSystemGetCudaDriverVersion_v2=-1, **dict.fromkeys(silent, 3))
    (gpu,) = nvml.read(lambda name: library).gpus
    assert (gpu.memory_bytes, gpu.processes, gpu.minor) == (None, None, None)
    assert nvml.read(lambda name: library).cuda is None


def test_a_refusal_and_a_lost_gpu_are_no_crash() -> None:
    assert nvml.read(lambda name: Library(nvmlInit_v2=9, nvmlErrorString=-1)) == Reading(
        True, 9, "error 9", files=nvml.read(lambda name: Library(nvmlInit_v2=9)).files
    )
    lost = nvml.read(lambda name: Library(nvmlDeviceGetName=15))
    assert (lost.error, lost.gpus) == (0, ())


def test_no_library_is_no_error() -> None:
    def absent(name: str) -> Any:
        raise OSError(name)

    assert not nvml.read(absent).loaded
    assert ctypes.sizeof(nvml._Pci) == 68  # nvmlPciInfo_t: 16 + 5 * 4 + 32 bytes


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("__version__ = '2.10.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", CUDA12),
        ("__version__ = '2.13.0+rocm7.1'\ncuda: str | None = None\nhip = '7.1.25424'\n", ROCM),
        ("__version__ = 1\n", None),
        ("this is no Python", None),
    ],
)
def test_torch_is_told_without_importing_it(tmp_path: Path, text: str, want: TorchBuild | None) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "torch" / "version.py").write_text(text)
    assert read_torch_build([str(tmp_path)]) == want
    assert read_torch_build([str(tmp_path / "nothing")]) is None


PROBE = """
import json, os, sys, threading
before = dict(os.environ), len(os.listdir("/proc/self/fd"))
from accelbridge_cuda.host import probe
found = probe()
after = dict(os.environ), len(os.listdir("/proc/self/fd"))
print(json.dumps({"reason": found.reason, "available": found.available, "software": dict(found.software),
    "same": before == after, "threads": threading.active_count(),
    "heavy": sorted({n.partition(".")[0] for n in sys.modules} & {"torch", "numpy", "pynvml", "pydantic"})}))
"""


def probed(path: Path, version: str) -> dict[str, Any]:
    """The probe in a process of its own, whose torch is a folder with nothing but ``version.py``."""
    (path / "torch").mkdir()
    (path / "torch" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (path / "torch" / "version.py").write_text(version)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_probe_loads_no_torch_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = probed(tmp_path, "__version__ = '2.13.0+rocm7.1'\nhip = '7.1'\ncuda = None\n")
    assert (found["heavy"], found["same"], found["threads"]) == ([], True, 1)
    assert found["software"]["torch"] == "2.13.0+rocm7.1"
    assert not found["available"]
    assert "torch 2.13.0+rocm7.1 is built for ROCm 7.1, not for CUDA; install torch from the wheel" in found["reason"]
