"""The optimizer and its learning rate. A schedule is a pure function of the step, so it needs no state."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from accelbridge.errors import ConfigError
from accelbridge.train.config import OptimizerConfig


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, adamw: Callable[..., torch.optim.Optimizer] | None = None
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; matrices are decayed, vectors (norms, biases) are not.

    ``adamw`` is the implementation that the plan chose, called like ``torch.optim.AdamW``, which is the default.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("a model without a trainable parameter; set requires_grad on what is to be trained")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return (adamw or torch.optim.AdamW)(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Rate of update ``step`` (from 0) of ``steps``: linear warm-up, then cosine to ``min_lr_ratio`` or constant."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the moments that AdamW otherwise makes at its first update, so that a checkpoint can fill them.

    One update with zero gradients and a zero rate, after which the count of updates is put back to 0: parameters
    keep their values, and the state is what a first update starts from. A parameter that never gets a gradient
    so has state too, and every checkpoint the same entries.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
