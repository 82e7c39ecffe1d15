"""The vendor's package, imported late and untyped: a backend must be describable where it is not installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def sdk(module: str = "") -> Any:
    """``torch_xla``, or a module in it. The first call starts no device, and none may come before the environment is
    set (:meth:`XlaCollectives.environment`)."""
    return import_module(f"torch_xla.{module}" if module else "torch_xla")
