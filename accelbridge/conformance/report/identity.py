"""Which suite, and on what machine: so that a modified suite or a helpful environment shows."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from base64 import urlsafe_b64encode
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import accelbridge
from accelbridge.conformance.registry import LEVELS

HOME = Path(accelbridge.__file__).parent
SUITE = HOME / "conformance"
_PREFIXES = ("ACCELBRIDGE_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "OMP_", "MKL_", "GLOO_")
_NAMES = ("PYTHONHASHSEED", "PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH")


def suite_files() -> list[Path]:
    """Everything that decides what a test says, in a fixed order."""
    return sorted(
        p for p in SUITE.rglob("*") if p.is_file() and p.suffix in (".py", ".txt", ".toml", ".json", ".html", ".svg")
    )


def suite_identity() -> dict[str, Any]:
    """Version and digest of the suite, and whether its files are as they were installed."""
    digest = hashlib.sha256()
    for path in suite_files():
        digest.update(f"{path.relative_to(SUITE).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return {
        "version": accelbridge.__version__,
        "sha256": digest.hexdigest(),
        "unmodified": _as_installed(),
        "must_pass": {level: must_pass_sha(level) for level in LEVELS},
    }


def must_pass_sha(level: str) -> str:
    """Digest of a level's list of mandatory ids."""
    return hashlib.sha256((SUITE / "spec" / f"must_pass_{level}.txt").read_bytes()).hexdigest()


def _as_installed() -> bool | None:
    """Compare the whole package with the RECORD of its installation; None for a source checkout, which has none."""
    try:
        files = distribution(accelbridge.__name__).files or []
    except PackageNotFoundError:
        return None
    recorded = {Path(str(file.locate())): file.hash for file in files if file.hash is not None}
    there = sorted({*HOME.rglob("*.py"), *suite_files()})
    if not any(path in recorded for path in there):
        return None
    return all(path in recorded and _same(path, recorded[path]) for path in there)


def _same(path: Path, recorded: Any) -> bool:
    found = hashlib.new(recorded.mode, path.read_bytes()).digest()
    return urlsafe_b64encode(found).rstrip(b"=").decode() == recorded.value


def environment(introduction: dict[str, Any]) -> dict[str, Any]:
    """The machine as the report shows it. Of the environment only variables that bear on results."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES) or name in _NAMES}
    return {
        "chip": introduction["chip"],
        "devices": introduction["devices"],
        "torch": introduction["torch"],
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "software": introduction["software"],
        "facts": {name: value for name, value in introduction["facts"].items() if name != "host"},
        "variables": dict(sorted(variables.items())),
        "patched": introduction["patched"],
    }
