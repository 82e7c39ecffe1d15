"""Can this backend run here? The judgement on what :mod:`.kfd` read: pure, and each outcome says its reason.

Neither torch nor a library of ROCm is loaded for it, and no device is opened.
"""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from accelbridge.backend import DeviceInfo, Probe
from accelbridge.kernels.installed import triton_software
from accelbridge.portable.torch_build import TorchBuild, read_torch_build
from accelbridge.portable.visible import one_chip, select, summary
from accelbridge_rocm import kfd
from accelbridge_rocm.kfd import Node, Reading

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
"""The runtime below HIP hides devices by the first and numbers the rest anew; HIP hides more of those by the second, or
by the third where the second is not set (ROCm documentation, GPU isolation techniques, 7.14). In the first, numbers
and UUIDs may be mixed, UUIDs may be cut short, and a device named twice ends the list (ROCR-Runtime,
core/runtime/amd_filter_device.cpp); torch refuses a second list that is longer than the first (torch/cuda/__init__.py,
_parse_visible_devices)."""
INSTALL = "pytorch.org/get-started/locally"
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
PRODUCTS = {
    0x7408: "AMD Instinct MI250X",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x74A5: "AMD Instinct MI325X",
    0x74A8: "AMD Instinct MI308X HF",
    0x74A9: "AMD Instinct MI300X HF",
    0x74B5: "AMD Instinct MI300X VF",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
    0x75B0: "AMD Instinct MI350X VF",
    0x75B3: "AMD Instinct MI355X VF",
}
"""PCI device id -> product, of libdrm's ``data/amdgpu.ids``. 0x740c is left out, which is "MI250X / MI250" there."""


def probe() -> Probe:
    """The answer for this host and environment. Never raises, opens no device."""
    found = judge(kfd.read(), os.environ, read_torch_build())
    facts = {"host": platform.node(), "python": platform.python_version(), **found.facts}
    return replace(found, software={**found.software, **triton_software()}, facts=facts)


def judge(reading: Reading, environment: Mapping[str, str], build: TorchBuild | None) -> Probe:
    """What ``reading`` means to the installed torch under ``environment``."""
    software = _software(build)
    facts = {"driver": f"amdgpu {reading.driver}"} if reading.driver else {}
    if override := environment.get(OVERRIDE):
        facts["override"] = f"{OVERRIDE}={override}"
    problem = _no_driver(reading)
    if problem and build is not None and build.kinds and not build.built_for.get("hip"):
        problem = f"{problem}; besides, {_wrong_torch(build)}"  # who chose this backend here needs both
    problem = problem or _wrong_torch(build)
    nodes = [node for node in reading.nodes if node.openable]
    if not problem and not nodes:
        problem = _closed(reading)
    if problem:
        return Probe(False, problem, software=software, facts=facts)
    chosen, remarks, problem = _visible(nodes, environment)
    if problem:
        return Probe(False, problem, software=software, facts=facts)
    partitioned = _partitioned(reading.nodes)
    devices = tuple(_info(index, node, partitioned) for index, node in enumerate(chosen))
    if left := len(reading.nodes) - len(nodes):
        remarks.append(f"{left} left out, whose render node this user may not open")
    driver = [f"amdgpu {reading.driver}"] if reading.driver else []
    return Probe(True, "; ".join([", ".join([summary(devices), *driver]), *remarks]), devices, software, facts)


def chip(probe: Probe, mixed: str) -> tuple[str, str]:
    """The chip that a plan is made for (:meth:`accelbridge.backend.Backend.chip`). Raises BackendError."""
    return one_chip(probe, mixed, arch_number, ROCR)


def arch_number(chip: str) -> int:
    """``"AMD Instinct MI300X (gfx942)"`` -> 0x942; one without an architecture comes last."""
    found = re.search(r"\(gfx([0-9a-f]+)\)$", chip)
    return int(found[1], 16) if found else 1 << 16


def gfx(version: int) -> str:
    """``90402`` -> "gfx942", ``90010`` -> "gfx90a": the step is one hex digit."""
    return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"


# -------------------------------------------------------------------------------------------- driver and torch


def _no_driver(reading: Reading) -> str:
    if reading.kfd == "absent":
        if reading.nodes:
            return "the driver shows GPUs, but /dev/kfd is not there; pass it in (docker run --device=/dev/kfd)"
        return "no AMD GPU driver: /dev/kfd is not there"
    if reading.kfd == "denied":
        return (
            "/dev/kfd is there, and this user may not open it; join the group that owns it (ls -l /dev/kfd; usually "
            "render: sudo usermod -aG render USER), in a container with --group-add"
        )
    if not reading.nodes:
        hidden = f"; {reading.hidden} of its nodes may not be read here" if reading.hidden else ""
        return f"/dev/kfd is there, but it shows no GPU of AMD{hidden}"
    return ""


