"""The forward and backward pass of a microbatch as one graph: what lies between launching it and launching its kernels
one by one is host time, which at small microbatches is longer than the kernels run.

A graph replays kernels on the addresses that it was recorded with. So inputs are copied into buffers of its own, and
gradients are buffers that stay: zeroed where the optimizer has let go of them, and added to by every replay. The first
call runs as always, on the stream that is recorded later, and its results count; the second is recorded and launched;
from then on the host runs none of the model's Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from accelbridge.backend import Device
from accelbridge.errors import ConfigError

Passes = Callable[[Mapping[str, Tensor]], Tensor]
_WAY_OUT = "set train.capture: false"


class CapturedPasses:
    """``passes`` of :meth:`accelbridge.backend.Execution.capture`, over ``parameters`` that are whole on ``device``."""

    def __init__(self, device: Device, parameters: Iterable[nn.Parameter], passes: Passes) -> None:
        self._device, self._passes = device, passes
        self._graph = device.graph()
        self._parameters = [p for p in parameters if p.requires_grad]
        self._inputs: dict[str, Tensor] = {}
        """What the graph reads; empty before the first call."""
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        """What it adds to. A parameter that takes no part keeps no gradient, as without capture."""
        self._loss: Tensor | None = None
        """What it writes; None before the second call."""

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        if not self._inputs:
            return self._first(inputs)
        self._fill(inputs)
        self._attach()
        loss = self._record() if self._loss is None else self._loss
        self._graph.replay()
        return loss

    def _first(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run them as they are, see that they draw nothing, and make the buffers."""
        before = self._generator()
        with self._graph.aside():
            loss = self._passes(inputs)
        if not torch.equal(before, self._generator()):
            raise ConfigError(
                "train.capture asked; the model draws from the device's generator (nn.Dropout does), and a graph would "
                f"draw other numbers than a run without it; use accelbridge.models.Dropout, or {_WAY_OUT}"
            )
        self._inputs = {name: x.detach().clone() for name, x in inputs.items()}
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._gradients.append((parameter, torch.empty_like(parameter).copy_(parameter.grad)))
        for parameter, buffer in self._gradients:
            parameter.grad = buffer
        return loss

    def _generator(self) -> Tensor:
        state = self._device.rng_state()
        return state.get("device", state["host"])

    def _fill(self, inputs: Mapping[str, Tensor]) -> None:
        if (found := _described(inputs)) != (recorded := _described(self._inputs)):
            raise ConfigError(
                f"train.capture asked; a microbatch is {found}, and the first one was {recorded}; a graph takes one "
                f"shape only; make all microbatches alike (drop the last, smaller one), or {_WAY_OUT}"
            )
        for name, buffer in self._inputs.items():
            buffer.copy_(inputs[name])

    def _attach(self) -> None:
        """At the first microbatch of a step: the optimizer has let go of the gradients."""
        if any(parameter.grad is not None for parameter, _ in self._gradients[:1]):
            return
        torch._foreach_zero_([buffer for _, buffer in self._gradients])
        for parameter, buffer in self._gradients:
            parameter.grad = buffer

    def _record(self) -> Tensor:
        written: list[Tensor] = []
        try:
            self._graph.record(lambda: written.append(self._passes(self._inputs)))
        except RuntimeError as error:
            if self._device.is_out_of_memory(error):
                raise
            raise ConfigError(
                f"train.capture asked; the passes of a microbatch cannot be recorded: {str(error).splitlines()[0]}; "
                f"leave out what reads from the device or waits for it (.item(), a mask as an index), or {_WAY_OUT}"
            ) from error
        buffers = {id(parameter): buffer for parameter, buffer in self._gradients}
        if any(p.grad is not buffers.get(id(p)) for p in self._parameters):
            raise ConfigError(
                "train.capture asked; the first two microbatches give gradients to different parameters, and a graph "
                f"always runs the same; let every microbatch use all parameters, or {_WAY_OUT}"
            )
        self._loss = written[0]
        return self._loss


def _described(inputs: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for name, x in inputs.items())
