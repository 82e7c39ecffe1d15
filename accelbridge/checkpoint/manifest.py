"""What makes a folder a checkpoint: its manifest, written last, with the size and SHA-256 of every file.

OUTPUT/checkpoints/step_20/          published by one rename, so it is whole or it isn't there
    manifest.json                    what the checkpoint is, and the checksum of each file below
    .metadata, __0_0.distcp, ...     torch's distributed checkpoint
OUTPUT/checkpoints/.step_30.partial  being written, or left by a process that was killed
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelbridge.errors import CheckpointError

FORMAT = "accelbridge-checkpoint"
VERSION = 1
NAME = "manifest.json"
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Manifest:
    """Contents of ``manifest.json``."""

    step: int
    """Optimizer updates done."""
    world_size: int
    model: dict[str, Any] | None = None
    """The recipe's model section; None for a module of the user's own."""
    layout: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    """The contract of the execution plan that was in force."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File name -> {"bytes", "sha256"}."""
    data_position: int | None = None
    """Global batches taken or skipped; None: as many as ``step``, as in every run that never skipped data."""
    format: str = FORMAT
    version: int = VERSION


def skipped_data(manifest: Manifest) -> int:
    """Global batches that were skipped before ``manifest`` was written."""
    return 0 if manifest.data_position is None else manifest.data_position - manifest.step


def folder(root: Path, step: int) -> Path:
    """Where the complete checkpoint of ``step`` lies."""
    return root / f"step_{step}"


def partial(root: Path, step: int) -> Path:
    """Where it is written before it is complete."""
    return root / f".step_{step}.partial"


def complete(root: Path) -> list[Path]:
    """Published checkpoints in ``root``, oldest first. (A folder without a manifest is not one.)"""
    if not root.is_dir():
        return []
    found = [(int(match[1]), p) for p in root.iterdir() if (match := _STEP.fullmatch(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found) if (path / NAME).is_file()]


def read(path: Path) -> Manifest:
    """The manifest of the checkpoint at ``path``. Raises CheckpointError that names the file and the fault."""
    file = path / NAME
    if not path.is_dir():
        raise CheckpointError(f'checkpoint "{path}" asked; there is no such folder; see its parent for step_N')
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f'checkpoint "{path}" asked; it has no {NAME}, so it is not a complete checkpoint; choose another'
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; choose another checkpoint") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f'{file} is no {FORMAT} manifest; give a folder that "accelbridge train" wrote')
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has format version {data.get('version')}; this accelbridge reads version {VERSION}; "
            "use the release that wrote it"
        )
    return _checked(file, data)


def _checked(file: Path, data: dict[str, Any]) -> Manifest:
    """The manifest in ``data``; CheckpointError unless it has the known entries, each of its own kind."""
    from pydantic import TypeAdapter, ValidationError

    if unknown := sorted(data.keys() - Manifest.__dataclass_fields__.keys()):
        raise CheckpointError(f"{file} is damaged: it has an unknown entry {unknown[0]!r}; choose another checkpoint")
    try:
        return TypeAdapter(Manifest).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{file} is damaged: {where}: {first['msg']}; choose another checkpoint") from error


def write(path: Path, manifest: Manifest) -> None:
    """Write the manifest into ``path`` and make it durable."""
    with open(path / NAME, "w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def fingerprint(file: Path) -> dict[str, Any]:
    """{"bytes", "sha256"} of one file."""
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def faults(path: Path, manifest: Manifest, names: list[str] | None = None) -> list[str]:
    """Damage to ``names`` (default: every file), one line each, naming the file."""
    found = []
    for name in names if names is not None else sorted(manifest.files):
        file, wanted = path / name, manifest.files[name]
        if not file.is_file():
            found.append(f"{file} is missing")
        elif file.stat().st_size != wanted["bytes"]:
            found.append(f"{file} has {file.stat().st_size} bytes; the manifest says {wanted['bytes']}")
        elif fingerprint(file) != wanted:
            found.append(f"{file} does not match its checksum: its bytes have changed")
    return found


def sync_folder(path: Path) -> None:
    """Make the names in ``path`` durable (fsync of a directory, as POSIX asks after a rename)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
