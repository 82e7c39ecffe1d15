"""What NVIDIA's GPUs can do, as data with its sources: a pure function of the chip's name and the software. No torch.

ScaledBlas: aten/src/ATen/native/cuda/ScaledBlas.cpp of pytorch/pytorch, with ScaledBlasUtils.cpp and
RowwiseScaledMM.cu, read 2026-11-30. None of it was run on the chips named here, but where a report says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from accelbridge.backend import FULL, Capabilities, Chip, Limit, Support, unsupported
from accelbridge.kernels.fp8_cells import Fp8Kernels, served
from accelbridge.portable.device_cells import MOVES, Cells, fp8_cells, group_cells, op_cells, product_cells
from accelbridge.portable.fp8_cells import EMULATED
from accelbridge.portable.known_bad import at_least
from accelbridge_cuda.tiles import lacking, tiles

E4M3, E5M2 = FAMILY = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Architecture:
    """One compute capability."""

    fp8: bool = False
    """``scaled_mm`` needs 8.9, or 9.0 and later (ScaledBlas, scaled_mm_arch_allowed)."""
    blocks: bool = False
    """1x128 and 128x128 scales: 9.0 and no other (ScaledBlas, _check_deepseek_support)."""
    mx: bool = False
    """MX scales: 10.0 and later (torch/testing/_internal/common_cuda.py, evaluate_platform_supports_mx_gemm)."""
    rows: bool = True
    """Row scales. cuBLASLt refuses them on 12.0, where torch 2.10 asked it: pytorch/pytorch#192707, closed; from which
    torch on CUTLASS serves it, as it does now (ScaledBlas), was not found."""
    row_by_cublas: bool = False
    """Row scales by cuBLASLt from 12.9: 9.0; elsewhere by CUTLASS (ScaledBlas, _scaled_rowwise_rowwise)."""
    cudnn_first: bool = False
    """Whether torch itself prefers cuDNN's attention (sdp_utils.cpp, check_prefer_cudnn_attention)."""
    flash: tuple[str, ...] = ()
    """Versions of flash-attention of its own that are written for it: torch/nn/attention/_fa3.py and _fa4.py."""
    facts: Mapping[str, str | int] | None = None


_TOWARD_ZERO: Mapping[str, str | int] = {"matmul.accumulator": "float32_toward_zero"}
"""Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7:e330, 2021
(V100, T4, A100). Later ones are not in it; taken over for 9.0."""
_FP22: Mapping[str, str | int] = {"fp8.accumulator_bits": 14}
"""Products of fp8 are added with 13 fraction bits: SageAttention2, arXiv:2411.10958, section 3.3 (mma of 8.9, wgmma of
9.0); DeepSeek-V3, arXiv:2412.19437, section 3.3.2 ("around 14 bits", H800)."""

ARCHITECTURES: Mapping[str, Architecture] = {
    "sm80": Architecture(facts=_TOWARD_ZERO),
    "sm86": Architecture(),
    "sm89": Architecture(fp8=True, facts=_FP22),
    "sm90": Architecture(
        fp8=True,
        blocks=True,
        row_by_cublas=True,
        cudnn_first=True,
        flash=("fa3", "fa4"),
        facts={**_TOWARD_ZERO, **_FP22},
    ),
    "sm100": Architecture(fp8=True, mx=True, cudnn_first=True, flash=("fa4",)),
    "sm103": Architecture(fp8=True, mx=True, cudnn_first=True, flash=("fa4",)),
    "sm120": Architecture(fp8=True, mx=True, rows=False),
}
"""Compute capabilities, by nvcc's name: A100 8.0; A10, RTX 3090 8.6; L40S, RTX 4090 8.9; H100, H200 9.0; B200 10.0;
B300 10.3; RTX 5090, RTX PRO 6000 Blackwell 12.0 (developer.nvidia.com/cuda-gpus)."""

