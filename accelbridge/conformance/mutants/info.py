"""Backends that are not what they say."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelbridge import ops
from accelbridge.backend import FULL, Capabilities, Support, unsupported
from accelbridge.conformance.mutants import Patch, mutant
from accelbridge.cpu import attention
from accelbridge.cpu.backend import CpuBackend
from accelbridge.cpu.device import CpuDevice
from accelbridge.errors import Unsupported
from accelbridge.portable.device import TorchDevice
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.portable.matmul import PortableMatmul
from accelbridge.portable.offload import PortableOffload


def restate(patch: Patch, change: Callable[[Capabilities], Capabilities]) -> None:
    """Let the backend state other capabilities."""
    # A class method is asked for by instances too, which put themselves in front.
    patch(CpuBackend, "capabilities", lambda inner, *args: change(inner(*args[-2:])))


def _cells(patch: Patch, cells: dict[tuple[str, str, str], Support | None]) -> None:
    def change(stated: Capabilities) -> Capabilities:
        table = {**stated.table, **{cell: support for cell, support in cells.items() if support is not None}}
        return replace(stated, table={cell: table[cell] for cell in table if cells.get(cell, FULL) is not None})

    restate(patch, change)


def _in_children(program: str) -> None:
    """Run ``program`` at the start of every new interpreter that this process starts: Python imports the module
    sitecustomize then, from wherever it is found first."""
    folder = tempfile.mkdtemp(prefix="accelbridge-defect-")
    (Path(folder) / "sitecustomize.py").write_text(program)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH", "")])])


@mutant("I1", "claims a product in a dtype that it has none for", {"INF-005": "CAPABILITY"})
def claims_too_much(patch: Patch) -> None:
    _cells(patch, {("linear", "float8_e5m2", ""): FULL})


@mutant("I1b", "claims a reduction that its library refuses", {"INF-005": "CAPABILITY"})
def claims_a_reduction(patch: Patch) -> None:
    _cells(patch, {("all_reduce", "float8_e4m3fn", "sum"): FULL})


@mutant("I2", "denies a reduction that works", {"INF-004": "CAPABILITY", "INF-006": "CAPABILITY"})
def denies_what_works(patch: Patch) -> None:
    _cells(patch, {("all_reduce", "float32", "max"): unsupported("not today")})


@mutant("I2b", "denies a movement that works", {"INF-006": "CAPABILITY", "INF-013": "CAPABILITY"})
def denies_a_movement(patch: Patch) -> None:
    _cells(patch, {("all_to_all", "bfloat16", ""): unsupported("not today")})


@mutant("I3", "a candidate runs the portable reference in its own place", {"INF-008": "FALLBACK"})
def reference_in_its_place(patch: Patch) -> None:
    patch(attention, "_load", lambda inner: ops.reference("attention"))


@mutant("I3c", "the host is chosen where the backend asked for cannot be used", {"INF-012": "FALLBACK"})
def another_is_chosen(patch: Patch) -> None:
    _in_children("""
from accelbridge import plugins
inner = plugins._named
def _named(name, selected_by, candidates):
    try:
        return inner(name, selected_by, candidates)
    except Exception:
        from dataclasses import replace
        from accelbridge.backend import Probe
        from accelbridge.cpu.backend import CpuBackend
        return replace(candidates[0], probe=Probe(True, "instead"), backend=CpuBackend)
