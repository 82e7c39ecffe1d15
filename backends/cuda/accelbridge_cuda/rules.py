"""What is known to go wrong on NVIDIA GPUs, with its source and the version that mends it. Looked up 2026-11-30."""

from __future__ import annotations

from datetime import date

from accelbridge.backend import Request
from accelbridge.portable.known_bad import KnownBad

READ = date(2026, 11, 30)
_MASKS = frozenset({"window", "segments"})


def _half_a_tile_masked(request: Request) -> bool:
    return bool(request.needs & _MASKS) and request.shape.get("sequence", 64) % 128 == 64


def _few_heads(request: Request) -> bool:
    return request.shape.get("kv_heads", 0) < 8


RULES: tuple[KnownBad, ...] = (
    # Closed by pytorch/pytorch#196861, "Upgrade cuDNN 9.26, add some guards for failing <= 9.25.1 cases". Reported of
    # sm90, whose kernel is named; what sm10x does is not said, so it is refused there too.
    KnownBad(
        issue="pytorch/pytorch#196678",
        reported=date(2026, 9, 11),
        read=READ,
        implementations=("cudnn",),
        architectures=("sm90", "sm100", "sm103"),
        software={"cudnn": "<9.26"},
        applies=_half_a_tile_masked,
        what="cuDNN's backward pass gives NaN for the query where there is a mask and sequence % 128 == 64",
        lifted="cuDNN 9.26",
    ),
    # Open. pytorch/pytorch#194927 lays it to queries of length 1, and refuses those with cuDNN 9.19 to 9.25.0 but
    # 9.24.1 on sm10x and sm11x (aten/src/ATen/native/cudnn/MHA.cpp, check_cudnn_sdpa_decode). Training has none, but
    # no test of training is reported, and the report itself tells affected models by their heads.
    KnownBad(
        issue="pytorch/pytorch#193893",
        reported=date(2026, 8, 18),
        read=READ,
        implementations=("cudnn",),
        architectures=("sm100", "sm103"),
        software={"cudnn": ">=9.19,<9.25.1,!=9.24.1"},
        applies=_few_heads,
        what="cuDNN's attention is silently wrong for models with fewer than 8 key/value heads",
        lifted="cuDNN 9.25.1",
    ),
    # Closed. check_prefer_cudnn_attention of torch asks for a later cuDNN for the same reason.
    KnownBad(
        issue="pytorch/pytorch#169849",
        reported=date(2026, 1, 2),
        read=READ,
        implementations=("cudnn",),
        architectures=("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120"),
        software={"cudnn": "<=9.15.0"},
        applies=lambda request: request.shape.get("sequence", 1) % 128 != 0,
        what="cuDNN's attention fails where sequence % 128 != 0",
        lifted="cuDNN 9.15.1",
    ),
)
"""Not rules: pytorch/ao#2904 (row scales on B200) is closed, and was of nightly builds of August 2025 without code for
sm100a; pytorch/ao#4582 (row scales with CUDA 12.9) names no shapes, so that no predicate could be written; those of
NCCL are matters of its environment, in :mod:`.profiles`."""
