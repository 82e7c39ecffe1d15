"""What makes a folder a checkpoint: its manifest, written last, with the size and SHA-256 of every file.

OUTPUT/checkpoints/step_20/          published by one rename, so it is whole or it isn't there
    manifest.json                    what the checkpoint is, and the checksum of each file below
    .metadata, __0_0.distcp, ...     torch's distributed checkpoint
OUTPUT/checkpoints/.step_30.partial  being written, or left by a process that was killed
OUTPUT/checkpoints/step_40.damaged   set aside by a run that went on from an older one

A folder may come from anywhere: nothing that a manifest says is used before it has been checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from accelbridge import __version__
from accelbridge.errors import CheckpointError

FORMAT = "accelbridge-checkpoint"
VERSION = 1
NAME = "manifest.json"
METADATA = ".metadata"
_STEP = re.compile(r"step_(\d{1,18})")
_FILE = re.compile(r"[A-Za-z0-9_.]{1,200}")
"""Names of files that a checkpoint may have: no separators, so no way out of its folder."""
_MOST_BYTES = 2**26
"""A manifest has some hundred bytes per file; what is far greater is none."""

Count = Annotated[int, Field(ge=0, lt=2**63)]


class ForeignFormat(CheckpointError):
    """A checkpoint of another release's format, or none of ours at all; it may be in perfect order."""


@dataclass(frozen=True)
class Manifest:
    """Contents of ``manifest.json``."""

    step: Count
    """Optimizer updates done."""
    world_size: Annotated[int, Field(ge=1, lt=2**31)]
    model: dict[str, Any] | None = None
    """The recipe's model section; None for a module of the user's own."""
    layout: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    """The contract of the execution plan that was in force."""
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = field(default_factory=dict)
    """Of this step, those that are known and finite: ``loss``, ``validation_loss``."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File name -> {"bytes", "sha256"}."""
    data_position: Count | None = None
    """Global batches taken or skipped; None: as many as ``step``, as in every run that never skipped data."""
    release: str = __version__
    """The accelbridge that wrote it."""
    format: str = FORMAT
    version: int = VERSION

    def setting(self, section: str, name: str) -> Any:
        """What the plan has under ``section`` and ``name``; None without it. The plan may be anybody's."""
        found = self.plan.get(section)
        return found.get(name) if isinstance(found, dict) else None

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(entry["bytes"] for entry in self.files.values())


def skipped_data(manifest: Manifest) -> int:
    """Global batches that were skipped before ``manifest`` was written."""
    return 0 if manifest.data_position is None else manifest.data_position - manifest.step


def folder(root: Path, step: int) -> Path:
    """Where the complete checkpoint of ``step`` lies."""
    return root / f"step_{step}"


def partial(root: Path, step: int) -> Path:
    """Where it is written before it is complete."""
    return root / f".step_{step}.partial"


