"""AdamW for the plan: torch's fused kernel, which a backend offers where its device has one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from accelbridge.backend import FULL, Implementation, Request, Support, unsupported


def _supports(request: Request) -> Support:
    if request.dtype not in ("float32", "bfloat16", "float16", "float64"):
        return unsupported(f"torch's fused AdamW updates floating-point parameters, not {request.dtype}")
    return FULL


def _load() -> Callable[..., object]:
    from accelbridge.portable.sharded_adamw import ShardedAdamW

    return partial(ShardedAdamW, fused=True)


FUSED_ADAMW = Implementation(op="adamw", name="torch_fused", supports=_supports, load=_load)
"""``torch.optim.AdamW(fused=True)`` on local shards. It can mask an update on the device (``found_inf``). Its state is
that of the plain one, so checkpoints move between the two."""
