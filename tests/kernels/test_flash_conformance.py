"""What the conformance suite asks of attention, asked of our kernel alone: interpreted on the CPU, which shows what it
computes and nothing of a chip."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from accelbridge.backend import FULL, Implementation, World
from accelbridge.conformance.bench import Bench
from accelbridge.conformance.registry import cases
from accelbridge.cpu.backend import CpuBackend
from accelbridge.kernels.flash_candidate import BLOCKS_D, KERNELS, flash_attention, variant
from accelbridge.kernels.tiles import Tile

TILES = {
    **{f"{kernel}.{variant(block, dtype)}": Tile({"QUERIES": 128, "KEYS": 64} | (
        {"DV_LAST": 0} if kernel == "flash_backward_dkdv" else {}))
       for kernel in KERNELS for block in BLOCKS_D for dtype in ("bfloat16", "float32")},
    "flash_delta": Tile({"QUERIES": 128}),
    "document_spans": Tile({"CHUNK": 1024}),
}  # fmt: skip
LONG = ("ATT-001", "ATT-005", "ATT-006", "ATT-008", "ATT-009", "ATT-010", "ATT-011", "ATT-012", "ATT-015", "ATT-018")
"""Cases of many keys or calls, which take the interpreter more than some seconds."""
WITHOUT = ("ATT-016",)
"""Dropout, which is an op of its own."""


class Interpreted(CpuBackend):
    """The reference backend with our kernel as the only candidate."""

    def implementations(self) -> Sequence[Implementation]:
        return (flash_attention(TILES, {}, FULL, lambda request: None),)


IDS = [name for name in sorted(cases()) if name.startswith("ATT-") and name not in WITHOUT]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] if name in LONG else []) for name in IDS])
def test_a_case_passes(name: str, tmp_path: Path) -> None:
    case, backend = cases()[name], Interpreted()
    bench = Bench(case, backend, backend.capabilities("cpu", {}), World(), torch.device("cpu"), tmp_path, seed=0)
    case.body(bench)
    assert bench.found.failures == []
    assert bench.found.comparisons > 0
