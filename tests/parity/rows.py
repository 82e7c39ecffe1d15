"""The rows of the table, and the bounds of its cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Sections = Mapping[str, Mapping[str, Any]]

MODEL = {"vocab_size": 260, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 4, "ffn_dim": 64}
STEPS = 20
SAVED = 10
"""Step at which runs are resumed."""
FORCED = (0, 5, 10, 15)
"""Updates before each teacher-forced step; 0 is the initialisation."""

LOSS = 1e-5
GRADIENT = 1e-6
ENVELOPE = 4.0
"""Bounds of the cells "loss" and "moved", of "norm" and "gradient", of "free norm" and "weights"."""

CANCELLED = 1e-3
"""Share of the whole gradient's norm below which a tensor's own norm is no measure of its rounding errors."""

HOST = "hardware: host CPU, gloo"
SIMULATED = "simulated device"
NO_CHIP = "vendor runtime, no chip"
STAGED = f"{NO_CHIP}; collectives simulated"

ALL = frozenset({"free", "forced", "same", "moved"})


@dataclass(frozen=True)
class Row:
    """One line of the table. ``reference`` names the row of one device with the same mathematics."""

    name: str
    devices: int
    sections: Sections = field(default_factory=dict)
    reference: str = "1 device"
    evidence: str = HOST
    parts: frozenset[str] = ALL
    """What is measured; "free" always, since the rest starts from it."""
    torch_dropout: bool = False
    """A module with ``nn.Dropout``, whose masks come from the rank's generator, in the decoder's place."""
    twin: str = ""
    """A row on the CPU that this one must equal bit for bit."""


def _layout(**parallel: Any) -> Sections:
    return {"parallel": parallel}


def _and(*parts: Sections) -> Sections:
    return {name: values for part in parts for name, values in part.items()}


def _recompute(what: Any) -> Sections:
    return {"memory": {"recompute": what}}


def _microbatch(size: int) -> Sections:
    return {"train": {"microbatch_size": size}}


TIED: Sections = {"model": {"tie_embeddings": True}}
DROPOUT: Sections = {"model": {"dropout": 0.1}}
PORTABLE: Sections = {"backend": {"ops": {"attention": "reference", "adamw": "reference"}}}
"""Implementations that both the CPU and the simulated device have."""
SIM: Sections = {"backend": {"name": "sim-hpu", **PORTABLE["backend"]}}
ZERO1, TP2, TP4 = _layout(zero=1), _layout(tp=2), _layout(tp=4)
TP2_SP = _layout(tp=2, sequence_parallel=True)

ROWS: tuple[Row, ...] = (
    Row("1 device", 1),
    Row("1 device, accumulation 2", 1, _microbatch(4)),
    Row("replicate 2", 2, _layout(dp_replicate=2)),
    Row("shard 2, ZeRO 1", 2, ZERO1),
    Row("shard 2, ZeRO 2", 2, _layout(zero=2)),
    Row("shard 2, ZeRO 3", 2, _layout(zero=3)),
    Row("hybrid 2x2", 4, _layout(dp_replicate=2)),
    Row("tp 2", 2, TP2),
    Row("tp 2, sequence parallel", 2, TP2_SP),
    Row("shard 2 x tp 2", 4, TP2),
    Row("replicate 2 x tp 2, sequence parallel", 4, _layout(dp_replicate=2, tp=2, sequence_parallel=True)),
    Row("tp 4", 4, TP4),
    Row("shard 2, ZeRO 1, accumulation 2", 2, _and(ZERO1, _microbatch(2))),
    Row("shard 2, ZeRO 2, accumulation 4", 2, _and(_layout(zero=2), _microbatch(1))),
    Row("shard 2, ZeRO 3, accumulation 4", 2, _microbatch(1)),
    Row("shard 2 x tp 2, accumulation 4", 4, _and(TP2, _microbatch(1))),
    Row("shard 2, recompute selective", 2, _recompute("selective")),
    Row("shard 2, recompute full", 2, _recompute("full")),
    Row("tp 2, sequence parallel, recompute full", 2, _and(TP2_SP, _recompute("full"))),
    Row("tied, 1 device", 1, TIED, "tied, 1 device"),
    Row("tied, shard 2", 2, TIED, "tied, 1 device"),
    Row("tied, shard 2 x tp 2", 4, _and(TIED, TP2), "tied, 1 device"),
    Row("dropout 0.1, 1 device", 1, DROPOUT, "dropout 0.1, 1 device"),
    Row("dropout 0.1, shard 2, accumulation 4", 2, _and(DROPOUT, _microbatch(1)), "dropout 0.1, 1 device"),
    Row("dropout 0.1, shard 2, recompute full", 2, _and(DROPOUT, _recompute("full")), "dropout 0.1, 1 device"),
    Row("dropout 0.1, shard 2 x tp 2, sequence parallel", 4, _and(DROPOUT, TP2_SP), "dropout 0.1, 1 device"),
    Row("nn.Dropout, shard 2", 2, torch_dropout=True, parts=frozenset({"free", "same"})),
)

REFERENCES = tuple(row for row in ROWS if row.name == row.reference)

SIM_ROWS: tuple[Row, ...] = (
    Row("portable ops, shard 2", 2, PORTABLE),
    Row("portable ops, tp 2", 2, _and(PORTABLE, TP2)),
    Row("simulated, shard 2", 2, SIM, evidence=SIMULATED, twin="portable ops, shard 2"),
    Row("simulated, tp 2", 2, _and(SIM, TP2), evidence=SIMULATED, twin="portable ops, tp 2"),
)


def _spmd(layout: str, devices: int, sections: Sections, reference: str = "1 device") -> Row:
    return Row(f"XLA spmd, {layout}", devices, sections, reference, NO_CHIP)


SPMD_ROWS: tuple[Row, ...] = (
    _spmd("shard 2 x tp 2", 4, TP2),
    _spmd("shard 2 x tp 2, accumulation 4", 4, _and(TP2, _microbatch(1))),
    _spmd("tied, shard 2 x tp 2", 4, _and(TIED, TP2), "tied, 1 device"),
    _spmd("dropout 0.1, shard 2 x tp 2, sequence parallel", 4, _and(DROPOUT, TP2_SP), "dropout 0.1, 1 device"),
)
"""Measured by backends/xla/tests/spmd_parity.py, in an environment of its own."""

TORCHTPU_ROWS: tuple[Row, ...] = (
    Row("TorchTPU, 1 device", 1, evidence=NO_CHIP),
    Row("TorchTPU, replicate 2", 2, _layout(dp_replicate=2), evidence=STAGED),
    Row("TorchTPU, shard 2, ZeRO 3", 2, _layout(zero=3), evidence=STAGED),
    Row("TorchTPU, shard 2, ZeRO 1, accumulation 2", 2, _and(ZERO1, _microbatch(2)), evidence=STAGED),
    Row("TorchTPU, tp 2, sequence parallel", 2, TP2_SP, evidence=STAGED),
    Row("TorchTPU, dropout 0.1, shard 2", 2, DROPOUT, "dropout 0.1, 1 device", STAGED),
)
"""Measured by backends/xla/tests/torchtpu_parity.py, in an environment of its own."""