T, GB = 1e12, 10**9
_HOPPER = {"bfloat16": 989 * T, "float16": 989 * T, "fp8": 1979 * T}
PRODUCTS: Mapping[str, tuple[Mapping[str, float], int | None]] = {
    "NVIDIA A100-SXM4-80GB (sm80)": ({"bfloat16": 312 * T, "float16": 312 * T}, 80 * GB),
    "NVIDIA A100-SXM4-40GB (sm80)": ({"bfloat16": 312 * T, "float16": 312 * T}, 40 * GB),
    "NVIDIA H100 80GB HBM3 (sm90)": (_HOPPER, 80 * GB),
    "NVIDIA H200 (sm90)": (_HOPPER, 141 * GB),
    "NVIDIA B200 (sm100)": ({"bfloat16": 2250 * T, "float16": 2250 * T, "fp8": 4500 * T}, 180 * GB),
    "NVIDIA GB200 (sm100)": ({"bfloat16": 2500 * T, "float16": 2500 * T, "fp8": 5000 * T}, 186 * GB),
    "NVIDIA B300 SXM6 AC (sm103)": ({"bfloat16": 2250 * T, "float16": 2250 * T}, None),
}
"""Dense peak FLOP/s by compute precision, and memory in bytes, by what NVML calls the product. Others stay unknown.
16 bits: torchtitan, tools/utils.py, get_peak_flops. fp8 and memory: half of what the specifications of the H100, and of
the HGX B200 and GB200 NVL72, give with sparsity (seen in listings of them, 2026-11-30)."""

BANDWIDTHS: Mapping[str, int] = {
    "NVIDIA A100-SXM4-80GB (sm80)": 2039 * GB,
    "NVIDIA A100-SXM4-40GB (sm80)": 1555 * GB,
    "NVIDIA H100 80GB HBM3 (sm90)": 3350 * GB,
    "NVIDIA H200 (sm90)": 4800 * GB,
}
"""Bytes per second of the device's memory: NVIDIA's datasheets of the A100, H100 and H200."""

CHIPS: Mapping[str, str] = {
    "a100": "NVIDIA A100-SXM4-80GB (sm80)",
    "a10": "NVIDIA A10 (sm86)",
    "rtx3090": "NVIDIA GeForce RTX 3090 (sm86)",
    "l40s": "NVIDIA L40S (sm89)",
    "rtx4090": "NVIDIA GeForce RTX 4090 (sm89)",
    "h100": "NVIDIA H100 80GB HBM3 (sm90)",
    "h200": "NVIDIA H200 (sm90)",
    "b200": "NVIDIA B200 (sm100)",
    "gb200": "NVIDIA GB200 (sm100)",
    "b300": "NVIDIA B300 SXM6 AC (sm103)",
    "rtx5090": "NVIDIA GeForce RTX 5090 (sm120)",
    "rtxpro6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition (sm120)",
}

_USUAL: Mapping[str, Mapping[str, str]] = {
    "2.9": {"cuda": "12.8", "cudnn": "9.10.2", "nccl": "2.27.5", "triton": "3.5.1"},
    "2.10": {"cuda": "12.8", "cudnn": "9.10.2", "nccl": "2.27.5", "triton": "3.6.0"},
    "2.11": {"cuda": "13.0", "cudnn": "9.19", "nccl": "2.28.9", "triton": "3.6.0"},
    "2.12": {"cuda": "13.0", "cudnn": "9.20", "nccl": "2.29.7", "triton": "3.7.0"},
    "2.13": {"cuda": "13.0", "cudnn": "9.20", "triton": "3.7.1"},
    "2.14": {"cuda": "13.0", "cudnn": "9.24", "nccl": "2.30.7", "triton": "3.8.0"},
    "2.15": {"cuda": "13.2", "cudnn": "9.26", "nccl": "2.30.7"},
}
"""What torch's wheels on PyPI depend on, by their metadata; of 2.13, but for triton, by a report in
pytorch/pytorch#193893. triton for 2.15 was not read."""


def usual_software(torch: str) -> dict[str, str]:
    """What comes with a torch from PyPI of this version; nothing is made up for one that is not tabulated."""
    release = torch.partition("+")[0]
    return {"torch": release, **_USUAL.get(".".join(release.split(".")[:2]), {})}


def architecture_of(chip: str) -> str:
    """``"NVIDIA H200 (sm90)"`` -> ``"sm90"``; "" where the name says none."""
    found = re.search(r"\((sm\d+)\)$", chip)
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
    quantizing = FULL if known.fp8 else _emulated(_no_fp8(name))
    ours = kernels(name, software)
    table |= fp8_cells(
        FAMILY,
        lambda _: quantizing,
        lambda a, b, scaling: served(_product(name, a, b, scaling, software), ours.product(scaling)),
    )
    moved = {"memory.bandwidth": BANDWIDTHS[chip]} if chip in BANDWIDTHS else {}
    facts = {**_FACTS, **(known.facts or {}), **moved}
    return Capabilities(Chip(chip, peaks, memory), table, facts=facts, capture=FULL)


def library_products(chip: str, software: Mapping[str, str]) -> Cells:
    """Cells of ``scaled_mm`` that are torch's and cuBLASLt's own; none of an unknown architecture."""
    name = architecture_of(chip)
    if name not in ARCHITECTURES:
        return {}
    return product_cells(FAMILY, lambda a, b, scaling: _product(name, a, b, scaling, software))


