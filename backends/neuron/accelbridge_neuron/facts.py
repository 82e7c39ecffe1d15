"""What Trainium2 and Trainium3 can do, as data with its sources: a pure function of the chip's name and the software.
No torch. Nothing was run on the chips named here.

ND: awsdocs-neuron.readthedocs-hosted.com, 2.33. SNAP: an unofficial mirror of a pre-release of April 2026, so second
hand; ND wins where they differ. TT: torchtitan, tools/utils.py, of August 2026. SDK: aws-neuron/aws-neuron-sdk, 2.32.
"""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.backend import FULL, Capabilities, Chip, Support, unsupported
from accelbridge.portable.device_cells import MOVES, OPS, REDUCTIONS, Cells
from accelbridge.precision.scalings import SCALINGS

T, GB = 1e12, 10**9
FLOATS = ("float32", "bfloat16", "float16")
"""Not float64, which Neuron computes as float32 without a word (SNAP)."""
FP8 = ("float8_e4m3fn", "float8_e5m2")

CHIPS: Mapping[str, str] = {"trn2": "AWS Trainium2", "trn3": "AWS Trainium3"}
"""What users write, and how probe() names them: "AWS " and the driver's device_name."""

PEAKS: Mapping[str, Mapping[str, float]] = {chip: {"bfloat16": 158 * T} for chip in CHIPS.values()}
"""Of one logical core of two physical ones (LNC 2, the default): 2 x 79e12 (TT, of trn2* and trn3*)."""

MEMORY: Mapping[str, int] = {"AWS Trainium2": 24 << 30}
"""Of one logical core: a fourth of the 96 GiB that neuron-ls lists per device of trn2 (SDK, neuron-ls user guide)."""

REPLICA_SIZES = (1, 2, 4, 8, 16)
MULTIPLE = 32
"""Sizes of groups: 1, 2, 8, 16 or a multiple of 32 ("Unsupported topology", huggingface/optimum-neuron#619, of the XLA
path), 4, 8, 16 or a multiple of 32 (SNAP); no official source for the native stack."""

_XLA = (
    "is refused: AWS ended training through PyTorch/XLA with Neuron 2.30, and the native stack runs on Trn2 and Trn3 "
    "only (Neuron 2.33)"
)
REFUSED: Mapping[str, str] = {
    "Trainium1": f"Trn1 {_XLA}",
    "Inferentia": f"Inf1 {_XLA}",
    "Inferentia2": f"Inf2 {_XLA}",
}
"""Other devices of this driver, by its device_name (aws-neuron-driver, neuron_dhal_v*.c)."""

_PRODUCT = unsupported("Neuron's library lowers no PRODUCT (SNAP: AllReduce PRODUCT operation unsupported)")
_PREMUL = Support("full", lowering="premul_as_sum")
_FP8: Mapping[str, str] = {
    "AWS Trainium2": "Trainium2 has no e4m3fn (NCC_EVRF051; its own e4m3 ends at 240, and torch has no dtype for it)",
    "AWS Trainium3": "Trainium3 has e4m3fn, but no document shows how to train in it",
}
_NO_FP8 = "no fp8 training interface of TorchNeuron is documented (Neuron 2.33)"


def replica_size(size: int) -> bool:
    """Whether a group of ``size`` ranks is among :data:`REPLICA_SIZES` or a multiple of :data:`MULTIPLE`."""
    return size in REPLICA_SIZES or size % MULTIPLE == 0


def capabilities(chip: str, software: Mapping[str, str]) -> Capabilities:
    """Of one logical core of ``chip``; of another than the two, everything is unsupported, with the reason."""
    table = _table(chip)
    if chip not in CHIPS.values():
        why = unsupported(REFUSED.get(chip.removeprefix("AWS "), f"{chip} is not one of {', '.join(CHIPS.values())}"))
        return Capabilities(Chip(chip), dict.fromkeys(table, why))
    return Capabilities(
        Chip(chip, PEAKS.get(chip, {}), MEMORY.get(chip)),
        table,
        pinned_host_memory=unsupported("pinned memory of Neuron is not documented (SNAP reports all memory as pinned)"),
        host_parameters=unsupported("FSDP2's CPU offload fails or times out in the vendor's own tests (SNAP)"),
        generators=unsupported("torch.Generator of Neuron is not documented; users report it on the host"),
    )


def _table(chip: str) -> Cells:
    table: Cells = {(op, dtype, ""): FULL for op in OPS for dtype in FLOATS}
    table["adamw", "float16", ""] = unsupported(
        "float16 cannot hold the squares of gradients below 2^-12: keep parameters in float32"
    )
    table |= {(op, dtype, ""): FULL for op in MOVES for dtype in FLOATS}
    for op in REDUCTIONS:
        table |= {(op, dtype, kind): FULL for dtype in FLOATS for kind in ("sum", "avg", "min", "max")}
        table |= {(op, dtype, "product"): _PRODUCT for dtype in FLOATS}
        table |= {(op, dtype, "premul_sum"): _PREMUL for dtype in FLOATS}
    return table | _fp8(chip)


def _fp8(chip: str) -> Cells:
    why = unsupported("; ".join(filter(None, [_FP8.get(chip, ""), _NO_FP8])))
    # e4m3fn of Trainium2 is not stated at all: nothing of that dtype can lie there.
    moved = FP8 if chip == "AWS Trainium3" else FP8[1:]
    table: Cells = {(op, dtype, ""): Support("full", lowering="fp8_bytes") for op in MOVES for dtype in moved}
    for dtype in FP8:
        table |= {(op, dtype, scaling): why for op in ("scaled_mm", "quantize") for scaling in SCALINGS}
    return table