plugins._named = _named
""")


@mutant("I4", "tensors lie on another device than the one that was bound", {"INF-003": "PLACE"})
def another_index(patch: Patch) -> None:
    patch(CpuDevice, "bind", lambda inner, self, world: torch.device("cpu", world.local_rank + 1))


@mutant("I5", "results are remembered by shape", {"INF-009": ("BOUND", "EXACT")})
def remembered_by_shape(patch: Patch) -> None:
    known: dict[Any, Tensor] = {}

    def matmul(inner: Any, self: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        key = (a.shape, b.shape, a.dtype, out_dtype)
        if key not in known:
            known[key] = inner(self, a, b, out_dtype)
        return known[key].clone()

    patch(PortableMatmul, "matmul", matmul)


@mutant("I6", "the kernel writes nothing", {"INF-010": ("BOUND", "EXACT")})
def writes_nothing(patch: Patch) -> None:
    def matmul(inner: Any, self: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        # What a caching allocator would hand out: the poison.
        return torch.full_like(inner(self, a, b, out_dtype), torch.nan)

    patch(PortableMatmul, "matmul", matmul)


@mutant("I6b", "a transfer writes nothing", {"INF-010": "EXACT"})
def moves_nothing(patch: Patch) -> None:
    patch(PortableOffload, "_copy", lambda inner, self, x, out: inner(self, out, out))


@mutant("I7", "versions and reasons are empty", {"INF-002": "IDENTITY"})
def nameless(patch: Patch) -> None:
    patch(CpuBackend, "probe", lambda inner, *_: replace(inner(), reason="", software={"torch": ""}))


@mutant("I8", "the hook raises when it is asked in a new process", {"INF-001": "DISCOVERY"})
def hook_raises(patch: Patch) -> None:
    _in_children("""
import accelbridge.cpu
def accelbridge_backend():
    raise OSError("libvendor.so.3: cannot open shared object file")
accelbridge_backend.accelbridge_impl = accelbridge.cpu.accelbridge_backend.accelbridge_impl
accelbridge.cpu.accelbridge_backend = accelbridge_backend
""")


@mutant("I8b", "the module of the entry point loads torch", {"INF-001": "DISCOVERY"})
def loads_torch(patch: Patch) -> None:
    _in_children("""
from accelbridge.cpu import backend
inner = backend._table
def _table():
    import torch
    return inner()
backend._table = _table
""")


@mutant("I9", "what is absent raises a plain RuntimeError", {"INF-006": "ERROR"})
def untyped_refusal(patch: Patch) -> None:
    def scaled_mm(inner: Any, self: Any, *args: Any) -> Any:
        try:
            return inner(self, *args)
        except Unsupported as error:
            raise RuntimeError("STATUS_NOT_SUPPORTED") from error

    patch(EmulatedFp8, "scaled_mm", scaled_mm)


@mutant("I9b", "a missing device raises a plain RuntimeError", {"INF-012": "ERROR"})
def untyped_absence(patch: Patch) -> None:
    _in_children("""
from accelbridge import plugins
inner = plugins._refused
plugins._refused = lambda *args: RuntimeError(str(inner(*args)))
""")


@mutant("I9c", "memory that ran out is not told from other errors", {"MEM-007": "ERROR", "OFF-007": "ERROR"})
def untyped_memory(patch: Patch) -> None:
    patch(TorchDevice, "is_out_of_memory", lambda inner, self, error: False)


@mutant("I10", "a mandatory cell is not stated", {"INF-004": "CAPABILITY"})
def silent_about_a_cell(patch: Patch) -> None:
    _cells(patch, {("rms_norm", "bfloat16", ""): None})


@mutant("M10", "the second instance in a process fails", {"INF-011": "RAISED"})
def once_only(patch: Patch) -> None:
    made: list[Any] = []

    def start(inner: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        made.append(self)
        if len(made) > 1:
            raise RuntimeError("the device is in use by this process")

    patch(CpuBackend, "__init__", start)


@mutant("G4f", "float32 operands are shortened to 11 bits, undeclared", {"INF-007": "PROBE"})
def shortened_operands(patch: Patch) -> None:
    def short(x: Tensor) -> Tensor:
        kept = (x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
        return kept.view(torch.float32) if x.dtype == torch.float32 else x

    def matmul(inner: Any, self: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return inner(self, *((short(x) if x.dtype == torch.float32 else x) for x in (a, b)), out_dtype)

    patch(PortableMatmul, "matmul", matmul)


@mutant("G1f", "bfloat16 products are summed in bfloat16, undeclared", {"INF-007": "PROBE"})
def narrow_sum(patch: Patch) -> None:
    def matmul(inner: Any, self: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if a.dtype != torch.bfloat16:
            return inner(self, a, b, out_dtype)
        out = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
        for k in range(a.shape[1]):
            out = out + a[:, k : k + 1] * b[k : k + 1]
        return out.to(out_dtype or a.dtype)

    patch(PortableMatmul, "matmul", matmul)
