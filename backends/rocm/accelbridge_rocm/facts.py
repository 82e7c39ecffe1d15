"""What AMD's GPUs can do, as data with its sources: a pure function of the chip's name and the software. No torch.

ScaledBlas: aten/src/ATen/native/cuda/ScaledBlas.cpp of pytorch/pytorch, as hipified, read 2026-11-30. None of it was
run on the chips named here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from accelbridge.backend import FULL, Capabilities, Chip, Limit, Support, unsupported
from accelbridge.kernels.fp8_cells import Fp8Kernels, served
from accelbridge.portable.device_cells import MOVES, Cells, fp8_cells, group_cells, op_cells, product_cells
from accelbridge.portable.fp8_cells import EMULATED
from accelbridge.portable.known_bad import at_least
from accelbridge_rocm.tiles import lacking, tiles

OCP = ("float8_e4m3fn", "float8_e5m2")
FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")


@dataclass(frozen=True)
class Architecture:
    """One instruction set."""

    family: tuple[str, str] | None
    """8-bit formats of its matrix instructions: gfx942 has fnuz, gfx950 OCP (ScaledBlas, _scaled_mm_is_fnuz; LLVM's
    AMDGPU usage); None where it has none."""
    minimum: str = ""
    """ROCm from which on torch has products in them (ScaledBlasDeviceUtils, scaled_mm_arch_allowed)."""
    mx: bool = False
    """MX products, from ROCm 7.0 on (ScaledBlas, check_blockwise_e8m0fnu_arch_supported)."""
    dense_values: bool = False
    """Whether SDPA is wrong for values that are not contiguous: ROCm/pytorch#3230 (MI300X, ROCm 7.0, torch 2.9 of
    August 2025), closed; no version is known that mends it."""
    aiter: bool = False
    """Whether ROCm/aiter has attention for it (aiter/ops/mha.py)."""
    subnormals: Mapping[str, Literal["kept", "flushed"]] = field(default_factory=dict)


ARCHITECTURES: Mapping[str, Architecture] = {
    # "MI200 MFMA behavior specifics" in the documentation of MIOpen: MFMA_F16 and MFMA_BF16 flush inputs and outputs.
    "gfx90a": Architecture(None, subnormals={"bfloat16": "flushed", "float16": "flushed"}),
    "gfx942": Architecture(FNUZ, dense_values=True, aiter=True),
    "gfx950": Architecture(OCP, minimum="6.5", mx=True, aiter=True),
}
"""MI210, MI250 and MI250X: gfx90a; MI300A, MI300X and MI325X: gfx942; MI350X and MI355X: gfx950 (rocm.docs.amd.com,
"Accelerator and GPU hardware specifications")."""

T, GB = 1e12, 10**9
PRODUCTS: Mapping[str, tuple[Mapping[str, float], int | None]] = {
    "AMD Instinct MI210 (gfx90a)": ({}, 64 * GB),
    "AMD Instinct MI250X (gfx90a)": ({"bfloat16": 191.5 * T}, 64 * GB),  # two devices, each with half of it
    "AMD Instinct MI300A (gfx942)": ({}, 128 * GB),
    "AMD Instinct MI300X (gfx942)": ({"bfloat16": 1300 * T}, 192 * GB),
    "AMD Instinct MI325X (gfx942)": ({"bfloat16": 1300 * T}, 256 * GB),
    "AMD Instinct MI350X (gfx950)": ({}, 288 * GB),
    "AMD Instinct MI355X (gfx950)": ({"bfloat16": 2500 * T}, 288 * GB),
}
"""Dense peak FLOP/s by compute precision (torchtitan, tools/utils.py, get_peak_flops; others were not looked up and
stay unknown), and memory in bytes (rocm.docs.amd.com, as above), of one device."""

BANDWIDTHS: Mapping[str, int] = {
    "AMD Instinct MI300X (gfx942)": 5300 * GB,
    "AMD Instinct MI325X (gfx942)": 6000 * GB,
    "AMD Instinct MI355X (gfx950)": 8000 * GB,
}
"""Bytes per second of the device's memory: AMD's data sheets of the products."""

CHIPS: Mapping[str, str] = {re.sub(r".* (MI\d+[AX]?) .*", r"\1", name).lower(): name for name in PRODUCTS}

_USUAL: Mapping[str, str] = {"2.9": "6.4", "2.10": "7.1"}
"""ROCm of the wheel index of pytorch.org by torch; the later ones, of which it was not looked up, are taken for 7.2."""
_TRITON: Mapping[str, str] = {
    "2.9": "3.5.1",
    "2.10": "3.6.0",
    "2.11": "3.6.0",
    "2.12": "3.7.0",
    "2.13": "3.7.1",
    "2.14": "3.8.0",
}
"""Triton by torch: what torch's wheels on PyPI depend on, for which those of pytorch.org's index are taken too."""

_TRITON: Mapping[str, str] = {
    "2.9": "3.5.1",
    "2.10": "3.6.0",
    "2.11": "3.6.0",
    "2.12": "3.7.0",
    "2.13": "3.7.1",
    "2.14": "3.8.0",
}
"""triton by torch: what torch's wheels on PyPI depend on, for which that of pytorch.org's ROCm wheels is taken."""


def usual_software(torch: str) -> dict[str, str]:
    """What comes with a torch of this version from pytorch.org's index."""
    release = torch.partition("+")[0]
    minor = ".".join(release.split(".")[:2])
    triton = {"triton": _TRITON[minor]} if minor in _TRITON else {}
    return {"torch": release, "rocm": _USUAL.get(minor, "7.2"), **triton}


