"""The optimizer and its learning rate. A schedule is a pure function of the step, so it needs no state."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from accelbridge.errors import ConfigError
from accelbridge.portable.sharded_adamw import ShardedAdamW
from accelbridge.train.config import OptimizerConfig
from accelbridge.train.groups import rules


def freeze(model: nn.Module, config: OptimizerConfig) -> None:
    """Turn gradients off where ``config.groups`` says frozen. Before sharding, which looks at it."""
    parameters = dict(model.named_parameters())
    for name, rule in rules(_shapes(parameters), config).items():
        if rule.frozen:
            parameters[name].requires_grad_(False)


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, adamw: Callable[..., torch.optim.Optimizer] | None = None
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, in groups of equal weight decay and learning rate.

    Matrices are decayed, vectors (norms, biases) are not, unless ``config.groups`` says otherwise. ``adamw`` is the
    implementation that the plan chose, called like ``torch.optim.AdamW``.
    """
    parameters = dict(model.named_parameters())
    by_rule = rules(_shapes(parameters), config)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name in sorted(parameters, key=lambda name: parameters[name].ndim < 2):  # stable: matrices come first
        if parameters[name].requires_grad:
            rule = by_rule[name]
            groups.setdefault((rule.lr_scale, rule.weight_decay), []).append(parameters[name])
    if not groups:
        raise ConfigError("a model without a trainable parameter; set requires_grad on what is to be trained")
    return (adamw or ShardedAdamW)(
        [
            {"params": members, "weight_decay": decay, "lr_scale": lr_scale}
            for (lr_scale, decay), members in groups.items()
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def _shapes(parameters: dict[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Rate of update ``step`` (from 0) of ``steps``: linear warm-up to ``config.lr``, then the schedule.

    ``cosine`` (Loshchilov and Hutter, arXiv:1608.03983, without restarts) ends at ``min_lr_ratio`` of the peak, as
    does ``wsd``: warm-up, stable, decay (Hu et al., arXiv:2404.06395). Its decay is linear or ``1 - sqrt(progress)``
    (Haegele et al., arXiv:2405.18392, who find the latter to end lower).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    share = _share(config, step, steps)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def _share(config: OptimizerConfig, step: int, steps: int) -> float:
    """Where between the lowest rate (0) and the peak (1) the schedule is after the warm-up."""
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    assert config.decay_steps, "the recipe's own check"
    progress = min(1.0, max(0, step + 1 - (steps - config.decay_steps)) / config.decay_steps)
    return 1 - progress if config.decay_shape == "linear" else 1 - math.sqrt(progress)


def set_learning_rate(
    optimizer: torch.optim.Optimizer, rate: float, scalar: Callable[[float], float | Tensor] = float
) -> None:
    """Give every group its rate. ``scalar`` puts it into the form the device takes, once per distinct ``lr_scale``:
    by the rate itself, groups would share one tensor at a rate of 0, which is another graph on a lazy device."""
    made: dict[float, float | Tensor] = {}
    for group in optimizer.param_groups:
        scale = group.get("lr_scale", 1.0)
        if scale not in made:
            made[scale] = scalar(rate * scale)
        group["lr"] = made[scale]


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
