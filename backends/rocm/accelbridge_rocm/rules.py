"""What is known to go wrong on AMD GPUs, with its source and the version that mends it. Looked up 2026-11-30."""

from __future__ import annotations

from datetime import date

from accelbridge.portable.known_bad import KnownBad

READ = date(2026, 11, 30)
_MASKS = frozenset({"window", "segments"})

RULES: tuple[KnownBad, ...] = (
    # Closed, without a word on what mended it; seen in torch 2.5.0 with ROCm 6.2.
    KnownBad(
        issue="pytorch/pytorch#138764",
        reported=date(2024, 10, 23),
        read=READ,
        implementations=("flash", "efficient"),
        architectures=("gfx942",),
        software={"torch": "<2.6"},
        what="the backward pass gives NaN after some hundred steps",
    ),
    # Closed; right again in a nightly torch 2.7 (huggingface/transformers#30056, comment of 2025-02-13).
    KnownBad(
        issue="pytorch/pytorch#147460",
        reported=date(2025, 2, 19),
        read=READ,
        implementations=("efficient",),
        architectures=("gfx90a", "gfx942", "gfx950"),
        software={"torch": "<2.7"},
        applies=lambda request: bool(request.needs & _MASKS),
        what="masked attention is wrong",
        lifted="torch 2.7",
    ),
)
"""Not rules: ROCm/pytorch#3230, values that are not contiguous, is mended by copying them (``facts.py``, dense_values);
pytorch/pytorch#138300 is of flex attention, which is no candidate; pytorch/pytorch#148850, heads above 256, is closed
and was of a torch before 2.7; pytorch/pytorch#143465, slow products, is no error.
"""