def architecture_of(chip: str) -> str:
    """``"AMD Instinct MI300X (gfx942)"`` -> ``"gfx942"``; "" where the name says none."""
    found = re.search(r"\((gfx\w+)\)$", chip)
    return found[1] if found else ""


def capabilities(chip: str, software: Mapping[str, str]) -> Capabilities:
    """Of a product of a known architecture; its peak and memory only where the product itself is known."""
    peaks, memory = PRODUCTS.get(chip, ({}, None))
    name = architecture_of(chip)
    known = ARCHITECTURES.get(name)
    table: Cells = {**op_cells(), **group_cells(), **_fp8_moves()}
    if known is None:
        why = unsupported(f"{name or 'its architecture'} is not one of {', '.join(ARCHITECTURES)}")
        return Capabilities(Chip(chip), dict.fromkeys(table, why))
    ours = kernels(name, software)
    for family in _families(name):
        table |= fp8_cells(
            family,
            lambda scaling: served(_lacking(name, scaling, software) or FULL, ours.quantize()),
            lambda a, b, scaling: served(_product(name, a, b, scaling, software), ours.product(scaling)),
        )
    variant = {OCP: "fn", FNUZ: "fnuz", None: "fn fnuz"}[known.family]
    moved = {"memory.bandwidth": BANDWIDTHS[chip]} if chip in BANDWIDTHS else {}
    facts = {**_FACTS, "fp8.variant": variant, **moved}
    return Capabilities(
        Chip(chip, peaks, memory), table, facts=facts, subnormals=known.subnormals, capture=_capture(software)
    )


def _capture(software: Mapping[str, str]) -> Support:
    """Before ROCm 7.14, HIP does not report what must not be done while a graph is recorded (pytorch/pytorch#187110;
    pytorch/pytorch#155684): a graph of such work is wrong in silence. ROCm 7.0 is when it began to refuse some of it
    (ROCm/rccl#2022). torchtitan records no graphs where torch.version.hip is set."""
    rocm = software.get("rocm")
    if at_least(rocm, "7.14"):
        return FULL
    return unsupported(
        f"HIP before ROCm 7.14 does not report what a graph must not hold, so that it would be wrong in silence "
        f"(pytorch/pytorch#187110); here is {rocm or 'an unknown one'}"
    )


def _families(architecture: str) -> tuple[tuple[str, str], ...]:
    family = ARCHITECTURES[architecture].family
    return (family,) if family else (OCP, FNUZ)


