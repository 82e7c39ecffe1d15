"""accelbridge: one sharded PyTorch trainer for every accelerator.

Importing this package imports neither torch nor any vendor's SDK, opens no device and writes no environment:
the public names below are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelbridge.backend import Backend, Capabilities
    from accelbridge.hookspecs import hookimpl
    from accelbridge.plugins import load_backend
    from accelbridge.train.config import TrainConfig
    from accelbridge.train.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Backend", "Capabilities", "TrainConfig", "Trainer", "hookimpl", "load_backend"]

_HOME = {
    "Backend": "accelbridge.backend",
    "Capabilities": "accelbridge.backend",
    "TrainConfig": "accelbridge.train.config",
    "Trainer": "accelbridge.train.trainer",
    "hookimpl": "accelbridge.hookspecs",
    "load_backend": "accelbridge.plugins",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'accelbridge' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
