"""Attention, forward and backward, for heads of 64, 128 and 256, and one that is padded; in bfloat16 and float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accelbridge.kernels.flash_candidate import BLOCKS_D, KERNELS, tile_name, variant
from tests.kernels.aot import TARGETS, Case, tiles_of

FORWARD, BACKWARD, COMMON = (f"accelbridge.kernels.flash_{name}" for name in ("forward", "backward", "common"))
WRITTEN = {"flash_forward": ("out",), "flash_backward_dq": ("dq",), "flash_backward_dkdv": ("dk", "dv")}
MASKS: Mapping[str, Mapping[str, bool]] = {
    "causal": {"CAUSAL": True, "WINDOW": False, "SEGMENTS": False, "SOFTCAP": False},
    "documents, window": {"CAUSAL": True, "WINDOW": True, "SEGMENTS": True, "SOFTCAP": False},
    "softcap": {"CAUSAL": True, "WINDOW": False, "SEGMENTS": True, "SOFTCAP": True},
}
"""Constants of the kernels by what they say."""


def cases(target: str) -> Iterator[Case]:
    for dim in BLOCKS_D:
        for kernel in KERNELS:
            for label in MASKS:
                yield _case(target, kernel, dim, "bfloat16", label)
            yield _case(target, kernel, dim, "float32", "causal")
    for kernel in KERNELS:
        yield _case(target, kernel, 80, "bfloat16", "causal", "heads of 80")
    delta = {"out_ptr": "*bf16", "dout_ptr": "*bf16", **dict.fromkeys(("lse_ptr", "dlse_ptr"), "*fp32"),
             **dict.fromkeys(("delta_ptr", "exponent_ptr"), "*fp32"), **_strides("out", "dout"),
             **dict.fromkeys(("heads", "queries", "rows"), "i32")}  # fmt: skip
    for dim in BLOCKS_D:
        constants = {"HEAD_DIM": dim, "BLOCK_D": dim, "DLSE": True}
        yield Case("flash_delta", f"{BACKWARD}:flash_delta", delta, constants, f"heads of {dim}")
    ids = {"segments_ptr": "*i32", "spans_ptr": "*i32", "length": "i32"}
    yield Case("document_spans", f"{COMMON}:document_spans", ids, {"BLOCK": 128})


def _case(target: str, kernel: str, dim: int, dtype: str, mask: str, more: str = "") -> Case:
    flags, element = MASKS[mask], {"bfloat16": "*bf16", "float32": "*fp32"}[dtype]
    read = ("q", "k", "v") if kernel == "flash_forward" else ("q", "k", "v", "dout")
    rows = ("lse_ptr",) if kernel == "flash_forward" else ("exponent_ptr", "delta_ptr")
    tensors = (*read, *WRITTEN[kernel])
    counts = ("heads", "groups", "queries", "keys", *(() if kernel == "flash_forward" else ("rows",)), "window")
    types = {
        **{f"{name}_ptr": element for name in tensors},
        **dict.fromkeys(rows, "*fp32"),
        **_strides(*tensors),
        **dict.fromkeys(counts, "i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
        "segments_ptr": "*i32",
        "spans_ptr": "*i32",
    }
    absent = {} if flags["SEGMENTS"] else {"segments_ptr": None, "spans_ptr": None}
    block = next(block for block in BLOCKS_D if dim <= block)
    constants = {**flags, **absent, "HEAD_DIM": dim, "BLOCK_D": block}
    module = FORWARD if kernel == "flash_forward" else BACKWARD
    shipped, masked = tiles_of(TARGETS[target])[0], flags["WINDOW"] or flags["SEGMENTS"]
    name = tile_name(kernel, variant(dim, dtype), masked, flags["SOFTCAP"], shipped)
    by = {"bfloat16": "bf16", "float32": "fp32" if TARGETS[target].backend == "hip" else ""}[dtype]
    label = f"{mask}, {more}" if more else mask
    sampled = kernel == "flash_backward_dkdv" and dim == 128 and label == "documents, window"
    return Case(name, f"{module}:{kernel}", types, constants, label, by, sampled)


def _strides(*tensors: str) -> dict[str, str]:
    return {f"{name}_stride_{dim}": "i32:16" for name in tensors for dim in "bhs"}
