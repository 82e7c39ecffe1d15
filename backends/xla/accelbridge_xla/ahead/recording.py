"""An execution that records one step and runs nothing: no parameter, moment or batch holds a byte."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accelbridge.backend import World
from accelbridge.errors import Unsupported
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import ShardingSpec
from accelbridge_xla.execution import Initialise, XlaExecution
from accelbridge_xla.sharding import AXES, DATA, Place, places
from accelbridge_xla.vendor import sdk


@dataclass(frozen=True)
class Value:
    """One input or output of the program: what it is, and where its parts lie."""

    kind: str
    """"parameters", "optimizer", "batch" or "other"."""
    shape: tuple[int, ...]
    itemsize: int
    sharding: str
    """As HLO writes it (``{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}``)."""
    parameter: int | None = None
    """Number of the program's parameter: its own for an input, the donated one for an output."""


@dataclass(frozen=True)
class Recorded:
    """A step: ``program`` is a serialised HloModuleProto, global shapes, with annotations inside."""

    program: bytes
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def facts(self) -> dict[str, Any]:
        return {"inputs": [asdict(v) for v in self.inputs], "outputs": [asdict(v) for v in self.outputs]}


@dataclass
class _Placeholder:
    kind: str
    witness: Tensor
    """The value as it came in, whatever is done to the tensor in place."""
    where: Place


Key = tuple[int, str]
"""Of a value that a step reads and replaces: the parameter's id, and "" or the name of its state."""


class RecordingExecution(XlaExecution):
    """What :class:`XlaExecution` does to a step, on placeholders; :attr:`recorded` is there after :meth:`end_step`."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.recorded: Recorded | None = None
        self._batch: list[_Placeholder] = []
        self._state: dict[Key, _Placeholder] = {}
        self._begun = False

    def start(self, store: Any, world: World, layout: Layout, timeout_s: float, check: bool) -> None:
        super().start(store, world, layout, timeout_s, check)
        self._mesh = np.arange(layout.size).reshape([getattr(layout, axis) for axis in AXES])

    def place(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name, x in batch.items():
            made[name] = _placeholder(tuple(x.shape), x.dtype)
            self._batch.append(_Placeholder("batch", made[name].clone(), (DATA, *[None] * (x.dim() - 1))))
        return made

    def _move_parameters(self, model: nn.Module, spec: ShardingSpec, initialise: Initialise) -> dict[int, nn.Parameter]:
        made: dict[int, nn.Parameter] = {}
        for name, old in model.named_parameters():
            owner, _, attribute = name.rpartition(".")
            where = places(tuple(old.shape), attribute, spec.style(owner), self._layout)
            made[id(old)] = new = nn.Parameter(_placeholder(tuple(old.shape), torch.float32), old.requires_grad)
            self._places[id(new)] = where
            self._state[id(new), ""] = _Placeholder("parameters", new.detach().clone(), where.stored)
        return made

    def adamw(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer = super().adamw(params, **options)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                shape, where = tuple(parameter.shape), self._places[id(parameter)].state
                sizes: dict[str, tuple[tuple[int, ...], Place]] = {"step": ((), ())}
                sizes |= dict.fromkeys(("exp_avg", "exp_avg_sq"), (shape, where))
                for name, (size, place) in sizes.items():
                    value = optimizer.state[parameter][name] = _placeholder(size, torch.float32)
                    self._state[id(parameter), name] = _Placeholder("optimizer", value.clone(), place)
        return optimizer

    def microbatch(self, model: nn.Module, index: int, count: int) -> AbstractContextManager[None]:
        self._begun = True
        return super().microbatch(model, index, count)

    def end_step(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if not self._begun:  # set-up: a graph of its own in a run, and nothing can be run here
            return dict(values or {})
        if self._model is None or self._optimizer is None:
            raise Unsupported(
                "a step with another optimizer asked; the op adamw of this backend is what can be recorded; "
                "leave backend.ops.adamw out"
            )
        self._pin()
        self.recorded = self._lower([v for v in (values or {}).values() if isinstance(v, Tensor)])
        return dict(values or {})

    def _lower(self, values: list[Tensor]) -> Recorded:
        """Lower the pending graph of the new parameters, the new state and ``values``."""
        state = self._live()
        context = sdk()._XLAC.lowering.LoweringContext("step")
        context.build([*state.values(), *values])
        # Below 0: nothing depends on it, so it is not in the program.
        numbers = {key: context.tensor_parameter_id(each.witness) for key, each in self._state.items()}
        inputs = [self._value(each, numbers[key]) for key, each in self._state.items()]
        inputs += [self._value(each, context.tensor_parameter_id(each.witness)) for each in self._batch]
        outputs = [self._value(self._state[key], numbers[key]) for key in state]
        outputs += [Value("other", tuple(v.shape), v.element_size(), "{replicated}") for v in values]
        return Recorded(context.hlo(), tuple(v for v in inputs if v.parameter is not None), tuple(outputs))

    def _live(self) -> dict[Key, Tensor]:
        """What is kept from step to step, as it now is."""
        assert self._model is not None
        assert self._optimizer is not None
        live: dict[Key, Tensor] = {}
        for parameter in self._model.parameters():
            live[id(parameter), ""] = parameter.detach()
            live |= {(id(parameter), name): value for name, value in self._optimizer.state.get(parameter, {}).items()}
        return live

    def _value(self, of: _Placeholder, number: int) -> Value:
        text = sharding_text(of.where, self._mesh)
        shape, size = tuple(of.witness.shape), of.witness.element_size()
        return Value(of.kind, shape, size, text, number if number >= 0 else None)


def _placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return sdk("core.xla_builder").create_placeholder_tensor(shape, dtype)


def sharding_text(where: Place, mesh: np.ndarray) -> str:
    """``where`` on ``mesh`` (its dimensions are :data:`AXES`) as HLO writes it.

    The format is that of ``HloSharding::ToString`` (openxla/xla): tile counts per dimension, then device ids, the last
    dimension of the tiles being copies where there are any.
    """
    named = [axes if isinstance(axes, tuple) else (axes,) if axes else () for axes in where]
    used = [axis for axes in named for axis in axes]
    counts = [int(np.prod([mesh.shape[AXES.index(axis)] for axis in axes], dtype=int)) for axes in named]
    if all(count == 1 for count in counts):
        return "{replicated}"
    order = [AXES.index(axis) for axis in used] + [i for i, axis in enumerate(AXES) if axis not in used]
    copies = mesh.size // int(np.prod(counts))
    tiles = counts + ([copies] if copies > 1 else [])
    ids = ",".join(map(str, mesh.transpose(order).reshape(-1).tolist()))
    last = " last_tile_dim_replicate" if copies > 1 else ""
    return f"{{devices=[{','.join(map(str, tiles))}]{ids}{last}}}"
