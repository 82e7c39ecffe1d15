"""Tensor parallelism of the eager execution model: DTensor parameters, local arithmetic.

Every parameter becomes a DTensor on the mesh of tp, so that sharding over data parallel, norms, checkpoints and
optimizers know how it lies. Modules compute on plain local tensors: while its parameters are gathered, a module
reads their local part, and activations change their placement at module boundaries alone. So a vendor's kernel
never meets a DTensor, and an op never runs with another meaning because of one.

    boundary            forward                          backward
    enter, column       hidden -> whole sequence         gradients summed to hidden
    row, embedding      partial sums -> hidden           hidden -> whole sequence
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from accelbridge.errors import ConfigError
from accelbridge.models.dropout import Dropout
from accelbridge.parallel.spec import ShardingSpec, split_dim
from accelbridge.parallel.styles import module_styles

SEQUENCE_DIM = 1
"""Of the residual stream [B, S, ...]."""


def split_model(model: nn.Module, spec: ShardingSpec, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split ``model`` in place over the 1-d ``mesh`` as ``spec.tensor_parallel`` says.

    Materialised parameters keep this device's part of their values. Raises ConfigError, before anything is
    changed, for a module that cannot be split so.
    """
    styles = module_styles(model, spec, mesh.size(), sequence_parallel)
    boundary = _Boundary(mesh, sequence_parallel)
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, module in model.named_modules():
        if style := styles.get(name):
            _distribute(module, style, mesh, made)
            entered = any(styles.get(parent) == "enter" for parent in _parents(name))
            namespace = _readers(module, style, boundary)
            namespace |= _forward(module, "entered" if entered and style == "column" else style, boundary)
            _become(module, namespace)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


# ------------------------------------------------------------------------------------------------ parameters


def _distribute(
    module: nn.Module, style: str, mesh: DeviceMesh, made: dict[int, tuple[nn.Parameter, nn.Parameter]]
) -> None:
    """Make the module's parameters DTensors, each once, also where modules share it.

    ``made`` maps the id of an original to it and what it became; holding it keeps its id from being reused.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        if id(parameter) not in made:
            dim = split_dim(style, name)
            local = parameter.detach()
            if dim is not None:
                local = local.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
            placement: Placement = Replicate() if dim is None else Shard(dim)
            distributed = DTensor.from_local(local, mesh, [placement], run_check=False)
            made[id(parameter)] = parameter, nn.Parameter(distributed, parameter.requires_grad)
        module.register_parameter(name, made[id(parameter)][1])


def _readers(module: nn.Module, style: str, boundary: _Boundary) -> dict[str, Any]:
    """A property per parameter that reads its local part, with how the gradient of that part is to be understood:
    whole, or this device's share of a sum."""
    shared = style == "heads" or (style in ("hidden", "row") and boundary.sequence_parallel)
    readers: dict[str, Any] = {}
    for name, parameter in module.named_parameters(recurse=False):
        assert isinstance(parameter, DTensor)
        split = parameter.placements[0].is_shard()
        readers[name] = property(_reader(name, [Partial()] if shared and not split else None))
    return readers


def _reader(name: str, gradient: list[Placement] | None) -> Callable[[nn.Module], Any]:
    def read(module: nn.Module) -> Any:
        parameter = module._parameters[name]
        # Gathered for a forward pass, it lies on tp alone; sharded over data parallel it stays what it is.
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1:
            return parameter.to_local(grad_placements=gradient)
        return parameter

    return read


def _become(module: nn.Module, namespace: dict[str, Any]) -> None:
    """Give ``module`` a class of its own with ``namespace``, as torch's own parametrisation and FSDP2 do it: names
    of modules and parameters, and the state dict, stay."""
    kind = type(module)
    if namespace:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        module.__class__ = type(kind.__name__, (kind,), {**names, **namespace})


# ----------------------------------------------------------------------------------------------- activations


