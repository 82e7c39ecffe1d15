"""What the kernel's driver (KFD, in amdgpu) shows of this host in sysfs, as plain data. Nothing is opened or loaded.

``/sys/class/kfd/kfd/topology/nodes/N/properties`` holds lines "name value"; ``mem_banks/M/properties`` below it the
memory, and ``/sys/class/drm/renderDR/device`` the board (Linux: drivers/gpu/drm/amd/amdkfd/kfd_topology.c and
amdgpu). Nothing is judged here: see :mod:`.host`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NODES = "sys/class/kfd/kfd/topology/nodes"
VENDOR = 4098
"""0x1002, AMD, in ``vendor_id``."""
_LOCAL = (1, 2)
"""``heap_type`` of a GPU's own memory, visible to the host or not (HSA_HEAPTYPE_FRAME_BUFFER_PUBLIC and _PRIVATE of
ROCm's hsakmttypes.h)."""
_READ = ("gfx_target_version", "vendor_id", "device_id", "simd_count", "location_id", "domain", "unique_id", "num_xcc")


@dataclass(frozen=True)
class Node:
    """One GPU node of the topology: a GPU, one die of two (MI250X), or a partition."""

    number: int
    gfx_target_version: int
    """Decimal 90402 is gfx942: major x 10000 + minor x 100 + step."""
    device_id: int
    """Of PCI."""
    simd_count: int = 0
    location_id: int = 0
    """PCI bus x 256 + device x 8 + function."""
    domain: int = 0
    unique_id: int = 0
    """ROCm calls the device ``GPU-`` and this in 16 hex digits; 0 where there is none."""
    num_xcc: int = 1
    """Compute dies."""
    render_minor: int | None = None
    """Of ``/dev/dri/renderDN``."""
    memory_bytes: int | None = None
    openable: bool = True
    """Whether this user may open its render node; ROCm leaves out a device of which it can't."""
    product: str = ""
    """What the board's own ROM says, as far as the driver shows it."""
    compute_partition: str = ""
    """"SPX", "CPX", ...; "" where the board has no partitions."""
    memory_partition: str = ""


@dataclass(frozen=True)
class Reading:
    """One look at a host."""

    kfd: str
    """/dev/kfd: "absent", "denied" to this user, or "ok"."""
    nodes: tuple[Node, ...] = ()
    hidden: int = 0
    """Nodes whose properties this user may not read, as in a container that has not all devices."""
    driver: str = ""
    """Version of amdgpu where it is AMD's own package; the one of Linux has none."""

    def as_dict(self) -> dict[str, Any]:
        """JSON data; :meth:`from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reading:
        """A reading from JSON data. Raises TypeError for an unknown key."""
        return cls(**{**data, "nodes": tuple(Node(**node) for node in data.get("nodes", ()))})


Access = Callable[[Path], bool]


def _may_open(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def read(root: Path = Path("/"), may_open: Access = _may_open) -> Reading:
    """Look at this host. Raises nothing for what a host may lack; ``root`` and ``may_open`` are for tests."""
    device = root / "dev/kfd"
    kfd = "absent" if not device.exists() else "ok" if may_open(device) else "denied"
    nodes: list[Node] = []
    hidden = 0
    for folder in _numbered(root / NODES):
        try:
            properties = _properties(folder / "properties")
        except OSError:  # EPERM: the device is not for this container
            hidden += 1
            continue
        if _is_gpu(properties):
            nodes.append(_node(root, folder, properties, may_open))
    return Reading(kfd, tuple(nodes), hidden, _text(root / "sys/module/amdgpu/version"))


def _numbered(folder: Path) -> list[Path]:
    """Subfolders that are called by a number, in its order."""
    try:
        found = [path for path in folder.iterdir() if path.name.isdecimal()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name))


def _properties(file: Path) -> dict[str, int]:
    """Lines "name value" whose value is a number. Raises OSError."""
    pairs = [line.split() for line in file.read_text().splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _is_gpu(properties: Mapping[str, int]) -> bool:
    ours = properties.get("vendor_id") == VENDOR
    return ours and properties.get("simd_count", 0) > 0 and properties.get("gfx_target_version", 0) > 0


def _node(root: Path, folder: Path, properties: Mapping[str, int], may_open: Access) -> Node:
    minor = properties.get("drm_render_minor", 0)
    board = root / f"sys/class/drm/renderD{minor}/device"
    known = {name: properties[name] for name in _READ if name in properties and name != "vendor_id"}
    return Node(
        number=int(folder.name),
        **{"device_id": 0, **known},
        render_minor=minor or None,
        memory_bytes=_memory(folder),
        openable=bool(minor) and may_open(root / f"dev/dri/renderD{minor}"),
        product=_text(board / "product_name"),
        compute_partition=_text(board / "current_compute_partition"),
        memory_partition=_text(board / "current_memory_partition"),
    )


def _memory(folder: Path) -> int | None:
    total = 0
    for bank in _numbered(folder / "mem_banks"):
        try:
            properties = _properties(bank / "properties")
        except OSError:
            continue
        if properties.get("heap_type") in _LOCAL:
            total += properties.get("size_in_bytes", 0)
    return total or None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
