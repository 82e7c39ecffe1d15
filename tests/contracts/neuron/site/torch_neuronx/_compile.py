"""The compiler of the double: whole graphs of static shapes, counted."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import register_backend

from tests.contracts import violate

metrics = {"compiles": 0}


@register_backend(name="neuron")
def neuron(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """What torch.compile(backend="neuron") calls. A symbolic size is an error (EMOD025)."""
    for value in inputs:
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, torch.SymInt) for size in sizes):
            raise violate("NEURON-CMP-001", f"EMOD025: Dynamic shape is not supported: an input has {list(sizes)}")
    metrics["compiles"] += 1
    return graph.forward
