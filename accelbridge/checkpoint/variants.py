"""A safetensors file whose quantized tensors are in another variant of their format."""

from __future__ import annotations

from pathlib import Path

from accelbridge.errors import CheckpointError, ConfigError
from accelbridge.precision import storage


def convert_file(path: Path, out: Path, format: str, convert: bool = True) -> list[str]:
    """Write ``path`` to ``out`` with its quantized tensors in ``format``, all else as it is. Returns what was
    converted, a sentence each.

    Raises ConfigError for what was asked and cannot be, such as a conversion where ``convert`` is False, and
    CheckpointError for a file that cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    if out.exists():
        raise ConfigError(f"{out} asked; it is there already, and nothing is overwritten; choose another file")
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} asked; it cannot be read as safetensors: {error}; give such a file") from error
    names, said = storage.names(state), []
    if not names:
        raise CheckpointError(f"{path} asked; it holds no quantized tensors; quantize when exporting")
    for name in names:
        restored = storage.from_state(name, state, format, convert)
        state |= storage.to_state(name, restored.tensor, restored.scaling)
        said += [restored.said] if restored.said else []
    partial = out.with_name(f".{out.name}.partial")
    try:
        save_file(state, partial, metadata={"format": "pt"})
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out} asked; it cannot be written: {error}; choose another file") from error
    finally:
        partial.unlink(missing_ok=True)
    return said
