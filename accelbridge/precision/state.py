"""What fp8 layers remember between steps: amax histories and the scales made of them (delayed scaling), scales of
weights that are gathered as fp8, and counters.

All layers share one tensor of each kind, so a step costs one reduction (the largest of all ranks) and some small
kernels, and no wait of the host. The same reduction shows whether ranks have come to hold different scales: with the
numbers it carries their negatives, and the largest of a number and of its negative differ in sign alone only where all
ranks hold the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelbridge.portable.sharded_adamw import local
from accelbridge.precision.gathered import gather_as_fp8, sharded_parameters
from accelbridge.precision.linear import Fp8Layer, scale_of
from accelbridge.precision.recipe import ROLES, Fp8Recipe, Role

PREFIX = "fp8."
"""Names in a checkpoint begin with this."""
_WEIGHT = ROLES.index("weight")

Largest = Callable[[Tensor], Tensor]
"""The elementwise largest over all ranks."""


class Desynchronised(NamedTuple):
    """A scale of which ranks hold different values."""

    layer: str
    role: Role


class Lost(NamedTuple):
    """Shares of a tensor's elements, in the mean over an interval, of the worst rank."""

    saturated: float
    underflowed: float
    nonfinite: float


def _apart(whole: Tensor, index: int) -> Tensor:
    """A row of ``whole`` that has a version counter of its own: a compiled graph saves what its backward pass adds to,
    and would take what another layer has written to its own row in between for a change of this one."""
    return whole.data[index]


