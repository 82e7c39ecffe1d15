"""Loading: verify every byte, then read into the tensors of any layout. A checkpoint is data: none can run code.

torch's own reader unpickles ``.metadata`` and, for entries that are not tensors, the entry itself. Here the metadata is
read by :mod:`accelbridge.checkpoint.metadata`, and entries are tensors only, which torch reads with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.metadata import read_metadata
from accelbridge.checkpoint.together import gathered
from accelbridge.errors import CheckpointError

_OPTIONAL = ("rng.", "loss_scale.", "fp8.")
"""Entries that a run may leave unread: those of other ranks, or of a precision that it does not use."""


class _Reader(dcp.FileSystemReader):
    """Reads shards and metadata without running code from them."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self._manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path), self._manifest)
        assert metadata.storage_meta is not None, "it was built here"
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _TensorsOnly(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor; checkpoints hold tensors only")


def damage(path: Path, manifest: Manifest, group: dist.ProcessGroup | None) -> list[str]:
    """Faults of any file, one line each, the same on every rank; ranks share the reading. Nothing: it is intact."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    found = manifests.faults(path, manifest, sorted(manifest.files)[rank::size])
    if manifests.METADATA not in manifest.files and rank == 0:
        found.append(f"{path / manifests.NAME} lists no {manifests.METADATA}")
    return [line for part in gathered(group, found) for line in part]


def verify(path: Path, manifest: Manifest, group: dist.ProcessGroup | None) -> None:
    """Check every file against the manifest. Raises the same CheckpointError on every rank."""
    if found := damage(path, manifest, group):
        raise CheckpointError(
            "; ".join(found) + f"; the checkpoint {path.name} is damaged; resume with --resume auto, which goes on "
            "from the newest one that is intact"
        )


def load(path: Path, state: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of ``state`` in place, whatever layout wrote ``path``. Call :func:`verify` first.

    Raises CheckpointError where names, shapes or dtypes are those of another model: another dtype would be converted
    silently, and what does not fit would be lost.
    """
    manifest = manifests.read(path)
    _check_fits(path, state, read_metadata(path, manifest).state_dict_metadata)
    fill(path, state, group)


def fill(path: Path, state: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """:func:`load` without looking whether ``state`` is all that ``path`` holds. Raises CheckpointError."""
    reader = _Reader(path, manifests.read(path))
    try:
        dcp.load(state, storage_reader=reader, planner=_TensorsOnly(), process_group=group, no_dist=group is None)
    except (dcp.CheckpointException, pickle.UnpicklingError, EOFError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check_fits(path: Path, state: dict[str, Tensor], stored: dict[str, Any]) -> None:
    held = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    missing = [f"{name} is absent" for name in state if name not in held]
    extra = [f"{name} is not in the model" for name in held if name not in state and not name.startswith(_OPTIONAL)]
    both = [(name, held[name], state[name]) for name in state if name in held]
    shapes = [
        f"{name} is {tuple(entry.size)}, the model has {tuple(tensor.shape)}"
        for name, entry, tensor in both
        if tuple(entry.size) != tuple(tensor.shape)
    ]
    dtypes = [
        f"{name} is {_named(entry.properties.dtype)}, the model has {_named(tensor.dtype)}"
        for name, entry, tensor in both
        if entry.properties.dtype != tensor.dtype
    ]
    if found := [*missing, *extra, *shapes, *dtypes]:
        details = [*missing[:3], *extra[:3], *shapes[:3], *dtypes[:3]]
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {'; '.join(details)} ({len(found)} differences); "
            "resume with the recipe that wrote it"
        )


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
