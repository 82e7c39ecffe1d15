"""The spmd execution model: one process, one program, every local device.

Tensors are global; the compiler splits the program as annotations say (``accelbridge_xla.sharding``) and inserts the
collectives. Operations are recorded and run when :meth:`XlaExecution.end_step` cuts the graph: a step is one graph,
the same from the first on, as long as no number that changes is a Python number in it.

ZeRO stages are where parameters and gradients lie between and within steps. Whether a gathered parameter is freed
between its forward and its backward use, which stage 3 promises in the eager model, is the compiler's choice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from accelbridge.backend import Compiled, Device, Execution, Gradients, HostMemory, Precision, Support, World
from accelbridge.errors import BackendError, ConfigError, NotSupportedYet
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import ShardingSpec
from accelbridge.portable.evaluation import without_training
from accelbridge_xla import bfloat16, traps
from accelbridge_xla.adamw import OnDeviceAdamW
from accelbridge_xla.hardware import ONE_PROCESS, without_cache
from accelbridge_xla.sharding import DATA, Annotator, Place, Places, constrain_activations, places, read_gathered
from accelbridge_xla.vendor import sdk
from accelbridge_xla.watch import StepWatch

if TYPE_CHECKING:
    import torch.distributed as dist

_log = logging.getLogger("accelbridge")

Initialise = Callable[[str, tuple[int, ...], range], Tensor]
Finish = Callable[[str, nn.Module], None]


class XlaExecution(Execution):
    """One process drives all devices of its host; see the module's text for how layouts are realised."""

    model: ClassVar[str] = "spmd"
    gathers_in: ClassVar[str] = "params"
    compiles_shapes: ClassVar[bool] = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self._layout = Layout()
        self._annotator: Annotator | None = None
        self._places: dict[int, Places] = {}
        """By id of the parameter, which the model keeps alive."""
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._watch = StepWatch()

    def devices_per_process(self, devices: int) -> int:
        return max(1, devices)

    def start(self, store: dist.Store, world: World, layout: Layout, timeout_s: float, check: bool) -> None:
        """See the interface. ``check`` has nothing to compare: there is one program, not one per device."""
        if world.size > 1:  # the trainer's check comes earlier; a loop of one's own ends here
            raise NotSupportedYet(f"{world.size} processes asked; {ONE_PROCESS}; start one process without a launcher")
        self.device = self._device.bind(world)
        found = sdk("runtime").global_runtime_device_count()
        if found != layout.size:
            raise BackendError(
                f"a layout of {layout.size} devices asked; the XLA runtime has {found}; they were counted on the PCI "
                "bus or in CPU_NUM_DEVICES before it started: see whether another process holds some of them"
            )
        traps.refuse_operations()
        if note := without_cache():
            _log.warning("%s", note)
        self._layout = layout
        self._annotator = Annotator(layout)
        self._watch = StepWatch()

    def close(self) -> None:
        self._annotator = self._model = self._optimizer = self.gradients = None
        self._places = {}

    @property
    def _started(self) -> Annotator:
        if self._annotator is None:
            raise BackendError("devices asked for; the execution was not started, or is closed; call start() first")
        return self._annotator

    # ---- data

    @property
    def data_coordinates(self) -> range:
        return range(self._layout.data_parallel)

    def place(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._watch.placed(batch)
        return {name: self._move(tensor, (DATA, *[None] * (tensor.dim() - 1))) for name, tensor in batch.items()}

    def _move(self, x: Tensor, where: Place) -> Tensor:
        """A host tensor onto the devices; each gets its part alone."""
        moved = x.to(self.device)
        if moved.numel():  # of nothing there is no part, and torch_xla cannot pad one
            self._started.place(moved, where)
        return moved

    # ---- model

    def realise(
        self,
        model: nn.Module,
        spec: ShardingSpec,
        precision: Precision,
        initialise: Initialise,
        finish: Finish | None = None,
        *,
        host: HostMemory = "",
    ) -> nn.Module:
        assert not host, "its capabilities say that nothing lies on the host"
        if precision.compute not in ("float32", "bfloat16") or {precision.reduce, precision.params} != {"float32"}:
            raise NotSupportedYet(
                f"{precision} asked; the XLA backend computes in float32 or bfloat16, and keeps and reduces in "
                "float32; set precision to those"
            )
        if buffer := next((name for name, b in model.named_buffers() if b.is_meta), None):
            raise ConfigError(
                f"a model with buffer {buffer} on the meta device; buffers have no rule to be filled; "
                "build the model on the CPU, or compute the buffer in forward"
            )
        traps.check_model(model)
        self._model = model
        made = self._move_parameters(model, spec, initialise)
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:  # once per owner, so that ties stay ties
                    module._parameters[name] = made[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._move(buffer, (None,) * buffer.dim())
        for name, module in model.named_modules():
            if precision.compute == "bfloat16" and module._parameters:
                module.register_forward_hook(bfloat16.watch(name))
            read_gathered(module, self._places, self._started)
        if self._layout.tp > 1:
            constrain_activations(model, spec, self._started, self._layout.sequence_parallel)
        for name, module in model.named_modules():
            if finish is not None and name and spec.is_unit(name):
                finish(name, module)
        return model

    def _move_parameters(self, model: nn.Module, spec: ShardingSpec, initialise: Initialise) -> dict[int, nn.Parameter]:
        """New parameters on the devices by id of the old ones, which ``model`` still holds; one at a time, since the
        host need not hold them all."""
        made: dict[int, nn.Parameter] = {}
        for name, old in model.named_parameters():
            owner, _, attribute = name.rpartition(".")
            where = places(tuple(old.shape), attribute, spec.style(owner), self._layout)
            if old.is_meta:
                host = initialise(name, tuple(old.shape), range(old.shape[0] if old.dim() else 1))
            else:
                host = old.detach().float() if old.is_floating_point() else old.detach()
            made[id(old)] = nn.Parameter(self._move(host, where.stored), old.requires_grad)
            self._places[id(made[id(old)])] = where
        return made

    def compile(self, unit: nn.Module) -> None:
        return None  # the whole step is compiled, whatever is in it

    def scalar(self, value: float) -> Tensor:
        # Not 0-d: torch_xla writes a 0-d 0 or 1 into the graph as a constant, and compiles it again.
        return torch.tensor([value], dtype=torch.float32).to(self.device).reshape(())

    def adamw(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """The op ``adamw`` of this backend; :meth:`end_step` keeps its state where it is to lie."""
        self._optimizer = OnDeviceAdamW(params, **options)
        return self._optimizer

    def evaluation(self, model: nn.Module) -> AbstractContextManager[None]:
        return without_training(model)

    # ---- step

    def microbatch(self, model: nn.Module, index: int, count: int) -> AbstractContextManager[None]:
        return self._watch.microbatch(index)

    def sum(self, x: Tensor) -> Tensor:
        return x  # modules see global tensors: it is the sum already

    def read_sums(self, shares: Sequence[Tensor]) -> list[float]:
        return [share.item() for share in shares]

    def largest(self, x: Tensor) -> Tensor:
        return x

    def any(self, flag: bool) -> bool:
        return flag

    def clip_grad_norm(self, model: nn.Module, max_norm: float | None, loss: Tensor | None = None) -> Tensor:
        parameters = [p for p in model.parameters() if p.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(cast(Tensor, p.grad)) for p in parameters])
        norm = torch.linalg.vector_norm(norms)
        lost = torch.zeros_like(norm) if loss is None else loss * 0  # NaN where the loss is not finite
        self.gradients = Gradients(norm, lost, parameters, norms)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return norm

    def end_step(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self._pin()
        sdk().sync()
        self._watch.step_done()
        return {name: v.detach() if isinstance(v, Tensor) else v for name, v in (values or {}).items()}

    def _pin(self) -> None:
        """State lies where it is to lie, whatever the partitioner would have chosen for the last operation on it."""
        if self._model is None:
            return
        state = self._optimizer.state if self._optimizer is not None else {}
        with torch.no_grad():
            for parameter in self._model.parameters():
                where = self._places[id(parameter)]
                self._started.place(parameter, where.stored)
                for value in state.get(parameter, {}).values():
                    if value.shape == parameter.shape:
                        self._started.place(value, where.state)

    # ---- state

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Whole tensors on the host: any layout of any execution model reads them."""
        self._device.synchronize()
        return {name: tensor.detach().cpu() for name, tensor in _live(model, optimizer).items()}

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in _live(model, optimizer).items():
                tensor.copy_(state[name].to(self.device))
        self.end_step()

    @property
    def control_group(self) -> None:
        return None

    # ---- ahead of time

    def compile_ahead(
        self, target: str, step: Callable[[Execution], None], seconds: float = 600.0
    ) -> Compiled | Support:
        from accelbridge_xla.ahead.compiling import compile_ahead

        return compile_ahead(target, step, seconds)


def _live(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of model and optimizer by the names that checkpoints use."""
    live = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            live[f"optimizer.{name}.{key}"] = value
    return live
