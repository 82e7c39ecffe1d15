"""Probing: what sysfs may show, and what it means. Trees are data files; see tests/data/probes/README.md."""

from __future__ import annotations

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
from accelbridge.portable.torch_build import TorchBuild
from accelbridge_rocm import host, kfd
from accelbridge_rocm.kfd import Reading

DATA = Path(__file__).parents[3] / "tests" / "data" / "probes" / "rocm"
ROCM = TorchBuild("2.13.0+rocm7.1", {"cuda": None, "hip": "7.1.25424-4179531dcd", "rocm": "7.1.0"})
CUDA = TorchBuild("2.10.0+cu128", {"cuda": "12.8", "hip": None})
CPU = TorchBuild("2.13.0+cpu", {"cuda": None, "hip": None})
MI210, MI300X = "AMD Instinct MI210 (gfx90a)", "AMD Instinct MI300X (gfx942)"


def lay_out(name: str, root: Path) -> Path:
    """The tree of one machine, under ``root``."""
    for path, text in json.loads((DATA / f"{name}.json").read_text())["files"].items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture
def reading(tmp_path: Path):
    return lambda name: kfd.read(lay_out(name, tmp_path))


def judge(found: Reading, environment: Mapping[str, str] | None = None, build: TorchBuild | None = ROCM) -> Probe:
    return host.judge(found, environment or {}, build)


# ------------------------------------------------------------------------------------------------- what is there


@pytest.mark.parametrize(
    ("name", "chip", "kib"),
    [
        ("mi250x", "AMD Instinct MI250X (gfx90a)", 67092480),
        ("mi300x", MI300X, 201310208),
        ("mi325x", "AMD Instinct MI325X (gfx942)", 268419072),
        ("mi355x", "AMD Instinct MI355X (gfx950)", 301973504),
    ],
)
def test_a_machine_is_listed(reading: Any, name: str, chip: str, kib: int) -> None:
    found = judge(reading(name))
    assert found.available, found.reason
    paths = [f"/dev/dri/renderD{128 + i}" for i in range(8)]
    assert [(d.index, d.chip, d.path) for d in found.devices] == [(i, chip, path) for i, path in enumerate(paths)]
    assert {device.memory_bytes for device in found.devices} == {kib * 1024}
    assert found.reason == f"8 x {chip}, amdgpu 6.12.12"
    assert found.software == {"torch": "2.13.0+rocm7.1", "rocm": "7.1.0"}


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_every_file_is_whole_and_names_its_sources(path: Path, reading: Any) -> None:
    data = json.loads(path.read_text())
    assert set(data) == {"what", "sources", "files"}
    assert data["sources"]
    found = reading(path.stem)
    assert Reading.from_dict(json.loads(json.dumps(found.as_dict()))) == found


@pytest.mark.parametrize(
    ("name", "build", "reason"),
    [
        ("no-driver", ROCM, "no AMD GPU driver: /dev/kfd is not there"),
        ("no-gpu", ROCM, "/dev/kfd is there, but it shows no GPU of AMD"),
        ("mi300x", None, "torch is not installed; install torch from a wheel index named rocm"),
        ("mi300x", CPU, "torch 2.13.0+cpu is built for CPUs only; install"),
        ("mi300x", CUDA, "torch 2.10.0+cu128 is built for CUDA 12.8, not for ROCm; install torch from a wheel index "
         "named rocm and a version, such as rocm7.1 (pytorch.org/get-started/locally)"),
    ],
)  # fmt: skip
def test_what_cannot_run_says_why(reading: Any, name: str, build: TorchBuild | None, reason: str) -> None:
    found = judge(reading(name), build=build)
    assert not found.available
    assert reason in found.reason
    assert found.devices == ()


def test_who_may_not_open_the_driver_is_told_the_group(tmp_path: Path) -> None:
    root = lay_out("mi300x", tmp_path)
    denied = judge(kfd.read(root, lambda path: path.name != "kfd"))
    assert "/dev/kfd is there, and this user may not open it" in denied.reason
    assert "usermod -aG render USER" in denied.reason
    closed = judge(kfd.read(root, lambda path: path.name == "kfd"))
    assert "this user may open none of /dev/dri/renderD128, " in closed.reason
    some = judge(kfd.read(root, lambda path: path.name in ("kfd", "renderD130")))
    assert [device.path for device in some.devices] == ["/dev/dri/renderD130"]
    assert "7 left out, whose render node this user may not open" in some.reason


def test_a_container_without_the_device_is_told_how(tmp_path: Path) -> None:
    root = lay_out("mi300x", tmp_path)
    (root / "dev/kfd").unlink()
    assert "pass it in (docker run --device=/dev/kfd)" in judge(kfd.read(root)).reason


def test_nodes_that_may_not_be_read_are_none_of_ours(tmp_path: Path) -> None:
    root = lay_out("mi300x", tmp_path)
    file = root / kfd.NODES / "2" / "properties"
    file.unlink()
    file.mkdir()  # reading it fails, for every user
    found = kfd.read(root)
    assert (len(found.nodes), found.hidden) == (7, 1)
    empty = judge(replace(found, nodes=()))
    assert "1 of its nodes may not be read here" in empty.reason


