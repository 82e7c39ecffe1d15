"""Portable kernels in Triton: one source for every vendor, with what suits a chip as data of its backend.

Each module holds one family: Triton functions, the code that launches them, ``torch.library`` custom ops with fake
kernels, and functions with the signature of the op in :mod:`accelbridge.ops` (or the method of the interface) that they
serve. A module imports triton, so it is imported by the ``load`` of a candidate and by nothing else; this one and
:mod:`.tiles` import neither triton nor torch.

Nothing here names a chip. Sizes of blocks, warps and stages are looked up in :mod:`.tiles`, which a backend fills for
its architecture before a kernel is launched.
"""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.backend import FULL, Support, unsupported
from accelbridge.portable.known_bad import at_least

OLDEST_TRITON = "3.4"
"""Of which the kernels use nothing newer."""


def available(software: Mapping[str, str]) -> Support:
    """Whether the kernels can be compiled on a host with ``software``, versions by name as in ``Probe.software``."""
    found = software.get("triton")
    if at_least(found, OLDEST_TRITON):
        return FULL
    why = "triton is not installed" if found is None else f"triton {found} is older than {OLDEST_TRITON}"
    return unsupported(f"{why}; install accelbridge[kernels]")
