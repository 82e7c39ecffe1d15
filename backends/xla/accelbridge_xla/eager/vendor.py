"""TorchTPU, loaded late: a backend must be describable where it is not installed.

Where torch_tpu is installed, ``import torch`` imports it by itself (the entry point group ``torch.backends``), unless
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` is set. It registers its device then, and puts its own ``torch.compile`` and
``torch.set_float32_matmul_precision`` in the place of torch's, if it counts a TPU on the PCI bus. None of that is our
doing; :func:`load` has it done where autoloading was switched off.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load() -> None:
    """Have torch_tpu register its device, as its entry point would; again is fine. Opens no chip."""
    import_module("torch_tpu._loader").load()


def tpu(module: str = "") -> Any:
    """``torch.tpu``, or a module in it, untyped; :func:`load` comes first."""
    return import_module(f"torch.tpu.{module}" if module else "torch.tpu")
