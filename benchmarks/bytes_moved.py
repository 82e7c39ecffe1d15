"""How many bytes the ops of a layer move, by who makes their kernels: torch op by op, torch.compile, or ours.

    .venv/bin/python benchmarks/bytes_moved.py --out benchmarks/results

No time is measured, and nothing runs on an accelerator. What torch moves op by op is counted as every kernel's inputs
and outputs, views left out. What torch.compile moves is Inductor's own count of the kernels that it schedules,
forward and backward: here for the CPU, by the same rules as for GPUs but that reductions in two directions, such as
those of a norm's backward pass, meet in one kernel on GPUs alone. Ours are the floors that the kernels' docstrings
state. Memory-bound kernels of equal quality take times in proportion.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from arms import head, row, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelbridge import ops

ROWS, DIM, HEADS, VOCABULARY = 2048, 1024, 8, 4096
"""Large enough that rows, angles and weights hardly count."""
BYTES = 2
"""Of an element of bfloat16."""


class Moved(TorchDispatchMode):
    """Bytes that kernels read and write, op by op."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        view = any(
            result.alias_info is not None and not result.alias_info.is_write for result in function._schema.returns
        )
        if not view and "empty" not in function._schema.name:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)]
            self.bytes += sum(t.untyped_storage().nbytes() if 0 in t.stride() else t.nbytes for t in tensors)
        return made


def eager(call: Callable[..., Tensor], args: list[Any]) -> int:
    with Moved() as moved:
        y = call(*args)
    grad = torch.ones_like(y)
    with moved:
        torch.autograd.backward(y, grad)
    return moved.bytes


def compiled(call: Callable[..., Tensor], args: list[Any]) -> int:
    """By Inductor's own count."""
    from torch._inductor import compile_fx, metrics

    compile_fx.inductor_metrics_log.setLevel(logging.INFO)
    compile_fx.inductor_metrics_log.propagate = False
    torch._dynamo.reset()
    metrics.reset()
    options: dict[str, Any] = {"force_pointwise_cat": True}  # as it does for GPUs
    y = torch.compile(call, fullgraph=True, dynamic=False, options=options)(*args)
    y.backward(torch.ones_like(y))
    return metrics.num_bytes_accessed


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16().requires_grad_()


def cases() -> dict[str, tuple[Callable[[], list[Any]], int, int]]:
    """By op: arguments, elements, and the bytes that our kernels move, forward and backward."""
    wide, large, head = ROWS * DIM, ROWS * VOCABULARY, DIM // HEADS
    angles = ops.rope_table(torch.arange(ROWS), head)
    targets = torch.randint(0, VOCABULARY, (ROWS,))
    return {
        "rms_norm": (lambda: [leaf(ROWS, DIM), leaf(DIM), 1e-5], wide, (2 + 3) * BYTES * wide),
        "rope": (lambda: [leaf(1, ROWS, HEADS, head), *angles], wide, (2 + 2) * BYTES * wide + 2 * 4 * ROWS * head),
        "swiglu": (lambda: [leaf(ROWS, DIM), leaf(ROWS, DIM)], wide, (3 + 5) * BYTES * wide),
        "cross_entropy": (lambda: [leaf(ROWS, VOCABULARY), targets], large, (1 + 2) * BYTES * large),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    lines = [head("op", "torch, op by op", "torch.compile", "ours")]
    for op, (make, elements, ours) in cases().items():
        reference = ops.reference(op)
        moved = eager(reference, make()), compiled(reference, make()), ours
        found[op] = dict(zip(("eager", "compiled", "ours"), (size / elements for size in moved), strict=True))
        lines.append(row(op, *(f"{size:.1f}" for size in found[op].values())))
        print(lines[-1], flush=True)
    if asked.out is not None:
        title = (
            "Bytes moved per element, forward and backward, in bfloat16. No time was measured, and no accelerator used."
        )
        facts = {"torch": torch.__version__, "date": date.today()}
        write(asked.out, f"bytes-moved-{date.today()}", {"bytes": found}, title, "\n".join(lines), facts)


if __name__ == "__main__":
    main()
