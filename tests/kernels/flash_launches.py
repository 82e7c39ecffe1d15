"""python -m tests.kernels.flash_launches CHIP: attention is called as a model calls it, and every launch is compiled
for CHIP, which is not here, instead of run: what the launchers hand over is what the compiler is asked for."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from accelbridge.backend import Mask
from accelbridge.kernels import tiles
from tests.kernels.aot import TARGETS, Target, tiles_of


class Driver:
    """What triton asks of a driver before it compiles."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(target.backend, target.arch, target.warp)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_only(target: Target) -> None:
    """Of all launches in this process."""
    from triton.runtime import driver, jit

    driver.set_active(Driver(target))  # pyright: ignore[reportArgumentType]
    stock = jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = stock(self, *args, grid=grid, warmup=True, **kwargs)
        print(self.fn.__name__, grid)
        return compiled

    jit.JITFunction.run = run  # pyright: ignore[reportAttributeAccessIssue]


def call(mask: Mask, queries: int, keys: int, dtype: torch.dtype, dim: int = 64, heads: int = 2, odd: bool = False,
         softcap: float | None = None) -> None:  # fmt: skip
    """Forward and backward, of rows that begin anywhere if ``odd``."""
    from accelbridge.kernels import flash

    def made(length: int, own: int) -> Tensor:
        x = torch.zeros(1, length, own, dim + 4 if odd else dim, dtype=dtype).transpose(1, 2)
        return (x[..., 1:-3] if odd else x).requires_grad_()

    q, k, v = made(queries, heads), made(keys, 1), made(keys, 1)
    out, lse = flash.attention(q, k, v, mask, softcap=softcap, return_lse=True)
    torch.autograd.grad((out, lse), (q, k, v), (torch.zeros_like(out), torch.zeros_like(lse)))


def main(chip: str) -> None:
    compile_only(TARGETS[chip])
    tiles.bind(tiles_of(TARGETS[chip])[0])
    ids = torch.zeros(1, 40, dtype=torch.int64)
    call(Mask(), 64, 64, torch.bfloat16)
    call(Mask(), 1, 1, torch.bfloat16, heads=1)  # 1 is a constant to the compiler
    call(Mask(window=3, segments_BS=ids), 40, 40, torch.bfloat16, dim=80, softcap=3.0)
    call(Mask(False), 33, 70, torch.float32, odd=True)
    call(Mask(segments_BS=ids[:, :1].int()), 1, 1, torch.float16, heads=1)


if __name__ == "__main__":
    main(sys.argv[1])
