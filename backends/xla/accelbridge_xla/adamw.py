"""AdamW for lazy devices: nothing in its update is a Python number that changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class OnDeviceAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with the count of updates on the device, so that all steps are one graph.

    The update is that of Loshchilov and Hutter (arXiv:1711.05101, algorithm 2); state and names are torch's, so
    checkpoints move between the two. torch's own ``capturable=True`` also keeps the count on the device, but divides
    by the learning rate, which turns parameters into NaN at a rate of 0, and takes ``1 - beta ** step`` in float32,
    which has four digits left at the first step.

    Like torch's fused AdamW it takes ``found_inf``: where that is above 0, nothing changes.
    """

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        skip = None if found_inf is None else found_inf > 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group, skip)
        return loss


def _update(
    parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any], skip: Tensor | None
) -> None:
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    rate, (beta1, beta2) = group["lr"], group["betas"]
    step, mean, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
    changed = (parameter, step, mean, square)
    before = [tensor.clone() for tensor in changed] if skip is not None else []
    step += 1
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (square / _correction(beta2, step)).sqrt() + group["eps"]
    if group["weight_decay"]:
        parameter.mul_(1 - rate * group["weight_decay"])
    parameter.sub_(mean / _correction(beta1, step) / scale * rate)
    if skip is not None:
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(torch.where(skip, old, tensor))


def _correction(beta: float, step: Tensor) -> Tensor | float:
    """``1 - beta ** step``, exact to the last digits also for a beta near 1."""
    return -torch.expm1(step * math.log(beta)) if beta else 1.0
