"""torch's flight recorder as entries of our ring, for groups that stay native and therefore never pass ours.

torch keeps the newest collectives of a process where its buffer has a size (``TORCH_FR_BUFFER_SIZE``) and gives them
as a pickle of plain data: ``torch._C._distributed_c10d._dump_fr_trace``, or a function of one vendor's recorder. The
shape read here is that of version 2.10 of the format, as torch 2.13 writes it (seen with gloo, and in
``torch/distributed/flight_recorder/components/types.py``).
"""

from __future__ import annotations

import io
import json
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accelbridge.portable.ring import RING, is_library_file

_OPS = {
    "_all_gather_base": "all_gather_single",
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
}
"""What the recorder calls a call -> what our ring does."""
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
_TENSORS = 4
"""Tensors of a call that are described."""


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and containers, and nothing that would run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the flight recorder's dump names {module}.{name}; it should be plain data")


def read(functions: Sequence[str] = ("_dump_fr_trace",)) -> list[dict[str, Any]]:
    """What this process has recorded, oldest first, shaped like :meth:`accelbridge.portable.ring.Entry.describe`.

    ``functions`` are names in ``torch._C._distributed_c10d``; the first that exists and has entries is taken. Empty
    where this torch records nothing, or its dump is not what is described above.
    """
    import torch

    for name in functions:
        dump = getattr(torch._C._distributed_c10d, name, None)  # pyright: ignore[reportAttributeAccessIssue]
        if dump is None:
            continue
        try:
            found = entries(dump(), time.time_ns())
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError, IndexError):
            continue  # a format of another version; the report is then made without it
        if found:
            return found
    return []


def entries(dump: bytes, now_ns: int) -> list[dict[str, Any]]:
    """The calls in ``dump``; ``now_ns`` is the time of day in nanoseconds. Raises what a malformed dump makes."""
    trace = _Plain(io.BytesIO(dump)).load()
    groups = trace.get("pg_config", {})
    return [_entry(entry, groups, now_ns) for entry in trace["entries"]]


def _entry(entry: Mapping[str, Any], groups: Mapping[str, Any], now_ns: int) -> dict[str, Any]:
    name, label = entry["process_group"]
    op = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    done = entry.get("retired", False) or entry["state"] == "completed"
    p2p = entry.get("is_p2p", False)
    return {
        "group": name,
        "label": label,
        "ranks": _ranks(groups.get(name, {}).get("ranks", "")),
        "number": 0 if p2p else entry["collective_seq_id"],
        "op": _OPS.get(op, op),
        "reduce_op": "",
        "root": None,
        "peer": None,
        "tensors": list(_tensors(entry["input_dtypes"], entry["input_sizes"])),
        "step": RING.step,
        "site": _site(entry.get("frames", ())),
        "age": round(max(0, now_ns - entry["time_created_ns"]) / 1e9, 3),
        "state": "finished" if done else "pending",
        "error": None,
    }


def _ranks(text: str) -> list[int]:
    """``"[0, 1]"`` -> those numbers; empty where torch doesn't say."""
    ranks = json.loads(text) if text else []
    return [int(rank) for rank in ranks]


def _tensors(dtypes: Sequence[str], sizes: Sequence[Sequence[int]]) -> Iterable[str]:
    for dtype, size in list(zip(dtypes, sizes, strict=False))[:_TENSORS]:
        yield f"{_DTYPES.get(dtype, dtype.lower())}{list(size)}"
    if len(sizes) > _TENSORS:
        yield f"... {len(sizes)} in all"


def _site(frames: Iterable[Mapping[str, Any]]) -> str:
    """``file:line`` of the innermost frame that is no library's; they come innermost first."""
    visible = (frame for frame in frames if not is_library_file(frame["filename"]))
    return next((f"{frame['filename']}:{frame['line']}" for frame in visible), "a place that torch did not record")