class Fp8State:
    """The state of all fp8 layers of one model."""

    def __init__(self, model: nn.Module, layers: Mapping[str, tuple[nn.Linear, Fp8Layer]], recipe: Fp8Recipe) -> None:
        self.recipe = recipe
        self._model = model
        self.names = list(layers)
        self._layers = [layer for _, layer in layers.values()]
        self._modules = [module for module, _ in layers.values()]
        self._gathers = self._counting = False

    def start(self, device: torch.device, largest: Largest | None = None) -> None:
        """Put the state on ``device``; call it once the model is sharded and has its values. ``largest`` is as for
        :meth:`update`."""
        config, count = self.recipe.config, len(self.names)
        self.amax = torch.zeros(count, 3, device=device)
        self.history = torch.zeros(count, 3, config.history if self.recipe.delayed else 0, device=device)
        self.scale = torch.zeros(count, 3, 1, 1, device=device)
        self._diverged = torch.zeros(count, 3, dtype=torch.bool, device=device)
        self._held = torch.zeros(2, count, 3, device=device)
        """This rank's scale, and largest magnitude of its history, when a difference was first seen."""
        self._counts = torch.zeros(count, 3, 4, device=device)
        self._limits = torch.tensor([f.max for f in self._layers[0].formats], device=device) if count else self.amax
        for index, layer in enumerate(self._layers):
            if self.recipe.delayed:
                layer.amax, layer.scale = _apart(self.amax, index), self.scale[index]
        if config.gather:
            self._gather(sharded_parameters(self._model))
            self.prime(largest)

    def _gather(self, records: Mapping[int, Any]) -> None:
        for index, (module, layer) in enumerate(zip(self._modules, self._layers, strict=True)):
            record = records.get(id(module._parameters["weight"]))
            if record is not None:
                self._gathers, scale = True, self.scale[index, _WEIGHT]
                gather_as_fp8(record, layer.matmul, layer.formats[_WEIGHT], self.recipe.weight, scale)

    # ---- each step

    def count(self, on: bool) -> None:
        """Whether the coming steps are counted: that takes passes over all operands, so a trainer counts those whose
        metrics it reads. Nothing without ``precision.fp8.counters``."""
        on = on and self.recipe.config.counters
        if on != self._counting:
            self._counting = on
            for index, layer in enumerate(self._layers):
                layer.counts = _apart(self._counts, index) if on else None

    def update(self, largest: Largest | None = None) -> None:
        """After the optimizer's update: one reduction, then the next step's scales. All ranks call it.

        ``largest`` reduces a float32 tensor over all ranks, which hold parts of the batch or of the weights; default:
        there are no others."""
        if not (self.recipe.delayed or self._gathers):
            return
        if self._gathers:
            self._measure_weights()
        amax = self.amax.nan_to_num(0.0, 0.0, 0.0)
        before = self._picked()
        mine = torch.stack([amax, self.scale.flatten(1), -self.scale.flatten(1), before, -before])
        held = mine[1::2].clone()
        amax, high, low, recent, least = (largest(mine) if largest is not None else mine).unbind()
        differ = ((high != -low) | (recent != -least)) & ~self._diverged
        self._held.copy_(torch.where(differ, held, self._held))
        self._diverged |= differ
        if self.recipe.delayed:
            self.history.copy_(torch.cat([amax.unsqueeze(-1), self.history[..., :-1]], -1))
            amax = self._picked()
        self._rescale(amax)
        self.amax.zero_()

    def prime(self, largest: Largest | None = None) -> None:
        """Make the scales of gathered weights from the weights as they are: before the first step, and after they have
        been replaced."""
        if not self._gathers:
            return
        self._measure_weights()
        found = self.amax.nan_to_num(0.0, 0.0, 0.0)
        found = largest(found) if largest is not None else found
        known = self.scale > 0 if self.recipe.delayed else torch.zeros_like(self.scale, dtype=torch.bool)
        made = self._scales(found)
        made[:, [i for i in range(3) if i != _WEIGHT]] = 0.0
        self.scale.copy_(torch.where(known, self.scale, made))
        self.amax.zero_()

    def _measure_weights(self) -> None:
        weights = [module._parameters["weight"] for module in self._modules]
        parts = [local(weight.detach()) for weight in weights if weight is not None]
        norms = [part.abs().amax() if part.numel() else part.new_zeros(()) for part in parts]
        self.amax[:, _WEIGHT] = torch.maximum(self.amax[:, _WEIGHT], torch.stack(norms).float())

    def _picked(self) -> Tensor:
        """What of the history makes the scale: [layers, 3]."""
        if not self.history.shape[-1]:
            return torch.zeros_like(self.amax)
        return self.history.amax(-1) if self.recipe.config.amax == "max" else self.history[..., 0]

    def _scales(self, amax: Tensor) -> Tensor:
        return scale_of(amax, self._limits, self.recipe).reshape(self.scale.shape)

    def _rescale(self, amax: Tensor) -> None:
        """Scales from ``amax``; those of which nothing was seen stay."""
        seen = (amax > 0).reshape(self.scale.shape)
        self.scale.copy_(torch.where(seen, self._scales(amax), self.scale))

    # ---- between steps, on the host

    def diverged(self) -> list[Desynchronised]:
        """Scales that were not the same on all ranks at an update since the last call. Equal on all ranks. The host
        waits."""
        found = self._diverged.nonzero().tolist()
        self._diverged.zero_()
        return [Desynchronised(self.names[layer], ROLES[role]) for layer, role in found]

    def held(self, layer: str, role: Role) -> tuple[float, float]:
        """This rank's scale, and what of its history makes one, when they were first seen to differ: to say which rank
        it is."""
        scale, recent = self._held[:, self.names.index(layer), ROLES.index(role)].tolist()
        return scale, recent

    def read_counters(self, largest: Largest | None = None) -> dict[str, dict[str, Lost]]:
        """What was lost in the steps that were counted since the last call, by layer and role; without those of which
        nothing was counted, such as weights that travel as codes. All ranks call it."""
        if not self._counting:
            return {}
        times = self._counts[..., 3:]
        found = torch.cat([self._counts[..., :3] / times.clamp_min(1.0), times], -1)
        table = (largest(found) if largest is not None else found).tolist()
        self._counts.zero_()
        return {
            name: {role: Lost(*row[:3]) for role, row in zip(ROLES, rows, strict=True) if row[3]}
            for name, rows in zip(self.names, table, strict=True)
        }

    # ---- checkpoints

    def state(self) -> dict[str, Tensor]:
        """The live tensors by name, for a checkpoint to hold, and to be filled from one. Histories are magnitudes, so
        they serve any variant and any layout."""
        if not self.recipe.delayed:
            return {}
        tensors: dict[str, Tensor] = {}
        for index, name in enumerate(self.names):
            tensors[f"{PREFIX}{name}.amax_history"] = self.history[index]
            tensors[f"{PREFIX}{name}.scale"] = self.scale[index]
        return tensors

    def restored(self, largest: Largest | None = None, *, histories: bool, converted: bool = False) -> None:
        """After a checkpoint has been read into the weights and, with ``histories``, into :meth:`state`; without, all
        starts anew. ``converted``: the histories came with another format's scales. All ranks call it."""
        if not histories:
            self.history.zero_()
        if converted or not histories:
            self.scale.zero_()
            self._rescale(self._picked())
        self.amax.zero_()
        self._counts.zero_()
        self.prime(largest)
