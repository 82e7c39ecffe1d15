"""Facts of the XLA backend: what is probed, what is claimed, and what is refused with its reason."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

from accelbridge.backend import (
    FULL,
    Backend,
    Capabilities,
    Collectives,
    Device,
    DeviceInfo,
    Execution,
    Implementation,
    Probe,
    Request,
    Support,
    unsupported,
)
from accelbridge_xla import hardware, runtimes
from accelbridge_xla.ahead.targets import WORD, parse
from accelbridge_xla.runtimes import version_of

OPS = ("linear", "attention", "embedding", "rms_norm", "rope", "swiglu", "dropout", "cross_entropy", "adamw")
MOVES = ("all_gather", "broadcast", "all_to_all")
REDUCTIONS = ("all_reduce", "reduce_scatter")

_FACTS = {"move.zero_sign": "lost", "rng.stream": "by_graph", "reduce.precision.bfloat16": "bfloat16"}
"""On any chip: the partitioner sends a row as a sum with zeros, a graph draws from a seed of its own, and sums over
bfloat16 are bfloat16 (torch_xla 2.9.0)."""
_FLUSHED = {"ftz.float32": "flushed"}
"""Of XLA's CPU client, where it was measured."""
_DROPOUT = "torch_xla 2.9.0 promotes int32 to 64 bits where a Python number is an operand, so products do not wrap"
_NARROW = "XLA adds up the gradient of a bias in bfloat16 (torch_xla 2.9.0 on its CPU client: 8% off for 48 rows)"
_WIDE = "parameters stay float32 here, and only this backend's own op rounds them"
_AVERAGE = Support("emulated", "XLA reduces sums, and the program divides")
_SPLIT_LOSS = Support("emulated", "cross_entropy, of logits that the partitioner splits over the vocabulary")
_COMPILER_PLACES = "the compiler decides where tensors lie; torch_xla 2.9.0 places them on the host on TPUs only"
_FLOAT16 = "TPUs have no float16 arithmetic"
_FLOAT8 = "fp8 products are not built yet"


class XlaBackend(Backend):
    """PyTorch/XLA: lazy tensors, the GSPMD partitioner, PJRT. TorchTPU is a class of its own (``eager/backend.py``)."""

    name: ClassVar[str] = "xla"
    api_version: ClassVar[tuple[int, int]] = (1, 0)
    device_type: ClassVar[str] = "xla"
    process_group: ClassVar[str] = "none"
    """One process per host, and one host: no torch.distributed group exists."""
    accelerator: ClassVar[bool] = True
    targets: ClassVar[tuple[str, ...]] = (WORD,)
    chips = {each.name.removeprefix("TPU ").lower(): each.name for each in hardware.GENERATIONS.values()}

    versions: ClassVar[tuple[str, ...]] = ("torch", "torch_xla", "libtpu")

    @classmethod
    def probe(cls) -> Probe:
        software = {name: found for name in cls.versions if (found := version_of(name))}
        facts = {"host": platform.node(), "python": platform.python_version(), "runtime": runtimes.SPMD}
        if reason := runtimes.refusal():
            return Probe(False, reason, software=software, facts=facts)
        found = hardware.find()
        if not found.count:
            return Probe(False, found.reason, software=software, facts=facts)
        if found.chip != hardware.VIRTUAL and "libtpu" not in software:
            reason = f"{found.reason}, but libtpu is not installed; install torch_xla[tpu]"
            return Probe(False, reason, software=software, facts=facts)
        devices = tuple(DeviceInfo(index, found.chip) for index in range(found.count))
        return Probe(True, found.reason, devices, software, facts)

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        return Capabilities(
            chip=hardware.chip(chip),
            table=_table(),
            layout_axes=("dp_replicate", "dp_shard", "tp"),
            recompute=unsupported("XLA merges what is computed twice with the first time, so that nothing is saved"),
            host_activations=unsupported(_COMPILER_PLACES),
            host_parameters=unsupported(_COMPILER_PLACES),
            generators=unsupported("torch_xla has one stream of random numbers, and no torch.Generator of its device"),
            several_processes=unsupported(hardware.ONE_PROCESS),
            pinned_host_memory=unsupported("torch_xla copies from pageable memory"),
            wrong_references={"dropout": _DROPOUT, "linear bfloat16": _NARROW, "embedding bfloat16": _WIDE},
            facts=_FACTS | (_FLUSHED if chip == hardware.VIRTUAL else {}),
            subnormals={"float32": "flushed", "bfloat16": "flushed"} if chip == hardware.VIRTUAL else {},
        )

    @classmethod
    def absent(cls, chip: str, topology: str) -> Probe:
        target, count = parse(chip, topology)
        software = {name: found for name in ("torch", "torch_xla") if (found := version_of(name))}
        devices = tuple(DeviceInfo(index, target.chip, target.memory_bytes) for index in range(count))
        return Probe(True, f"assumed: {count} x {target.chip}, {topology}", devices, software)

    @cached_property
    def device(self) -> Device:
        from accelbridge_xla.device import XlaDevice

        return XlaDevice()

    @cached_property
    def collectives(self) -> Collectives:
        from accelbridge_xla.collectives import XlaCollectives

        return XlaCollectives()

    @cached_property
    def execution(self) -> Execution:
        from accelbridge_xla.execution import XlaExecution

        return XlaExecution(self.device)

    def implementations(self) -> Sequence[Implementation]:
        adamw = Implementation("adamw", "on_device", _adamw_supports, lambda: self.execution.adamw)  # type: ignore
        dropout = Implementation("dropout", "int32", lambda _: FULL, _load_dropout)
        wide = [
            Implementation(op, "float32_gradients", _in_bfloat16, partial(_load_bfloat16, op))
            for op in ("linear", "embedding")
        ]
        return (*super().implementations(), adamw, dropout, *wide)


def _load_dropout() -> Callable[..., Any]:
    from accelbridge_xla.dropout import int32_dropout

    return int32_dropout


def _in_bfloat16(request: Request) -> Support:
    return FULL if request.dtype == "bfloat16" else unsupported(f"is for compute in bfloat16, not in {request.dtype}")


def _load_bfloat16(op: str) -> Callable[..., Any]:
    from accelbridge_xla import bfloat16

    return getattr(bfloat16, op)


def _adamw_supports(request: Request) -> Support:
    if request.dtype != "float32":
        return unsupported(f"updates float32 parameters, not {request.dtype}")
    return FULL


def _table() -> dict[tuple[str, str, str], Support]:
    """Ops x dtype x variant. Collectives are those that the partitioner puts into the program."""
    table: dict[tuple[str, str, str], Support] = {}
    for dtype in ("float32", "bfloat16"):
        table |= {(op, dtype, ""): FULL for op in (*OPS, *MOVES)}
        table |= {(op, dtype, kind): FULL for op in REDUCTIONS for kind in ("sum", "min", "max")}
        table |= {(op, dtype, "avg"): _AVERAGE for op in REDUCTIONS}
        table |= {("reduce", dtype, "sum"): FULL, ("vocab_parallel_cross_entropy", dtype, ""): _SPLIT_LOSS}
    table["adamw", "bfloat16", ""] = unsupported("parameters stay float32")
    for op in OPS:
        table[op, "float16", ""] = unsupported(_FLOAT16)
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        table["scaled_mm", dtype, ""] = unsupported(_FLOAT8)
    return table
