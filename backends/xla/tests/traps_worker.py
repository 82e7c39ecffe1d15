"""One trap of torch_xla per process, without our guard or with it: what is asked may end the process.

    python traps_worker.py NAME bare|guarded        writes what became of it, as JSON, to standard output

``bare`` is torch_xla as it is, under SPMD on four virtual devices; ``guarded`` what a module does in our execution.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accelbridge.backend import Precision, World
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import ShardingSpec
from accelbridge.precision import formats
from accelbridge_xla.backend import XlaBackend
from accelbridge_xla.vendor import sdk

xm, xs, xr = sdk("core.xla_model"), sdk("distributed.spmd"), sdk("runtime")
place_to_host = sdk("experimental.stablehlo_custom_call").place_to_host

DEVICES = 4
ROWS = torch.arange(8.0).reshape(DEVICES, 2)


class Reduces(nn.Module):
    """Adds up what the devices hold, as one does where a process is a device."""

    def forward(self, x: Tensor) -> Tensor:
        return xm.all_reduce(xm.REDUCE_SUM, x)


class Gathers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return xm.all_gather(x)


class Groups(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a = x.new_ones(16, 16, dtype=torch.bfloat16)
        ends = torch.tensor([8, 16], dtype=torch.int32).to(x.device)
        return torch._grouped_mm(a, a.new_ones(2, 16, 16), offs=ends)


class Leaves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return place_to_host(x)


class Draws(nn.Module):
    """From a stream of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.rand(x.shape, generator=torch.Generator(device=x.device), device=x.device)


class Casts(nn.Module):
    """To 8 bits, of numbers that are too large."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1000.0).to(torch.float8_e4m3fn).float()


MODULES: dict[str, type[nn.Module]] = {
    "all_reduce": Reduces, "all_gather": Gathers, "grouped_mm": Groups, "place_to_host": Leaves, "cast": Casts,
    "generator": Draws,
}  # fmt: skip


def manually(model: nn.Module) -> Tensor:
    """``model`` of the part of each device, as manual sharding gives it."""
    xr.use_spmd()
    mesh = xs.Mesh(np.arange(DEVICES), (DEVICES,), ("devices",))
    x = ROWS.to(sdk().device())
    xs.mark_sharding(x, mesh, ("devices", None))
    part = xs.enable_manual_sharding(x, ("devices", None), mesh=mesh).global_tensor
    out = model(part)
    return xs.disable_manual_sharding(out, ("devices", None), tuple(ROWS.shape), mesh=mesh).global_tensor


def bare(model: nn.Module) -> Tensor:
    if isinstance(model, (Reduces, Gathers)):
        return manually(model)
    xr.use_spmd()
    return model(ROWS.to(sdk().device()))


def guarded(model: nn.Module) -> Tensor:
    execution = XlaBackend().execution
    execution.start(None, World(), Layout(dp_shard=DEVICES), 60.0, False)  # type: ignore[arg-type] (needs no store)
    if isinstance(model, Casts):
        XlaBackend().matmul.quantize(execution.place({"x": ROWS})["x"], formats.FORMATS["float8_e4m3fn"], "tensor")
    model = execution.realise(model, ShardingSpec(), Precision(), _nothing)
    return model(execution.place({"x": ROWS})["x"])


def _nothing(name: str, shape: tuple[int, ...], rows: range) -> Tensor:
    raise AssertionError(f"{name} was not to be there")


def main(name: str, how: Callable[[nn.Module], Tensor]) -> dict[str, Any]:
    try:
        out = how(MODULES[name]())
        return {"values": out.cpu().float().nan_to_num(nan=-1.0).flatten().tolist()}
    except Exception as error:  # the test says which error it must be
        return {"error": type(error).__name__, "text": str(error)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], {"bare": bare, "guarded": guarded}[sys.argv[2]])))