def library_products(chip: str, software: Mapping[str, str]) -> Cells:
    """Cells of ``scaled_mm`` that are torch's and hipBLASLt's own; none of an unknown architecture."""
    name, table = architecture_of(chip), Cells()
    for family in _families(name) if name in ARCHITECTURES else ():
        table |= product_cells(family, lambda a, b, scaling: _product(name, a, b, scaling, software))
    return table


def kernels(architecture: str, software: Mapping[str, str]) -> Fp8Kernels:
    """What the portable kernels add."""
    return Fp8Kernels(tiles(architecture), lacking(architecture), software)


_FACTS: Mapping[str, str | int] = {
    "fp8.overflow": "asked",
    # Sums over bfloat16 round at every hop: rccl 2.21.5, src/device/reduce_kernel.h.
    "reduce.precision.bfloat16": "bfloat16",
    "reduce.precision.float16": "float16",
}


def _fp8_moves() -> Cells:
    """torch moves fnuz as bytes itself, and maps OCP's formats to the library's own (ProcessGroupNCCL.cpp), of which it
    is not known which RCCL has them."""
    why = unsupported(
        "which RCCL moves OCP's 8-bit floats is not known; move their codes as uint8, as accelbridge does, or set "
        "backend.options.lowerings: [fp8_bytes]"
    )
    return {(op, dtype, ""): FULL if dtype in FNUZ else why for op in MOVES for dtype in (*FNUZ, *OCP)}


def _emulated(why: str) -> Support:
    return Support("emulated", f"{why}; {EMULATED.reason}")


def _lacking(name: str, scaling: str, software: Mapping[str, str]) -> Support | None:
    """Why torch has no fp8 products here at all; None where it has."""
    known, rocm = ARCHITECTURES[name], software.get("rocm")
    if known.family is None:
        return _emulated(f"{name} has no fp8 products: torch's scaled_mm needs gfx942 or gfx950")
    minimum = "7.0" if scaling == "mx" and known.mx else known.minimum
    if minimum and not at_least(rocm, minimum):
        what = "MX" if scaling == "mx" else "fp8"
        return _emulated(f"{what} products on {name} need ROCm {minimum} or later, not {rocm or 'an unknown one'}")
    return None


_SIXTEEN = (Limit("k", multiple=16), Limit("n", multiple=16))


def _product(name: str, a: str, b: str, scaling: str, software: Mapping[str, str]) -> Support:
    """One product, ``a`` [M, K] in rows by ``b`` [K, N] in columns. Two E5M2 may meet, unlike in cuBLASLt."""
    if (lacking := _lacking(name, scaling, software)) is not None:
        return lacking
    if scaling == "tensor":
        return Support("full", limits=_SIXTEEN)
    if scaling == "row":
        if not b.startswith("float8_e4m3"):
            return _emulated("with row scales, the second operand has to be E4M3 (ScaledBlas.cpp)")
        return Support("full", limits=_SIXTEEN)
    return _mx(name, software) if scaling == "mx" else _emulated("1x128 and 128x128 scales are not available on ROCm")


def _mx(name: str, software: Mapping[str, str]) -> Support:
    """Mixed pairs pass torch's checks; hipBLASLt's kernels for them came with ROCm/rocm-libraries#3738, of 2026."""
    if not ARCHITECTURES[name].mx:
        return _emulated(f"{name} has no MX products: they need gfx950")
    if at_least(software.get("rocm"), "7.14"):
        return _emulated("from ROCm 7.14 on, hipBLASLt takes MX scales in tiles of 32x8, whose order was not looked up")
    return Support("full", limits=(Limit("m", multiple=32), Limit("k", multiple=128), Limit("n", multiple=32)))


OUTPUTS: Mapping[str, tuple[str, ...]] = {"row": ("bfloat16",), "mx": ("bfloat16", "float16")}
"""Dtypes of a product, by the scaling of its first operand, where they are not float32, bfloat16 and float16 all
(ScaledBlas)."""
