"""What TorchTPU can do, as data with its sources: a pure function of the chip's name and the software. No torch.

Texts quoted below are those of torch_tpu 0.2.0, csrc/common/glue_2_13_0/libpywrap_2_13_0_common.so. None of it was run
on a TPU; what XLA's CPU client shows of it is in the README.
"""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.backend import FULL, Capabilities, Support, unsupported
from accelbridge.portable.device_cells import MOVES, OPS, Cells
from accelbridge_xla import hardware

FLOATS = ("float32", "bfloat16")
REDUCTIONS = ("all_reduce", "reduce_scatter")
REPLACED = ("torch.compile", "torch.get_float32_matmul_precision", "torch.set_float32_matmul_precision")
"""By torch_tpu/_loader.py, _init_device_impl."""
_FLOAT16 = "TPUs have no float16 arithmetic"
_FLOAT8 = "fp8 products are not built yet"
_PREMUL = "\"'premul_sum' reduction is not supported\" (torch_tpu 0.2.0)"
_REDUCE = "tpu_dist reduces to all ranks or scatters, and has no reduce to one of them"


def capabilities(chip: str, software: Mapping[str, str]) -> Capabilities:
    """See :meth:`accelbridge.backend.Backend.capabilities`."""
    return Capabilities(chip=hardware.chip(chip), table=table(), replaced=REPLACED)


def table() -> Cells:
    """Ops x dtype x variant."""
    cells: Cells = {(op, dtype, ""): FULL for op in (*OPS, *MOVES) for dtype in FLOATS}
    cells |= {(op, "uint8", ""): FULL for op in MOVES}
    cells |= {(op, "float16", ""): unsupported(_FLOAT16) for op in OPS}
    for dtype in FLOATS:
        for op in REDUCTIONS:
            cells |= {(op, dtype, kind): FULL for kind in ("sum", "product", "min", "max")}
            # "BuildReduceBody: 'avg' reduction should be handled using 'sum'".
            cells[op, dtype, "avg"] = Support("emulated", "tpu_dist adds, and divides")
            cells[op, dtype, "premul_sum"] = unsupported(_PREMUL)
        cells |= {("reduce", dtype, kind): unsupported(_REDUCE) for kind in ("sum", "avg", "min", "max")}
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        cells["scaled_mm", dtype, ""] = unsupported(_FLOAT8)
    return cells
