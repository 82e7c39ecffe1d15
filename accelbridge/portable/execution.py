"""The eager execution model: one process per device, process groups, FSDP2.

Sharded layouts are FSDP2 (``fully_shard``) on a mesh of (dp_replicate, dp_shard). Where every process holds the whole
model, parameters stay what they are, and their gradients are summed in buckets (:mod:`.replicas`); but tensor
parallelism, or another dtype to compute or reduce in, takes FSDP2 there too, on a shard group of one. ZeRO stages
differ in what stays whole between the microbatches of a step:

    stage 1  parameters are gathered once a step, gradients accumulate whole and are reduced once
    stage 2  parameters are gathered once a step, gradients are reduce-scattered every microbatch
    stage 3  parameters are freed after use, gradients are reduce-scattered every microbatch

The optimizer's state is sharded in all three. Gradients are summed, never averaged: the loss is already divided
by the token count of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from accelbridge.backend import (
    Collectives,
    Device,
    Execution,
    Gradients,
    HostMemory,
    Precision,
    Support,
    World,
    unsupported,
)
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import ShardingSpec, check_data_parallel, data_parallel_dim
from accelbridge.portable.capture import CapturedPasses, Passes
from accelbridge.portable.collectives import join
from accelbridge.portable.dtensor_cache import forget_meshes
from accelbridge.portable.evaluation import without_training
from accelbridge.portable.replicas import Replicas
from accelbridge.portable.sharded_adamw import local
from accelbridge.portable.tensor_parallel import split_model

AXES = ("dp_replicate", "dp_shard", "tp")
"""Axes of the mesh, outermost first. dp_shard is always there, since FSDP2 always has it; the others only where they
are larger than 1."""

Initialise = Callable[[str, tuple[int, ...], range], Tensor]
Site = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""


@dataclass
class _Realised:
    """A model that is sharded, or whole on every process."""

    modules: list[FSDPModule]
    """Those that FSDP2 shards."""
    replicas: Replicas | None = None
    """What sums the gradients of a model that is whole."""
    mode: tuple[bool, bool, bool] | None = None
    """What the last microbatch was told to do: reduce-scatter, all-reduce, free parameters."""


class EagerExecution(Execution):
    """One process per device; see the module's text for how layouts are realised."""

    model: ClassVar[str] = "eager"

    def __init__(self, device: Device, collectives: Collectives) -> None:
        self._device = device
        self._collectives = collectives
        self._layout = Layout()
        self._mesh: DeviceMesh | None = None
        self._control: dist.ProcessGroup | None = None
        self._realised: dict[int, _Realised] = {}
        self._known_shares: dict[tuple[float, ...], Tensor] = {}

    def devices_per_process(self, devices: int) -> int:
        return 1

    def start(self, store: dist.Store, world: World, layout: Layout, timeout_s: float, check: bool) -> None:
        self.device = join(self._device, self._collectives, store, world, timeout_s, check)
        self._layout = layout
        axes = {axis: getattr(layout, axis) for axis in AXES if axis == "dp_shard" or getattr(layout, axis) > 1}
        self._mesh = init_device_mesh(self._device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        # A group of its own, so that a checkpoint's collectives never meet those of a step.
        self._control = self._collectives.control_group(timeout_s)

    def close(self) -> None:
        self._mesh = self._control = self.gradients = None
        self._realised.clear()
        self._known_shares.clear()
        self._collectives.shutdown()
        forget_meshes()

    # ---- data

    @property
    def data_coordinates(self) -> range:
        here = self._rank("dp_replicate") * self._layout.dp_shard + self._rank("dp_shard")
        return range(here, here + 1)

    def _rank(self, axis: str) -> int:
        """This process's place along an axis."""
        names = self._started.mesh_dim_names or ()
        return self._started.get_local_rank(axis) if axis in names else 0

    @property
    def _started(self) -> DeviceMesh:
        assert self._mesh is not None, "start() comes first"
        return self._mesh

    def place(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    # ---- model

    def realise(
        self,
        model: nn.Module,
        spec: ShardingSpec,
        precision: Precision,
        initialise: Initialise,
        finish: Callable[[str, nn.Module], None] | None = None,
        *,
        host: HostMemory = "",
    ) -> nn.Module:
        _check_dimensions(model)
        check_data_parallel(self._layout, spec, {name: p.shape for name, p in model.named_parameters()})
        on_meta = _wholly_on_meta(model)
        _cast_parameters(model, getattr(torch, precision.params))
        if self._layout.tp > 1:
            split_model(model, spec, self._started["tp"], self._layout.sequence_parallel)
        ties = _ties(model)
        home = torch.device("cpu") if host else self.device
        if not on_meta:
            model.to(home)
            _tie(ties)
        _place_buffers(model, self.device)
        units = _units(model, spec, ties)
        if finish is not None:
            names = {id(module): name for name, module in model.named_modules()}
            for unit in units:
                finish(names[id(unit)], unit)
        model.register_forward_hook(_require_visible_output)  # before FSDP2's own hook, which looks at the same output
        whole = self._stays_whole(precision) and not host
        sharded = _Realised([]) if whole else self._sharded(model, units, precision, host)
        if on_meta:
            # Unlike to_empty(), this leaves buffers, which have values.
            model._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t)
            _tie(ties)
            _fill(model, initialise)
        if whole and self._layout.dp_replicate > 1:
            # Last: hooks stay with the parameters that they were put on.
            sharded.replicas = Replicas(model.parameters(), self._started.get_group("dp_replicate"))
        self._realised[id(model)] = sharded
        return model

    def _stays_whole(self, precision: Precision) -> bool:
        one_dtype = precision.compute == precision.params == precision.reduce
        return self._layout.dp_shard == 1 and self._layout.tp == 1 and one_dtype

    def _sharded(self, model: nn.Module, units: list[nn.Module], precision: Precision, host: HostMemory) -> _Realised:
        options: dict[str, Any] = {
            "mesh": self._started[("dp_replicate", "dp_shard") if self._layout.dp_replicate > 1 else "dp_shard"],
            # None: units are freed after use, the root is not, since the backward pass starts with it.
            "reshard_after_forward": None if self._layout.zero == 3 else False,
            "shard_placement_fn": partial(_dp_placement, degree=self._layout.dp_shard),
            "offload_policy": CPUOffloadPolicy(pin_memory=host == "pinned") if host else OffloadPolicy(),
        }
        for module in reversed(units):
            fully_shard(module, mp_policy=_policy(precision), **options)
        # The root also casts floating-point inputs, which are the batch's; inside, side inputs keep their dtype.
        fully_shard(model, mp_policy=_policy(precision, cast_inputs=True), **options)
        sharded = _Realised(list(_fsdp_modules(model)))
        if self._layout.data_parallel > 1:  # one device sums anyway, and would divide by 1.0 in a pass of its own
            for module in sharded.modules:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return sharded

    def compile(self, unit: nn.Module) -> None:
        # Not unit.compile(), which takes in the hooks: those of FSDP2, added later, communicate and must stay outside.
        unit.forward = torch.compile(unit.forward, fullgraph=True)

    def capture(self, model: nn.Module, passes: Passes) -> Passes:
        if self._layout.size > 1 or self._realised[id(model)].modules:
            raise Unsupported(
                f"asked: capture in layout {self._layout.describe()}; found: sharded parameters, which are gathered or "
                "cast into memory that is freed after use, and a graph needs it to stay; do: set train.capture: false"
            )
        return CapturedPasses(self._device, model.parameters(), passes)

    @contextmanager
    def evaluation(self, model: nn.Module) -> Iterator[None]:
        try:
            with without_training(model):
                yield
        finally:
            for module in self._realised[id(model)].modules:
                module.reshard()  # without a backward pass, nothing else does

    # ---- step

    def microbatch(self, model: nn.Module, index: int, count: int) -> AbstractContextManager[None]:
        last = index == count - 1
        sharded = self._realised[id(model)]
        if sharded.replicas is not None:
            sharded.replicas.sums = last
        if not sharded.modules:
            return _nothing()
        whole = self._layout.zero < 3 or self._layout.dp_shard == 1
        accumulate_whole = self._layout.zero == 1 or self._layout.dp_shard == 1
        mode = (last or not accumulate_whole, last, last or not whole)
        if mode != sharded.mode:
            sharded.mode = mode
            for module in sharded.modules:
                module.set_requires_gradient_sync(mode[0], recurse=False)
                module.set_requires_all_reduce(mode[1], recurse=False)
                module.set_reshard_after_backward(mode[2], recurse=False)
            assert isinstance(model, FSDPModule)
            model.set_is_last_backward(last)
        return _nothing()

    def sum(self, x: Tensor) -> Tensor:
        for axis in ("dp_replicate", "dp_shard"):
            if getattr(self._layout, axis) > 1:
                dist.all_reduce(x, group=self._started.get_group(axis))
        return x

    def largest(self, x: Tensor) -> Tensor:
        if self._layout.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def any(self, flag: bool) -> bool:
        return self.any_of([flag])[0]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        found = torch.tensor(list(map(float, flags)), device=self.device)
        dist.all_reduce(found)
        return [count > 0 for count in found.tolist()]

    def clip_grad_norm(self, model: nn.Module, max_norm: float | None, loss: Tensor | None = None) -> Tensor:
        # The norm is float32, and each element counts once: a copy weighs its share of them.
        parameters = [p for p in model.parameters() if p.grad is not None]
        gradients = [cast(Tensor, p.grad) for p in parameters]
        parts = [local(g) for g in gradients]
        norms = torch.stack(torch._foreach_norm([part.float() for part in parts])).to(self.device)
        total = (norms.square() * self._shares(gradients)).sum()
        lost = torch.zeros_like(total) if loss is None else loss * 0  # NaN where the loss is not finite
        sums = torch.stack([total, lost])
        if self._layout.size > 1:
            dist.all_reduce(sums)
        norm = sums[0].sqrt()
        self.gradients = Gradients(norm, sums[1], parameters, norms)
        if max_norm is not None:
            torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(parts[0].device))
        return norm

    def _shares(self, gradients: list[Tensor]) -> Tensor:
        """What each gradient weighs here; the copies are those of the layout, so the device is told of them once."""
        copies = tuple(self._copies(gradient) for gradient in gradients)
        if copies not in self._known_shares:
            self._known_shares[copies] = torch.tensor([1 / n for n in copies], device=self.device)
        return self._known_shares[copies]

    def _copies(self, gradient: Tensor) -> float:
        """Devices that hold the same elements of ``gradient``."""
        if not isinstance(gradient, DTensor):
            return self._layout.size
        sizes = gradient.device_mesh.shape
        return math.prod(n for n, p in zip(sizes, gradient.placements, strict=True) if p.is_replicate())

    def scalar(self, value: float) -> float:
        return value

    def end_step(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        # Eager devices run as they are called. A captured step reuses its output buffers, hence copies.
        return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in (values or {}).items()}

    # ---- state

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state: dict[str, Any] = {f"model.{name}": _detached(t) for name, t in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"optimizer.{name}.{key}"] = _detached(value)
        return state

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        return None  # state() hands out the live tensors: what was read into them is already in place

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        return self._control

    # ---- ahead of time

    def compile_ahead(self, target: str, step: Callable[[Execution], None], seconds: float = 600.0) -> Support:
        return unsupported(f"eager execution compiles no whole step, so none for {target}")


