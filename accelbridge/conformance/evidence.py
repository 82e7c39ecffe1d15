"""How strong the evidence of this process is, decided by what is there and not by what the backend says.

Strongest first: ``hardware``; ``vendor runtime`` (the vendor's code ran, without a chip); ``simulated``. (Code that was
accepted by a vendor's compiler for an absent chip is evidence of its own, not of a process like this one.)
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING

from accelbridge.backend import Backend, Probe

if TYPE_CHECKING:
    from types import ModuleType

STRENGTHS = ("simulated", "vendor runtime", "hardware")
"""From weak to strong."""


def weakest(strengths: list[str]) -> str:
    """The weakest of ``strengths``; "simulated" where there is none."""
    return min(strengths, key=STRENGTHS.index, default=STRENGTHS[0])


def strength(backend: Backend, probe: Probe) -> str:
    """Of what a process bound to ``backend`` shows.

    A backend of host processors runs on the host: hardware. Any other needs every one of its devices shown by the
    operating system, at the path that its probe gives. Without one it is the vendor's runtime, if the module behind
    its ``torch.device`` type comes from an installed distribution that is neither torch nor the plugin itself; all
    else is simulated. That module is ``torch.<type>``, or, for a type that torch names and gives no module, the loaded
    package ``torch_<type>``.
    """
    if backend.device_type == "cpu" and not backend.accelerator:
        return "hardware"
    places = {os.path.realpath(device.path) for device in probe.devices}
    if probe.devices and len(places) == len(probe.devices) and all(map(_shown, places)):
        return "hardware"
    import torch

    kind = backend.device_type
    module = getattr(torch, kind, None) or sys.modules.get(f"torch_{kind}")
    owner = _distribution(module) if module is not None else ""
    return "vendor runtime" if owner and owner not in ("torch", _distribution(type(backend))) else "simulated"


def _shown(path: str) -> bool:
    """Whether ``path``, links resolved, is a device: one under /sys/devices, where entries of a bus lead, or a
    character device under /dev that is neither memory nor a terminal (majors 1, 4 and 5 of Linux)."""
    found = Path(path)
    if path.startswith("/sys/devices/"):
        return found.is_dir()
    if not path.startswith("/dev/") or not found.is_char_device():
        return False
    return os.major(found.stat().st_rdev) not in (1, 4, 5)


@cache
def _owners() -> dict[str, list[str]]:
    return dict(packages_distributions())


def _distribution(thing: ModuleType | type) -> str:
    """The distribution that ``thing`` was installed with, or nothing."""
    name = getattr(thing, "__module__", None) or getattr(thing, "__name__", "")
    package = sys.modules.get(name)
    top = (package.__name__ if package is not None else name).split(".")[0]
    return next(iter(_owners().get(top, [])), "")