def kernels(architecture: str, software: Mapping[str, str]) -> Fp8Kernels:
    """What the portable kernels add."""
    return Fp8Kernels(tiles(architecture), lacking(architecture), software)


_FACTS: Mapping[str, str | int] = {
    "fp8.variant": "fn",
    "fp8.overflow": "asked",
    # Rings and trees add in the tensors' dtype and round at every hop: NVIDIA/nccl#1026, src/device/reduce_kernel.h.
    "reduce.precision.bfloat16": "bfloat16",
    "reduce.precision.float16": "float16",
}


def _fp8_moves() -> Cells:
    """torch maps both formats to NCCL's own from 2.24 on, which all supported torch have (ProcessGroupNCCL.cpp)."""
    return {(op, dtype, ""): FULL for op in MOVES for dtype in FAMILY}


def _emulated(why: str) -> Support:
    return Support("emulated", f"{why}; {EMULATED.reason}")


def _no_fp8(architecture: str) -> str:
    return f"{architecture} has no fp8 products: torch's scaled_mm needs sm89, or sm90 and later"


_SIXTEEN = (Limit("k", multiple=16), Limit("n", multiple=16))


def _product(name: str, a: str, b: str, scaling: str, software: Mapping[str, str]) -> Support:
    """One product, ``a`` [M, K] in rows by ``b`` [K, N] in columns."""
    known = ARCHITECTURES[name]
    if not known.fp8:
        return _emulated(_no_fp8(name))
    if a == b == E5M2:
        return _emulated("cuBLASLt multiplies no two float8_e5m2 (ScaledBlas.cpp)")
    if scaling == "tensor":
        return Support("full", limits=_SIXTEEN)
    if scaling == "row":
        if not known.rows:
            return _emulated(f"row scales are refused on {name} (pytorch/pytorch#192707)")
        if b != E4M3:
            return _emulated("with row scales, the second operand has to be float8_e4m3fn (RowwiseScaledMM.cu)")
        return Support("full", limits=_SIXTEEN)
    if scaling == "mx":
        return _mx(name, software)
    return _blocks(name, a, b, scaling, software)


def _mx(name: str, software: Mapping[str, str]) -> Support:
    if not ARCHITECTURES[name].mx:
        return _emulated(f"{name} has no MX products: they need sm100 or later")
    if not at_least(software.get("cuda"), "12.8"):
        return _emulated(f"MX products need CUDA 12.8 or later, not {software.get('cuda', 'an unknown one')}")
    return Support("full", limits=(Limit("k", multiple=32), Limit("n", multiple=16)))


def _blocks(name: str, a: str, b: str, scaling: str, software: Mapping[str, str]) -> Support:
    if not ARCHITECTURES[name].blocks:
        return _emulated(f"{name} has no products with 1x128 and 128x128 scales: torch has them on sm90 only")
    if not at_least(software.get("cuda"), "12.9"):
        found = software.get("cuda", "an unknown one")
        return _emulated(f"1x128 and 128x128 scales need cuBLASLt of CUDA 12.9 or later, not {found}")
    if not at_least(software.get("torch"), "2.10"):  # torch 2.9.1, _meta_registrations.py, meta_scaled_mm
        return _emulated("1x128 and 128x128 scales are unknown to torch's own check of scaled_mm before 2.10")
    if scaling == "block128x128":
        return _emulated("cuBLASLt multiplies 128x128 blocks with 1x128 ones only")
    rows = Limit("m", multiple=4)  # scales of rows lie side by side, in strides of 16 bytes
    if scaling == "block1x128":
        return Support("full", limits=(rows, Limit("k", multiple=128), Limit("n", multiple=16)))
    # torch.nn.functional.scaled_mm pads scales along K to a multiple of 4; torch._scaled_mm does not (see portable).
    return Support("full", limits=(rows, Limit("k", multiple=128 if a == b else 512), Limit("n", multiple=128)))


def outputs(architecture: str, software: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Dtypes of a product, by the scaling of its first operand, where they are not float32, bfloat16 and float16 all.
    With row scales CUTLASS gives bfloat16 in every torch, cuBLASLt float32 too (pytorch/pytorch#162022)."""
    known = ARCHITECTURES.get(architecture)
    wide = known is not None and known.row_by_cublas and at_least(software.get("cuda"), "12.9")
    return {"row": ("bfloat16", "float32") if wide else ("bfloat16",), "block1x128": ("bfloat16", "float32")}
