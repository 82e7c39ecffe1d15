"""What the device does to dtypes in silence, said aloud: integers of 64 bits become 32, float64 becomes float32, and
the compiler of Trn2 takes no e4m3fn. A mode to run code under; it looks at every result on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.contracts import violate
from torch_neuronx._runtime import RUNTIME  # pyright: ignore[reportMissingImports]

_INT32 = torch.iinfo(torch.int32)
seen: dict[str, int] = {"results": 0}


def check(op: str, result: Tensor) -> None:
    seen["results"] += 1
    if result.dtype is torch.float8_e4m3fn and RUNTIME.chip != "trn3":
        raise RuntimeError("NCC_EVRF051: Data type F8E4M3FN is not supported on TRN1/TRN2.")
    if result.dtype is torch.float64:
        raise violate("NEURON-TYP-002", f"{op} gives float64 on the device")
    if result.dtype is torch.int64 and result.numel() and "empty" not in op:
        low, high = result.cpu().aminmax()
        if low < _INT32.min or high > _INT32.max:
            raise violate("NEURON-TYP-001", f"{op} gives {int(high if high > _INT32.max else low)} on the device")


class Narrowing(TorchDispatchMode):
    """Use: ``with Narrowing():``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.device.type == "neuron":
                check(str(func), leaf)
        return found
