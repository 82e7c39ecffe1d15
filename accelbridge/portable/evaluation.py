"""Forward passes between training steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def without_training(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; afterwards those modules train again that did before, since some may have been
    frozen with ``eval()``."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
