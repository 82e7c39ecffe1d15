"""Questions that only a new process can answer: what discovery loads, and what it says where no device is visible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_DISCOVER = """
import json, sys
from dataclasses import asdict
from importlib.metadata import version
from accelbridge.plugins import choose
found = choose(sys.argv[1])
row, backend = found.candidate, found.backend
chips = [device.chip for device in found.probe.devices]
table = backend.capabilities(chips[0] if chips else "unknown", found.probe.software).table
print(json.dumps({
    "name": row.name, "class_name": backend.name, "distribution": row.distribution, "version": row.version,
    "metadata_version": version(row.distribution), "api_version": row.api_version,
    "class_api_version": ".".join(map(str, backend.api_version)), "available": row.available, "cells": len(table),
    "torch": "torch" in sys.modules,
}))
"""
_CHOOSE = """
import json, sys
from accelbridge import plugins
if sys.argv[2]:
    real = plugins._examine
    plugins._examine = lambda *args: real(*args).unusable(sys.argv[2])
try:
    found = {"chosen": plugins.choose(sys.argv[1]).backend.name, "error": "", "text": ""}
except Exception as error:
    found = {"chosen": "", "error": type(error).__name__, "text": str(error)}
print(json.dumps(found))
"""


class ChildFailed(Exception):
    """The new process ended with an error."""


def discover(name: str) -> dict[str, Any]:
    """Discover, probe and describe the backend ``name`` in a new process; says whether torch was loaded for it."""
    return _ask(_DISCOVER, [name])


def choose(name: str, environment: Mapping[str, str], unusable: str = "") -> dict[str, Any]:
    """What choosing ``name`` comes to under ``environment``; ``unusable``: as if its probe said that."""
    return _ask(_CHOOSE, [name, unusable], environment)


def _ask(program: str, arguments: list[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    # -P: what lies in the working directory is not what is installed.
    command = [sys.executable, "-P", "-c", program, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, timeout=100, check=False
    )
    if done.returncode:
        raise ChildFailed((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])