def _check_dimensions(model: nn.Module) -> None:
    if empty := next((name for name, p in model.named_parameters() if p.numel() == 0), None):
        raise ConfigError(f"a model with parameter {empty}, which has no elements; remove it")
    if scalar := next((name for name, p in model.named_parameters() if p.dim() == 0), None):
        raise ConfigError(
            f"a model with parameter {scalar}, which has no dimension; parameters are sharded along dimension 0; "
            "give it the shape (1,)"
        )
    if strided := next((name for name, p in model.named_parameters() if not p.is_contiguous()), None):
        raise ConfigError(f"a model with parameter {strided}, which is not contiguous; make it so with .contiguous()")


def _place_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring buffers that have values to ``device``, also those of a model that otherwise is on the meta device.

    FSDP2 would do it by ``set_data``, which on the PrivateUse1 key refuses a tensor of another device (torch 2.13).
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Floating-point parameters to ``dtype``; buffers stay as the model made them."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _units(model: nn.Module, spec: ShardingSpec, ties: list[list[Site]]) -> list[nn.Module]:
    """The shard units, outermost first. Units that share a parameter with another part of the model are left to
    the root: a unit of its own would silently get a copy."""
    names = {name for name, _ in model.named_modules() if name and spec.is_unit(name)}
    owner_names = {id(module): name for name, module in model.named_modules()}
    for group in ties:
        owners = {_innermost(owner_names[id(module)], names) for module, _ in group}
        while len(owners) > 1:
            names -= owners
            owners = {_innermost(owner_names[id(module)], names) for module, _ in group}
    return [module for name, module in model.named_modules() if name in names]


