"""``.metadata``, torch's index of a checkpoint, read as data.

It is a pickle, which may say anything. Here it goes through an unpickler that knows only the classes torch writes
there, as subclasses of its own, so that no instruction reaches a class of the process; then everything that is used of
it is checked against the manifest and built anew.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from accelbridge.checkpoint.manifest import METADATA, Manifest
from accelbridge.errors import CheckpointError

_OWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}
"""Classes that get a subclass per load."""

_AS_THEY_ARE = {
    "torch.distributed.checkpoint.metadata": {"_MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}

_MOST_BYTES = 2**32


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._own: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in _OWN.get(module, ()):
            if name not in self._own:
                self._own[name] = type(name, (super().find_class(module, name),), {})
            return self._own[name]
        if name in _AS_THEY_ARE.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{METADATA} refers to {module}.{name}, which no checkpoint needs; it may be hostile and was not loaded"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise CheckpointError(f"{METADATA} refers to something outside of it; it may be hostile and was not loaded")


def read_metadata(path: Path, manifest: Manifest) -> Metadata:
    """The metadata of the checkpoint at ``path``, with tensors only. Raises CheckpointError that says what is wrong."""
    file = path / METADATA
    if METADATA not in manifest.files:
        raise CheckpointError(f"{path}/manifest.json is damaged: it lists no {METADATA}; choose another checkpoint")
    try:
        if file.is_symlink() or file.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{file} is a link, or far too large; it may be hostile and was not loaded")
        with open(file, "rb") as stream:
            loaded = _MetadataUnpickler(stream).load()
        if not isinstance(loaded, Metadata):
            raise CheckpointError(f"{file} holds a {type(loaded).__name__}, not metadata")
        return _rebuilt(loaded, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # a pickle of known classes can still ask for anything that they refuse
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}; it is damaged") from error


def _rebuilt(loaded: Metadata, manifest: Manifest) -> Metadata:
    entries: dict[str, Any] = {}
    for name, entry in _dict(loaded.state_dict_metadata).items():
        if isinstance(entry, TensorStorageMetadata):
            entries[_text(name)] = _tensor(name, entry)
        elif isinstance(entry, BytesStorageMetadata):
            entries[_text(name)] = BytesStorageMetadata()
        else:
            _refuse(f"entry {name!r} is a {type(entry).__name__}")
    storage = {_index(index): _place(place, manifest) for index, place in _dict(loaded.storage_data).items()}
    return Metadata(entries, planner_data=None, storage_data=storage, storage_meta=StorageMeta())


def _tensor(name: str, entry: TensorStorageMetadata) -> TensorStorageMetadata:
    dtype = entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        _refuse(f"the dtype of {name!r} is a {type(dtype).__name__}")
    size = _sizes(entry.size)
    chunks = [ChunkStorageMetadata(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks]
    for chunk in chunks:
        if len(chunk.sizes) != len(size) or len(chunk.offsets) != len(size):
            _refuse(f"a part of {name!r} has other dimensions")
        if any(o + s > whole for o, s, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            _refuse(f"a part of {name!r} lies outside of it")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(index: Any) -> MetadataIndex:
    if not isinstance(index, MetadataIndex):
        _refuse(f"a place belongs to a {type(index).__name__}")
    offset = getattr(index, "offset", None)
    hint = getattr(index, "index", None)
    return MetadataIndex(_text(index.fqn), None if offset is None else _sizes(offset), hint if _whole(hint) else None)


def _place(place: Any, manifest: Manifest) -> _StorageInfo:
    if not isinstance(place, _StorageInfo) or not (_whole(place.offset) and _whole(place.length)):
        _refuse("a place in a file is none")
    entry = manifest.files.get(place.relative_path) if isinstance(place.relative_path, str) else None
    if entry is None or place.relative_path == METADATA:
        _refuse(f"it refers to the file {str(place.relative_path)[:80]!r}, which the manifest does not list")
    if place.offset + place.length > entry["bytes"]:
        _refuse(f"it refers to bytes beyond the end of {place.relative_path}")
    if getattr(place, "transform_descriptors", None):
        _refuse("it asks for a transformation of the bytes")
    return _StorageInfo(place.relative_path, place.offset, place.length)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _sizes(value: Any) -> torch.Size:
    if not isinstance(value, tuple) or not all(map(_whole, value)):
        _refuse("a shape is none")
    return torch.Size(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        _refuse(f"a name is a {type(value).__name__}")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        _refuse(f"it has a {type(value).__name__} where a dict belongs")
    return value


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(f"{METADATA} is damaged or hostile and was not used: {what}")