def _closed(reading: Reading) -> str:
    minors = ", ".join(f"/dev/dri/renderD{node.render_minor}" for node in reading.nodes)
    return (
        f"this user may open none of {minors}; join the group that owns them (usually render), in a container with "
        "--device=/dev/dri and --group-add"
    )


def _wrong_torch(build: TorchBuild | None) -> str:
    install = f"install torch from a wheel index named rocm and a version, such as rocm7.1 ({INSTALL})"
    if build is None:
        return f"torch is not installed; {install}"
    if build.built_for.get("hip"):
        return ""
    if cuda := build.built_for.get("cuda"):
        return f"torch {build.version} is built for CUDA {cuda}, not for ROCm; {install}"
    return f"torch {build.version} is built for CPUs only; {install}"


def _software(build: TorchBuild | None) -> dict[str, str]:
    if build is None:
        return {}
    found = {"torch": build.version}
    # torch 2.13 states ROCm's version beside HIP's, which begins with the same two numbers.
    if stated := build.built_for.get("rocm") or build.built_for.get("hip"):
        found["rocm"] = stated.partition("-")[0]
    return found


# ------------------------------------------------------------------------------------------------- visibility


def _visible(nodes: Sequence[Node], environment: Mapping[str, str]) -> tuple[list[Node], list[str], str]:
    """The devices that a process gets, remarks, and the problem where there is none."""
    hip, cuda = environment.get(HIP), environment.get(CUDA)
    if hip is not None and cuda is not None and hip != cuda:
        problem = (
            f'{HIP}="{hip}" and {CUDA}="{cuda}" disagree: HIP reads the first, other tools the second; set one of '
            "them, or both to one value"
        )
        return [], [], problem
    rocr = environment.get(ROCR)
    if rocr is not None and hip is not None and hip.count(",") > rocr.count(","):
        problem = (
            f'{HIP}="{hip}" names more devices than {ROCR}="{rocr}" leaves, which torch refuses; name those that are '
            f"left, numbered from 0, or unset {HIP}"
        )
        return [], [], problem
    remarks: list[str] = []
    left = list(nodes)
    for names in ((ROCR,), (HIP, CUDA)):
        name = next((name for name in names if name in environment), None)
        if name is None:
            continue
        text = environment[name]
        below = name == ROCR
        shown = select(text, [_uuid(node) for node in left], "GPU-", abbreviated=below, free=below)
        left, before = [left[index] for index in shown.indices], len(left)
        again = f", of the {before} that {ROCR} leaves, numbered anew" if name != ROCR and ROCR in environment else ""
        if not left:
            why = f"{shown.remark}; name some of 0 to {before - 1}"
            return [], [], f'{name}="{text}" leaves no GPU visible{again}: {why}'
        if shown.remark:
            remarks.append(f'{name}="{text}"{again}: {shown.remark}')
    return left, remarks, ""


def _uuid(node: Node) -> str:
    """What rocminfo prints as the device's UUID."""
    return f"GPU-{node.unique_id:016x}" if node.unique_id else ""


# ------------------------------------------------------------------------------------------------------ names


def _board(node: Node) -> tuple[int, int]:
    """Where its board is: partitions of one differ in the function of their PCI address, or above it."""
    return node.domain, node.location_id >> 3 & 0x1FFF


def _partitioned(nodes: Sequence[Node]) -> Mapping[tuple[int, int], str]:
    """The boards that are split, and how: "CPX/NPS4"."""
    found: dict[tuple[int, int], str] = {}
    for board, count in Counter(map(_board, nodes)).items():
        mine = [node for node in nodes if _board(node) == board]
        # Only the first partition has the board's own files.
        mode = next((node.compute_partition for node in mine if node.compute_partition), "")
        memory = next((node.memory_partition for node in mine if node.memory_partition), "")
        if count > 1 or mode not in ("", "SPX"):
            found[board] = "/".join(filter(None, [mode, memory])) or "partition"
    return found


def _info(index: int, node: Node, partitioned: Mapping[tuple[int, int], str]) -> DeviceInfo:
    name = " ".join(filter(None, [_product(node), partitioned.get(_board(node), "")]))
    path = f"/dev/dri/renderD{node.render_minor}"
    return DeviceInfo(index, f"{name} ({gfx(node.gfx_target_version)})", node.memory_bytes, path)


def _product(node: Node) -> str:
    """The product by its PCI id, else as the board's ROM names it, else what is known: it stays unknown."""
    if node.device_id in PRODUCTS:
        return PRODUCTS[node.device_id]
    named = re.search(r"\bMI\d{3}\w*", node.product)
    return f"AMD Instinct {named[0]}" if named else f"AMD device {node.device_id:04x}"