def _innermost(module: str, units: set[str]) -> str:
    """The unit in which ``module`` lies; "" is the root."""
    return max((u for u in units if module == u or module.startswith(f"{u}.")), key=len, default="")


def _require_visible_output(module: nn.Module, _: Any, output: Any) -> None:
    """FSDP2 hooks the tensors that it finds in the root's output: without any, the root would never get gradients."""
    if not torch.is_grad_enabled() or any(isinstance(x, Tensor) for x in _leaves(output)):
        return
    raise ConfigError(
        f"{type(module).__name__} returned a {type(output).__name__} in which no tensor can be found; return a tensor, "
        "or a tuple, dict or dataclass of tensors"
    )


def _leaves(output: Any) -> list[Any]:
    if is_dataclass(output) and not isinstance(output, type):
        return [leaf for field in fields(output) for leaf in tree_leaves(getattr(output, field.name))]
    return tree_leaves(output)


def _dp_placement(parameter: nn.Parameter, degree: int) -> Shard | None:
    """Which dimension data parallel splits, see :func:`data_parallel_dim`."""
    if not isinstance(parameter, DTensor) or not parameter.placements[0].is_shard(0):
        return None  # dimension 0, whatever its length
    dim = data_parallel_dim(parameter.to_local().shape, degree)
    assert dim is not None, "realise() checked it"
    return Shard(dim)


