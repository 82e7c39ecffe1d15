"""Quantized tensors in a state dict or a safetensors file, with their meaning.

NAME.codes       uint8 [rows, columns], one code an element: dtypes of files know no e4m3 of IEEE's kind
NAME.scale       float32 [blocks, blocks] or, where the scaling's scales are e8m0, uint8 codes of it
NAME.quantized   uint8 [bytes], JSON: format, its largest number, block, scaling, format of the scales, release

All three are tensors, so they stay together in files that are split, renamed or rewritten, and reading runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelbridge import __version__
from accelbridge.backend import Format
from accelbridge.errors import CheckpointError, ConfigError
from accelbridge.precision import formats
from accelbridge.precision.quantized import QuantizedTensor
from accelbridge.precision.scalings import SCALINGS, Scaling, scaling_of

_MEANING = ".quantized"
_E8M0 = formats.FORMATS["float8_e8m0fnu"]
_MOST_BYTES = 4096
"""Of a meaning: more is none that this module wrote."""


class Restored(NamedTuple):
    """What was read."""

    tensor: QuantizedTensor
    scaling: str
    """Name of the scaling it was quantized with; empty where the file does not say."""
    said: str
    """What was converted, as a sentence; empty where nothing was."""


def to_state(name: str, q: QuantizedTensor, scaling: str = "") -> dict[str, Tensor]:
    """The entries of ``q``, quantized with the ``scaling`` of that name if given, in a state dict.

    Raises ConfigError for a scaling with other blocks, or with scales that its format cannot hold.
    """
    chosen = scaling_of(scaling) if scaling else None
    if chosen is not None and chosen.block != q.block:
        raise ConfigError(
            f'{name} asked to be stored as scaled by "{scaling}", in blocks of {chosen.block}; its blocks are '
            f"{q.block}; name its own scaling, or none"
        )
    meaning = {
        "format": q.format.name,
        "max": q.format.max,
        "block": list(q.block),
        "scaling": scaling,
        "scale_format": "float32" if chosen is None else chosen.scale_format,
        "release": __version__,
    }
    text = bytearray(json.dumps(meaning).encode())
    return {
        f"{name}.codes": q.codes(q.format.name).contiguous(),
        f"{name}.scale": _stored_scale(name, q.scale, chosen),
        f"{name}{_MEANING}": torch.frombuffer(text, dtype=torch.uint8),
    }


def names(state: Mapping[str, Any]) -> list[str]:
    """Names of the quantized tensors in ``state``."""
    return [name.removesuffix(_MEANING) for name in state if name.endswith(_MEANING)]


def pieces(name: str) -> tuple[str, str, str]:
    """The entries that ``name`` takes in a state dict."""
    return f"{name}.codes", f"{name}.scale", f"{name}{_MEANING}"


def from_state(name: str, state: Mapping[str, Any], format: str = "", convert: bool = True) -> Restored:
    """The quantized tensor ``name`` of ``state``, in the variant ``format`` (default: as it is stored).

    Where it is stored in another variant it is converted (:meth:`QuantizedTensor.convert`), and ``said`` says what that
    did; with ``convert=False`` it is refused. Raises CheckpointError for an entry that is missing, damaged or of
    another type, ConfigError for what was asked and cannot be, Unsupported for a format that is no variant.
    """
    codes, scale = (_piece(name, state, kind) for kind in (".codes", ".scale"))
    meaning = _meaning(name, _piece(name, state, _MEANING))
    stored = formats.FORMATS[meaning["format"]]
    try:
        scale = _decoded_scale(name, scale, meaning["scale_format"])
        if codes.dtype != torch.uint8:
            raise ConfigError(f"its codes are {codes.dtype}; they are stored as torch.uint8")
        if meaning["max"] > stored.max:
            raise ConfigError(f"its largest number is {meaning['max']:g}; {stored.name} has none above {stored.max:g}")
        rows, columns = meaning["block"]
        q = QuantizedTensor.of_codes(codes, scale, replace(stored, max=meaning["max"]), (rows, columns))
    except ConfigError as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
    if not format or format == stored.name:
        return Restored(q, meaning["scaling"], "")
    if format not in formats.FORMATS:
        raise ConfigError(f"{name} asked as {format}; no such format; use one of {', '.join(formats.FORMATS)}")
    if not convert:
        raise ConfigError(
            f"{name} asked as {format} without conversion; it is stored as {stored.name}, in which the same bits are "
            f"other numbers; allow conversion, or ask for {stored.name}"
        )
    return Restored(*_converted(name, q, formats.FORMATS[format], meaning["scaling"]))


def _converted(name: str, q: QuantizedTensor, format: Format, scaling: str) -> tuple[QuantizedTensor, str, str]:
    new = q.convert(format)
    before, after = q.dequantize(), new.dequantize()
    rounded = int(((before != after) & ~before.isnan()).sum())
    lost = f"{rounded} of {before.numel()} elements rounded" if rounded else "every number kept"
    bits = "same bits" if torch.equal(q.codes(q.format.name), new.codes(format.name)) else "other bits"
    ratio = (new.scale / q.scale).flatten()[:1].tolist()
    times = f", scales times {ratio[0]:g}" if ratio and ratio[0] != 1.0 else ""
    return new, scaling, f"{name}: converted from {q.format.name} to {format.name}, {bits}{times}; {lost}"


def _stored_scale(name: str, scale: Tensor, scaling: Scaling | None) -> Tensor:
    if scaling is None or scaling.scale_format == "float32":
        return scale.contiguous()
    codes = formats.encode(scale, _E8M0)
    if not bool(((formats.decode(codes, _E8M0) == scale) | scale.isnan()).all()):
        raise ConfigError(
            f'{name} asked to be stored as scaled by "{scaling.name}"; its scales are not all powers of two within '
            f"2^-127 .. 2^127, which is what e8m0 holds; store it without a scaling's name, as float32"
        )
    return codes


def _decoded_scale(name: str, scale: Tensor, format: str) -> Tensor:
    wanted = torch.float32 if format == "float32" else torch.uint8
    if scale.dtype != wanted:
        raise ConfigError(f"its scales are {scale.dtype}; {format} is stored as {wanted}")
    return scale if format == "float32" else formats.decode(scale, _E8M0)


def _piece(name: str, state: Mapping[str, Any], kind: str) -> Tensor:
    found = state.get(name + kind)
    if not isinstance(found, Tensor):
        what = "missing" if found is None else f"a {type(found).__name__}, not a tensor"
        raise CheckpointError(f"{name} asked as a quantized tensor; its entry {name}{kind} is {what}")
    return found


def _meaning(name: str, text: Tensor) -> dict[str, Any]:
    """The checked contents of a meaning; whatever else it says is left alone."""
    entry = f"{name}{_MEANING}"
    if text.dtype != torch.uint8 or text.dim() != 1 or text.numel() > _MOST_BYTES:
        raise CheckpointError(
            f"{entry} is damaged: {tuple(text.shape)} {text.dtype}; at most {_MOST_BYTES} torch.uint8 expected"
        )
    try:
        found = json.loads(bytes(text.tolist()))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{entry} is damaged: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{entry} is damaged: it is no object with keys")
    for key, valid in _VALID.items():
        if key not in found:
            raise CheckpointError(f'{entry} is damaged: "{key}" is missing')
        if not valid(found[key]):
            raise CheckpointError(f'{entry} is damaged: "{key}" is {found[key]!r}, which this release does not know')
    return found


def _is_block(value: Any) -> bool:
    sizes = isinstance(value, list) and len(value) == 2 and all(type(size) is int for size in value)
    return sizes and all(size == -1 or size > 0 for size in value)


_VALID: Mapping[str, Callable[[Any], bool]] = {
    "format": lambda value: isinstance(value, str) and formats.is_narrow(value),
    "max": lambda value: isinstance(value, float) and 0.0 < value < float("inf"),
    "block": _is_block,
    "scaling": lambda value: isinstance(value, str) and (not value or value in SCALINGS),
    "scale_format": lambda value: value in ("float32", _E8M0.name),
}
