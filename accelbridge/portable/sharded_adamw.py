"""AdamW on sharded parameters: the update of a shard needs nothing but the shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class ShardedAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` whose kernels get the local parts of distributed tensors.

    AdamW works element by element, so the result is the same bits, without the host time of dispatching every
    kernel through DTensor. State is held as AdamW holds it, with the sharding of its parameter.
    """

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Where AdamW collects the tensors of one group: parameters, gradients, moments, counts."""
        result = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return result


def local(tensor: Tensor) -> Tensor:
    """This process's part of a distributed tensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
