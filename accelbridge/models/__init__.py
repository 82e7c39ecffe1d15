"""Models written on :mod:`accelbridge.ops`, and modules for your own.

The public names below are loaded when they are first used, since a recipe's ``ModelConfig`` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelbridge.models.config import ModelConfig
    from accelbridge.models.decoder import Decoder
    from accelbridge.models.dropout import Dropout, name_sites

__all__ = ["Decoder", "Dropout", "ModelConfig", "name_sites"]

_HOME = {
    "Decoder": "accelbridge.models.decoder",
    "Dropout": "accelbridge.models.dropout",
    "ModelConfig": "accelbridge.models.config",
    "name_sites": "accelbridge.models.dropout",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'accelbridge.models' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