class _Boundary:
    """What activations become between the residual stream and the regions that are split."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        self.mesh = mesh
        self.sequence_parallel = sequence_parallel
        self._hidden: Placement = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()

    def gather(self, x: Tensor) -> Tensor:
        """Hidden -> whole; the gradients of all devices are summed back to hidden."""
        given = DTensor.from_local(x, self.mesh, [self._hidden], run_check=False)
        return given.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def reduce(self, x: Tensor) -> Tensor:
        """Partial sums of all devices -> hidden."""
        if self.sequence_parallel and x.dim() < 3:
            raise ConfigError(
                f"parallel.sequence_parallel asked; a module that leaves the residual stream [B, S, ...] left "
                f"{tuple(x.shape)}, without a batch or a sequence to split; give it that shape, or set "
                "parallel.sequence_parallel: false"
            )
        if self.sequence_parallel and x.shape[SEQUENCE_DIM] % self.mesh.size():
            raise ConfigError(
                f"parallel.sequence_parallel asked; a sequence of {x.shape[SEQUENCE_DIM]} tokens is not a multiple of "
                f"tp {self.mesh.size()}; pad it, or set parallel.sequence_parallel: false"
            )
        given = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return given.redistribute(placements=[self._hidden]).to_local()

    def gather_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """:meth:`gather` of the first tensor among the arguments."""
        if args:
            return (self.gather(args[0]), *args[1:]), kwargs
        first = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, first: self.gather(kwargs[first])}


def _forward(module: nn.Module, style: str, boundary: _Boundary) -> dict[str, Any]:
    """The forward of the module's new class (and, for "row", a bias that it does not see)."""
    make = _FORWARDS.get(style)
    return make(module, type(module).forward, boundary) if make else {}


def _gathering(_: nn.Module, inner: Callable[..., Any], boundary: _Boundary) -> dict[str, Any]:
    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = boundary.gather_first(args, kwargs)
        return inner(self, *args, **kwargs)

    return {"forward": forward}


def _row(module: nn.Module, inner: Callable[..., Any], boundary: _Boundary) -> dict[str, Any]:
    # Every device would add the bias to its partial sum, so the module sees none and it is added afterwards.
    biased = module._parameters.get("bias") is not None
    read_bias = _reader("bias", [Partial()] if boundary.sequence_parallel else None)

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        y = boundary.reduce(inner(self, *args, **kwargs))
        return y + read_bias(self) if biased else y

    return {"forward": forward, **({"bias": property(lambda self: _hide(self))} if biased else {})}


def _hide(module: nn.Module) -> Any:
    """None while a forward pass may read the bias, else the parameter itself, for those who handle parameters."""
    bias = module._parameters["bias"]
    return None if isinstance(bias, DTensor) and bias.device_mesh.ndim == 1 else bias


def _vocab_head(module: nn.Module, inner: Callable[..., Any], boundary: _Boundary) -> dict[str, Any]:
    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> DTensor:
        args, kwargs = boundary.gather_first(args, kwargs)
        return DTensor.from_local(inner(self, *args, **kwargs), boundary.mesh, [Shard(-1)], run_check=False)

    whole_loss = getattr(type(module), "loss", None)  # of accelbridge.models.decoder.ToLoss
    if whole_loss is None:
        return {"forward": forward}

    def loss(self: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
        return whole_loss(self, boundary.gather(x), targets, boundary.mesh.get_group())

    return {"forward": forward, "loss": loss}


def _vocab_embedding(module: nn.Module, inner: Callable[..., Any], boundary: _Boundary) -> dict[str, Any]:
    weight = module._parameters["weight"]
    assert isinstance(weight, DTensor)
    vocabulary = weight.shape[0]
    rows = vocabulary // boundary.mesh.size()
    first = boundary.mesh.get_local_rank() * rows
    padding = getattr(module, "padding_idx", None)
    if padding is not None:  # the row whose gradient is zero
        vars(module)["padding_idx"] = padding - first if first <= padding < first + rows else None

    @wraps(inner)
    def forward(self: nn.Module, tokens: Tensor) -> Tensor:
        # Look up what this device holds, and nothing for other tokens: the sum over devices has them all. What no
        # device holds fails here as it would on one device.
        local = tokens - first
        elsewhere = ((tokens >= 0) & (local < 0)) | ((local >= rows) & (tokens < vocabulary))
        found = inner(self, local.masked_fill(elsewhere, 0))
        return boundary.reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0))

    return {"forward": forward}


def _hidden(module: nn.Module, inner: Callable[..., Any], boundary: _Boundary) -> dict[str, Any]:
    if not (boundary.sequence_parallel and isinstance(module, Dropout)):
        return {}

    @wraps(inner)
    def forward(self: Dropout, x: Tensor) -> Tensor:
        # Its masks are those of the whole sequence, of which x is one share.
        length = x.shape[SEQUENCE_DIM]
        self.place(SEQUENCE_DIM, boundary.mesh.get_local_rank() * length, boundary.mesh.size() * length)
        return inner(self, x)

    return {"forward": forward}


_FORWARDS: dict[str, Callable[[nn.Module, Callable[..., Any], _Boundary], dict[str, Any]]] = {
    "enter": _gathering,
    "hidden": _hidden,
    "column": _gathering,
    "row": _row,
    "vocab_embedding": _vocab_embedding,
    "vocab_head": _vocab_head,
}