# -------------------------------------------------------------------------------------------------- visibility


@pytest.mark.parametrize(
    ("environment", "minors", "part"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0], ""),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [3], ""),
        ({"ROCR_VISIBLE_DEVICES": "4,5"}, [4, 5], ""),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000006"}, [5], ""),
        ({"ROCR_VISIBLE_DEVICES": "0,GPU-0000000000000006"}, [0, 5], ""),
        ({"ROCR_VISIBLE_DEVICES": "gpu-0000000000000006, 0"}, [5, 0], ""),
        ({"ROCR_VISIBLE_DEVICES": "2,2,3"}, [2], '"2" is named twice; from there on nothing is read'),
        ({"ROCR_VISIBLE_DEVICES": "0,1gpu"}, [0], '"1gpu" is no device here'),
        ({"HIP_VISIBLE_DEVICES": "0,0"}, [], '"0" is named twice, which leaves none'),
        ({"ROCR_VISIBLE_DEVICES": "4", "HIP_VISIBLE_DEVICES": "0,1"}, [], "which torch refuses"),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}, [5], ""),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "1,2"}, [5], "of the 2 that ROCR_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, [1], ""),
        ({"ROCR_VISIBLE_DEVICES": "4", "HIP_VISIBLE_DEVICES": "4"}, [], "that ROCR_VISIBLE_DEVICES leaves, numbered"),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, [], "disagree: HIP reads the first"),
        ({"HIP_VISIBLE_DEVICES": ""}, [], "it is empty"),
        ({"HIP_VISIBLE_DEVICES": "-1"}, [], '"-1" is no device here'),
        ({"HIP_VISIBLE_DEVICES": "0,9"}, [0], '"9" is no device here; what follows it is not read'),
    ],
)  # fmt: skip
def test_lists_of_visible_devices(reading: Any, environment: dict[str, str], minors: list[int], part: str) -> None:
    found = judge(reading("mi300x"), environment)
    assert found.available == bool(minors)
    want = [(i, f"/dev/dri/renderD{128 + minor}") for i, minor in enumerate(minors)]
    assert [(d.index, d.path) for d in found.devices] == want
    assert part in found.reason


# ------------------------------------------------------------------------------------------- models, partitions


def test_partitions_are_devices_of_an_unknown_product(reading: Any) -> None:
    found = judge(reading("mi300x-cpx"))
    assert found.reason.startswith("8 x AMD Instinct MI300X CPX/NPS4 (gfx942)")
    assert {device.memory_bytes for device in found.devices} == {25163776 * 1024}
    assert len({device.path for device in found.devices}) == 8


def test_two_dies_are_no_partitions(reading: Any) -> None:
    assert "CPX" not in judge(reading("mi250x")).reason
    assert "partition" not in judge(reading("mi250x")).reason


def test_a_product_that_no_source_names_stays_unknown(reading: Any) -> None:
    chips = [device.chip for device in judge(reading("unlisted")).devices]
    assert chips == ["AMD Instinct MI250 (gfx90a)", "AMD device 74ff (gfx942)"]


def test_mixed_models_are_refused_or_planned_for_as_the_lowest(reading: Any) -> None:
    found = judge(reading("mixed"))
    with pytest.raises(BackendError) as refused:
        host.chip(found, "refuse")
    for part in (MI210, MI300X, "ROCR_VISIBLE_DEVICES", "backend.options.mixed: lowest"):
        assert part in str(refused.value)
    chip, note = host.chip(found, "lowest")
    assert chip == MI210
    assert f"planned for {MI210}, the lowest" in note


@pytest.mark.parametrize(
    ("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (120001, "gfx1201")]
)
def test_architectures_are_named(version: int, name: str) -> None:
    assert host.gfx(version) == name


def test_an_override_is_reported(reading: Any) -> None:
    found = judge(reading("mi300x"), {"HSA_OVERRIDE_GFX_VERSION": "9.4.0"})
    assert found.facts["override"] == "HSA_OVERRIDE_GFX_VERSION=9.4.0"


# ------------------------------------------------------------------------------------------------------ process

PROBE = """
import json, os, sys, threading
before = dict(os.environ), len(os.listdir("/proc/self/fd"))
from accelbridge_rocm.host import probe
found = probe()
after = dict(os.environ), len(os.listdir("/proc/self/fd"))
print(json.dumps({"reason": found.reason, "available": found.available, "software": dict(found.software),
    "same": before == after, "threads": threading.active_count(),
    "heavy": sorted({n.partition(".")[0] for n in sys.modules} & {"torch", "numpy", "amdsmi", "pydantic"})}))
"""


def test_a_probe_loads_no_torch_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.10.0+cu128'\ncuda = '12.8'\nhip = None\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["heavy"], found["same"], found["threads"]) == ([], True, 1)
    found["software"].pop("triton", None)  # of this environment
    assert found["software"] == {"torch": "2.10.0+cu128"}
    assert not found["available"]
    assert "torch 2.10.0+cu128 is built for CUDA 12.8, not for ROCm; install torch" in found["reason"]
