"""Which triton is installed, read without importing it."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path


def installed_triton() -> str | None:
    """Its version; None where there is none. By the package itself: vendors ship it in distributions of other names."""
    try:
        found = find_spec("triton")
    except ValueError:  # a module of that name without a spec
        return None
    if found is None or found.origin is None:
        return None
    try:
        stated = re.search(
            r"^__version__ = ['\"]([^'\"]+)", Path(found.origin).read_text(encoding="utf-8"), re.MULTILINE
        )
    except OSError:
        return None
    return stated[1] if stated else None


def triton_software() -> dict[str, str]:
    """Its version as ``Probe.software`` has it; nothing where there is none."""
    found = installed_triton()
    return {} if found is None else {"triton": found}


def interpreted() -> bool:
    """Whether this process interprets kernels on the host instead of compiling them, which triton decides when it is
    imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
