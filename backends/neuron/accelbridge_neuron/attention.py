"""Attention candidates on Neuron: torch's own call, which the SDK serves by its NKI flash kernel where shapes fit it,
and by what its compiler makes of the formula elsewhere. The plan says which of the two a run gets.

Source of the rules: an unofficial mirror of torch_neuronx 0.1.0 (April 2026), so second hand; the kernel of the public
nki-library (attention_bwd, 2026-04) asks for equal lengths under a causal mask as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accelbridge.backend import FULL, Implementation, Request, Support, unsupported
from accelbridge.portable.sdpa import Kernel, candidate

SEQUENCE_MULTIPLE, MAX_HEAD_DIM = 512, 128
SDPA = Kernel(
    "sdpa",
    "OVERRIDEABLE",
    ("aten::_scaled_dot_product_fused_attention_overrideable",),
    ("float32", "bfloat16", "float16"),
    masks=True,
    grouped=True,
)
NKI_FLASH = replace(SDPA, name="nki_flash", masks=False, max_head_dim=MAX_HEAD_DIM)


def candidates() -> Sequence[Implementation]:
    """Candidates for ``attention``, best first."""
    return (candidate(NKI_FLASH, _shapes), candidate(SDPA))


def _shapes(request: Request) -> Support:
    """What the NKI kernel wants of lengths and heads, where they are known."""
    length, heads, groups = (request.shape.get(name) for name in ("sequence", "heads", "kv_heads"))
    if length is None:
        return unsupported("its rules are about the length of sequences, which is not known here")
    if length % SEQUENCE_MULTIPLE:
        return unsupported(f"takes sequences of a multiple of {SEQUENCE_MULTIPLE}, not {length}")
    if heads and groups and heads % groups:
        return unsupported(f"takes query heads of a multiple of the {groups} key heads, not {heads}")
    return FULL
