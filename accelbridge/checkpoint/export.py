"""The weights of a checkpoint as safetensors, whole, for anything that reads them; no layout or process group needed.

OUT/config.json                          what they are: ours, not that of another library
OUT/model.safetensors                    or, above a size, model-00001-of-00003.safetensors ... and
OUT/model.safetensors.index.json         which tensor is in which file, as Hugging Face's ``save_pretrained`` has it
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from accelbridge import __version__
from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.load import fill, verify
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.metadata import read_metadata
from accelbridge.errors import CheckpointError, ConfigError

_PREFIX = "model."
SHARD_BYTES = 5 * 10**9
"""The size of a file above which a new one is begun, as in ``save_pretrained``; a greater tensor has its own."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    out: Path
    files: tuple[str, ...]
    tensors: int
    parameters: int
    bytes: int


def export(path: Path, out: Path, dtype: str | None = None, shard_bytes: int = SHARD_BYTES) -> Exported:
    """Write the model's weights in ``path`` into the new folder ``out``, which appears whole or not at all.

    Every byte of the checkpoint is verified first. ``dtype`` ("float32", "bfloat16", "float16"; None: as they are) is
    that of floating-point tensors. Needs memory for the tensors of one file. Raises CheckpointError for a checkpoint
    that cannot be used and for values that ``dtype`` cannot hold, ConfigError for an ``out`` that cannot be.
    """
    if out.exists():
        raise ConfigError(f"{out} asked; it is there already, and nothing is overwritten; choose another folder")
    manifest = manifests.read(path)
    verify(path, manifest, None)
    tensors = _tensors(path, manifest)
    target = None if dtype is None else getattr(torch, dtype)
    parts = _split(tensors, target, shard_bytes)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        total = _write_parts(path, partial, parts, target)
        (partial / "config.json").write_text(json.dumps(_config(manifest, dtype), indent=1) + "\n", encoding="utf-8")
        manifests.sync_folder(partial)
        os.rename(partial, out)
    except OSError as error:
        raise ConfigError(
            f"{out} asked; it cannot be written: {error.strerror or error}; choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    parameters = sum(math.prod(entry.size) for entry in tensors.values())
    return Exported(out, tuple(sorted(p.name for p in out.iterdir())), len(tensors), parameters, total)


def _tensors(path: Path, manifest: Manifest) -> dict[str, TensorStorageMetadata]:
    stored = read_metadata(path, manifest).state_dict_metadata
    found = {n: e for n, e in stored.items() if n.startswith(_PREFIX) and isinstance(e, TensorStorageMetadata)}
    if not found:
        raise CheckpointError(f"{path} holds no weights: none of its {len(stored)} entries begins with {_PREFIX!r}")
    claimed = sum(_bytes(entry, None) for entry in found.values())
    if claimed > manifest.bytes:  # before memory is asked for
        raise CheckpointError(f"{path}/.metadata is damaged or hostile: it claims {claimed} bytes of weights")
    return found


def _bytes(entry: TensorStorageMetadata, target: torch.dtype | None) -> int:
    dtype = entry.properties.dtype
    return math.prod(entry.size) * (target if target is not None and dtype.is_floating_point else dtype).itemsize


def _split(tensors: dict[str, TensorStorageMetadata], target: torch.dtype | None, most: int) -> list[dict[str, Any]]:
    """The tensors of each file, in the model's order."""
    parts: list[dict[str, Any]] = [{}]
    room = most
    for name, entry in tensors.items():
        size = _bytes(entry, target)
        if parts[-1] and size > room:
            parts.append({})
            room = most
        parts[-1][name] = entry
        room -= size
    return parts


def _write_parts(path: Path, out: Path, parts: Sequence[dict[str, Any]], target: torch.dtype | None) -> int:
    from safetensors.torch import save_file

    names = [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    names = names if len(parts) > 1 else ["model.safetensors"]
    places: dict[str, str] = {}
    total = 0
    for file, part in zip(names, parts, strict=True):
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in part.items()}
        fill(path, state, None)
        ready = {name.removeprefix(_PREFIX): _cast(name, state.pop(name), target) for name in list(state)}
        save_file(ready, out / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in ready.values())
        places |= dict.fromkeys(ready, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total


def _cast(name: str, tensor: Tensor, target: torch.dtype | None) -> Tensor:
    if target is None or not tensor.is_floating_point():
        return tensor
    cast = tensor.to(target)
    if not torch.equal(torch.isfinite(cast), torch.isfinite(tensor)):
        raise CheckpointError(
            f"{name} has values up to {tensor.abs().max():g}, which {str(target).removeprefix('torch.')} cannot hold; "
            "use --dtype bfloat16 or float32"
        )
    return cast


def _config(manifest: Manifest, dtype: str | None) -> dict[str, Any]:
    return {
        "format": "accelbridge-model",
        "release": __version__,
        "step": manifest.step,
        "metrics": manifest.metrics,
        "dtype": dtype or manifest.setting("recipe", "precision.params"),
        "model": manifest.model,
    }
