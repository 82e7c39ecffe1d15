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
from fnmatch import fnmatchcase
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
from accelbridge.portable.fp8 import quantized
from accelbridge.precision import formats
from accelbridge.precision.quantized import block_counts
from accelbridge.precision.scalings import scaling_of
from accelbridge.precision.storage import to_state

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


@dataclass(frozen=True)
class Quantize:
    """Which weights are to be quantized, and how."""

    format: str
    scaling: str = "block128x128"
    include: str = ""
    """Pattern (``fnmatch``) of parameters' names. Default: those of numbered modules, as of layers.0, which leaves out
    embeddings and the head. Matrices only, in any case."""

    def __post_init__(self) -> None:
        scaling_of(self.scaling)
        if not formats.is_narrow(self.format):
            known = [name for name in formats.FORMATS if formats.is_narrow(name)]
            raise ConfigError(f"quantizing to {self.format} asked; no such format; use one of {', '.join(known)}")

    def takes(self, name: str, size: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether the parameter ``name`` is one of them."""
        named = fnmatchcase(name, self.include) if self.include else any(map(str.isdigit, name.split(".")))
        return named and len(size) == 2 and formats.fits_float32(dtype)

    def bytes(self, size: torch.Size) -> int:
        """About what one takes in a file; its meaning is a few hundred bytes more."""
        return math.prod(size) + 4 * math.prod(block_counts(size, scaling_of(self.scaling).block))

    def state(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Its entries in a file."""
        q = quantized(weight, formats.FORMATS[self.format], scaling_of(self.scaling))
        if not bool(q.scale.isfinite().all()):
            raise CheckpointError(f"{name} has values that are not finite; quantizing would spread them over a block")
        return to_state(name, q, self.scaling)


def export(
    path: Path,
    out: Path,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    quantize: Quantize | None = None,
) -> Exported:
    """Write the model's weights in ``path`` into the new folder ``out``, which appears whole or not at all.

    Every byte of the checkpoint is verified first. ``dtype`` ("float32", "bfloat16", "float16"; None: as they are) is
    that of floating-point tensors, but of those that ``quantize`` takes: they are stored as
    ``accelbridge.precision.storage`` says. Needs memory for the tensors of one file. Raises CheckpointError for a
    checkpoint that cannot be used and for values that ``dtype`` cannot hold, ConfigError for an ``out`` that cannot be.
    """
    if out.exists():
        raise ConfigError(f"{out} asked; it is there already, and nothing is overwritten; choose another folder")
    manifest = manifests.read(path)
    verify(path, manifest, None)
    tensors = _tensors(path, manifest)
    taken = _taken(tensors, quantize)
    target = None if dtype is None else getattr(torch, dtype)
    sizes = {n: taken[n].bytes(e.size) if n in taken else _bytes(e, target) for n, e in tensors.items()}
    parts = _split(tensors, sizes, shard_bytes)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        total = _write_parts(path, partial, parts, target, taken)
        config = _config(manifest, dtype) | _quantization(quantize, taken)
        (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
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


def _taken(tensors: dict[str, TensorStorageMetadata], quantize: Quantize | None) -> dict[str, Quantize]:
    """How each tensor is quantized that is."""
    if quantize is None:
        return {}
    taken = [n for n, e in tensors.items() if quantize.takes(n.removeprefix(_PREFIX), e.size, e.properties.dtype)]
    if not taken:
        names = [name.removeprefix(_PREFIX) for name in tensors]
        which = f"match {quantize.include!r}" if quantize.include else "belong to a numbered module"
        raise ConfigError(f"quantizing asked; none of the {len(names)} weights are matrices that {which}; "
                          f"choose by include, as of {', '.join(names[:3])}")  # fmt: skip
    return dict.fromkeys(taken, quantize)


def _bytes(entry: TensorStorageMetadata, target: torch.dtype | None) -> int:
    dtype = entry.properties.dtype
    return math.prod(entry.size) * (target if target is not None and dtype.is_floating_point else dtype).itemsize


def _split(tensors: dict[str, TensorStorageMetadata], sizes: dict[str, int], most: int) -> list[dict[str, Any]]:
    """The tensors of each file, in the model's order."""
    parts: list[dict[str, Any]] = [{}]
    room = most
    for name, entry in tensors.items():
        size = sizes[name]
        if parts[-1] and size > room:
            parts.append({})
            room = most
        parts[-1][name] = entry
        room -= size
    return parts


def _write_parts(
    path: Path,
    out: Path,
    parts: Sequence[dict[str, Any]],
    target: torch.dtype | None,
    taken: dict[str, Quantize],
) -> int:
    from safetensors.torch import save_file

    names = [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    names = names if len(parts) > 1 else ["model.safetensors"]
    places: dict[str, str] = {}
    total = 0
    for file, part in zip(names, parts, strict=True):
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in part.items()}
        fill(path, state, None)
        ready: dict[str, Tensor] = {}
        for name in list(state):
            tensor, plain = state.pop(name), name.removeprefix(_PREFIX)
            ready |= taken[name].state(plain, tensor) if name in taken else {plain: _cast(name, tensor, target)}
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


def _quantization(quantize: Quantize | None, taken: dict[str, Quantize]) -> dict[str, Any]:
    if quantize is None:
        return {}
    tensors = [name.removeprefix(_PREFIX) for name in taken]
    return {"quantization": {"format": quantize.format, "scaling": quantize.scaling, "tensors": tensors}}


def _config(manifest: Manifest, dtype: str | None) -> dict[str, Any]:
    return {
        "format": "accelbridge-model",
        "release": __version__,
        "step": manifest.step,
        "metrics": manifest.metrics,
        "dtype": dtype or manifest.setting("recipe", "precision.params"),
        "model": manifest.model,
    }