def _policy(precision: Precision, cast_inputs: bool = False) -> MixedPrecisionPolicy:
    compute, params = getattr(torch, precision.compute), getattr(torch, precision.params)
    return MixedPrecisionPolicy(
        param_dtype=None if compute == params else compute,
        reduce_dtype=getattr(torch, precision.reduce),
        cast_forward_inputs=cast_inputs,
    )


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


# ---- models on the meta device


def _wholly_on_meta(model: nn.Module) -> bool:
    """True or False; a mixture has no rule and raises ConfigError."""
    parameters = dict(model.named_parameters())
    meta = [name for name, p in parameters.items() if p.is_meta]
    if buffers := [name for name, b in model.named_buffers() if b.is_meta]:
        raise ConfigError(
            f"a model with buffer {buffers[0]} on the meta device; buffers have no rule to be filled; "
            "build the model on the CPU, or compute the buffer in forward"
        )
    if meta and len(meta) < len(parameters):
        real = next(name for name in parameters if name not in meta)
        raise ConfigError(
            f"a model with {meta[0]} on the meta device and {real} materialised; build it wholly on one of the two"
        )
    return bool(meta)


def _ties(model: nn.Module) -> list[list[Site]]:
    """Groups of (module, attribute) that share one parameter; ``to_empty``, and ``to`` on some devices, silently
    untie them."""
    sites: dict[int, list[Site]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            sites.setdefault(id(parameter), []).append((module, name))
    return [group for group in sites.values() if len(group) > 1]


def _tie(groups: list[list[Site]]) -> None:
    for (owner, name), *others in groups:
        for module, attribute in others:
            module.register_parameter(attribute, owner._parameters[name])


def _fill(model: nn.Module, initialise: Initialise) -> None:
    """Write each parameter's local part, which is a box of the full parameter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape, offset = _box(parameter)
            values = initialise(name, tuple(parameter.shape), range(offset[0], offset[0] + shape[0]))
            for dim, (first, length) in enumerate(zip(offset[1:], shape[1:], strict=True), start=1):
                values = values.narrow(dim, first, length)
            local(parameter).copy_(values)


def _box(parameter: nn.Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of this process's part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.dim()
    return compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
