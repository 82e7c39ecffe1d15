"""What the conformance suite asks of the ops that layers and losses call, with our kernels among what a plan may bind:
interpreted on the CPU, which shows what they compute and nothing of a chip."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelbridge.backend import Implementation, World
from accelbridge.conformance.bench import Bench
from accelbridge.conformance.registry import cases
from accelbridge.conformance.suite import info
from accelbridge.cpu.backend import CpuBackend
from accelbridge.kernels.candidates import LAYERS, layers
from tests.kernels.layer_checks import TILES


class Interpreted(CpuBackend):
    """The reference backend with the kernels as candidates."""

    def implementations(self) -> Sequence[Implementation]:
        return [*super().implementations(), *layers("interpreted", TILES, {"triton": "3.7.1"})]


class Launched(TorchDispatchMode):
    """Names of the custom ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_claims_of_ops_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """INF-005: the small call of every cell, in every candidate that says it serves it."""
    backend = Interpreted()
    capabilities = backend.capabilities("cpu", {})
    monkeypatch.setattr(info, "_claims", lambda t: [cell for cell in capabilities.table if cell[0] in LAYERS])
    bench = Bench(cases()["INF-005"], backend, capabilities, World(), torch.device("cpu"), tmp_path, seed=0)
    with Launched() as launched:
        info._claimed_ops(bench)
    assert bench.found.failures == []
    assert bench.found.comparisons > 40
    ours = {each.launches[0] for each in layers("interpreted", TILES, {}) if not each.op.startswith("vocab_parallel")}
    assert ours <= launched.names
