"""Sharded weights that travel as fp8: half the bytes of bfloat16 on the wire, and in memory once gathered.

FSDP2 asks the local part of a parameter for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (torch 2.9 to 2.13,
``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``). They are put on that very tensor, so that optimizers, norms and
checkpoints go on to see a plain one; a subclass would have to serve them all, and would be pickled into checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accelbridge.backend import Format, Matmul
from accelbridge.precision.quantized import QuantizedTensor
from accelbridge.precision.scalings import WHOLE

_KEEPS = {torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.as_strided.default}
"""What autograd and FSDP2 do to a gathered parameter, and no arithmetic."""


class GatheredWeight(Tensor):
    """A weight that is there as codes alone; to autograd a tensor of ``dtype``, whose gradient has that dtype."""

    quantized: QuantizedTensor

    @staticmethod
    def __new__(cls, quantized: QuantizedTensor, dtype: torch.dtype) -> GatheredWeight:
        made = Tensor._make_wrapper_subclass(cls, quantized.shape, dtype=dtype, device=quantized.payload.device)
        made.quantized = quantized
        return made

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"GatheredWeight({tuple(self.shape)}, {self.quantized.format.name})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = args[0]
        if func in _KEEPS and (func is torch.ops.aten.detach.default or tuple(args[1]) == tuple(x.shape)):
            return GatheredWeight(x.quantized, x.dtype)
        raise NotImplementedError(
            f"{func} of a weight that was gathered as fp8; only fp8_linear reads it; set precision.fp8.gather: false, "
            "or exclude the layer"
        )


def sharded_parameters(model: nn.Module) -> dict[int, Any]:
    """FSDP2's own record of each parameter of ``model``, by the parameter's id; none where it is not sharded.

    FSDP2 may replace the tensors in which parameters lie until it has run once or, as here, was told to get ready.
    """
    if not isinstance(model, FSDPModule):
        return {}
    model._get_fsdp_state()._lazy_init()
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    # One group a module, until torch 2.9; a list of them later.
    groups = [g for s in states for g in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group] if g]
    return {id(record.sharded_param): record for group in groups for record in group.fsdp_params}


def gather_as_fp8(record: Any, matmul: Matmul, format: Format, scaling: str, scale: Tensor) -> None:
    """Let FSDP2 gather a parameter, of which ``record`` is its record, as codes made with ``scale``, float32 [1, 1],
    which is read anew each time."""
    parameter = record.sharded_param
    assert isinstance(parameter, DTensor)
    local = parameter._local_tensor

    def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], Any]:
        shard = local.detach()
        rows = record.padded_sharded_param_size[0] - shard.shape[0]  # 0 where it is split along another dimension
        codes = matmul.quantize(shard, format, scaling, scale).codes(format.name)
        return (nn.functional.pad(codes, (0, 0, 0, rows)),), tuple(size)

    def after(outputs: tuple[Tensor, ...], size: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        (gathered,) = outputs
        codes = gathered.view(-1, size[1])[: size[0]]
        if out is not None:
            return None  # it holds a view of the same memory, which is filled again
        weight = GatheredWeight(QuantizedTensor.of_codes(codes, scale, format, (WHOLE, WHOLE)), dtype)
        return weight, (gathered,)

    hooks: dict[str, Callable[..., Any]] = {"fsdp_pre_all_gather": before, "fsdp_post_all_gather": after}
    for name, hook in hooks.items():
        setattr(local, name, hook)
    record._init_extensions()  # where it looks for them