def step_of(path: Path) -> int | None:
    """The step that the name of a folder states; None where it is not named as a published checkpoint."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def published(root: Path) -> list[Path]:
    """Folders in ``root`` that are named as published checkpoints, oldest first, whatever is in them."""
    if not root.is_dir():
        return []
    found = [(step, path) for path in root.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def complete(root: Path) -> list[Path]:
    """Published checkpoints in ``root``, oldest first. (A folder without a manifest is not one.)"""
    return [path for path in published(root) if (path / NAME).is_file()]


def read(path: Path) -> Manifest:
    """The manifest of the checkpoint at ``path``. Raises CheckpointError that names the file and the fault."""
    file = path / NAME
    if not path.is_dir():
        raise CheckpointError(f'checkpoint "{path}" asked; there is no such folder; see its parent for step_N')
    try:
        data = json.loads(_bounded(file))
    except FileNotFoundError:
        raise CheckpointError(
            f'checkpoint "{path}" asked; it has no {NAME}, so it is not a complete checkpoint; choose another'
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; choose another checkpoint") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ForeignFormat(f'{file} is no {FORMAT} manifest; give a folder that "accelbridge train" wrote')
    if data.get("version") != VERSION:
        raise ForeignFormat(_other_version(file, data))
    return _checked(file, data)


def _bounded(file: Path) -> str:
    if file.is_symlink():
        raise ValueError("it is a symbolic link; a checkpoint is plain files")
    if (size := file.stat().st_size) > _MOST_BYTES:
        raise ValueError(f"it has {size} bytes; a manifest has at most {_MOST_BYTES}")
    return file.read_text(encoding="utf-8")


def _other_version(file: Path, data: dict[str, Any]) -> str:
    version, release = data.get("version"), data.get("release")
    newer = isinstance(version, int) and version > VERSION
    writer = f"accelbridge {release}" if isinstance(release, str) and len(release) < 40 else "the release that wrote it"
    way_out = f"use {writer}" + (" or a later one" if newer else ", or an earlier checkpoint of this one")
    return (
        f"{file} has format version {version}, which is {'newer' if newer else 'older'}; this accelbridge "
        f"{__version__} reads version {VERSION}; {way_out}"
    )


def _checked(file: Path, data: dict[str, Any]) -> Manifest:
    """The manifest in ``data``; CheckpointError unless it has the known entries, each of its own kind."""
    from pydantic import TypeAdapter, ValidationError

    if unknown := sorted(data.keys() - Manifest.__dataclass_fields__.keys()):
        raise CheckpointError(f"{file} is damaged: it has an unknown entry {unknown[0]!r}; choose another checkpoint")
    try:
        manifest = TypeAdapter(Manifest).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{file} is damaged: {where}: {first['msg']}; choose another checkpoint") from error
    for name, entry in manifest.files.items():
        if fault := _entry_fault(name, entry):
            raise CheckpointError(f"{file} is damaged: files.{name!r}: {fault}; choose another checkpoint")
    return manifest


def _entry_fault(name: str, entry: dict[str, Any]) -> str | None:
    if not _FILE.fullmatch(name) or name in (".", "..", NAME):
        return "no file of a checkpoint has such a name"
    size, digest = entry.get("bytes"), entry.get("sha256")
    if entry.keys() != {"bytes", "sha256"} or type(size) is not int or not 0 <= size < 2**63:
        return "it should have bytes and sha256"
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        return "sha256 should be 64 hexadecimal digits"
    return None


def write(path: Path, manifest: Manifest) -> None:
    """Write the manifest into ``path`` and make it durable."""
    with open(path / NAME, "w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1, sort_keys=True, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def fingerprint(file: Path) -> dict[str, Any]:
    """{"bytes", "sha256"} of one file."""
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def quick_faults(path: Path, manifest: Manifest) -> list[str]:
    """Damage that shows without reading the files: one that is missing, is no plain file or has another size."""
    return [fault for name in sorted(manifest.files) if (fault := _size_fault(path / name, manifest.files[name]))]


def faults(path: Path, manifest: Manifest, names: list[str] | None = None) -> list[str]:
    """Damage to ``names`` (default: every file), one line each, naming the file. Reads every byte of them."""
    found = []
    for name in names if names is not None else sorted(manifest.files):
        file, wanted = path / name, manifest.files[name]
        try:
            fault = _size_fault(file, wanted)
            if fault is None and fingerprint(file) != wanted:
                fault = f"{file} does not match its checksum: its bytes have changed"
        except OSError as error:
            fault = f"{file} cannot be read: {error.strerror}"
        if fault is not None:
            found.append(fault)
    return found


def _size_fault(file: Path, wanted: dict[str, Any]) -> str | None:
    if file.is_symlink():
        return f"{file} is a symbolic link; a checkpoint is plain files"
    if not file.is_file():
        return f"{file} is missing"
    if (size := file.stat().st_size) != wanted["bytes"]:
        return f"{file} has {size} bytes; the manifest says {wanted['bytes']}"
    return None


def sync_folder(path: Path) -> None:
    """Make the names in ``path`` durable (fsync of a directory, as POSIX asks after a rename)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
