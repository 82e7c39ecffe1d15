"""Runs of the trainer that several test files make: in which layouts, how, and what is compared.

A run is a name and the sections of the recipe that make it special. :func:`train_all` makes many in the same
processes; which backend they run on is up to the caller.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from accelbridge import Trainer
from accelbridge.checkpoint.load import load
from accelbridge.checkpoint.manifest import complete
from tests import cli
from tests.ranks import Rank

Sections = dict[str, dict[str, Any]]
Steps = dict[int, dict[str, Any]]

TP: Sections = {"model": {"vocab_size": 260}, "parallel": {"tp": 2}}
"""The small model, with a vocabulary that divides."""
ONE: dict[str, Sections] = {"reference": {}}
TWO: dict[str, Sections] = {
    "replicate 2": {"parallel": {"dp_replicate": 2}},
    "ZeRO 3": {"parallel": {"zero": 3}},
    "ZeRO 1, accumulating": {"parallel": {"zero": 1}, "train": {"microbatch_size": 1}},
    "ZeRO 2, accumulating": {"parallel": {"zero": 2}, "train": {"microbatch_size": 1}},
    "ZeRO 3, accumulating": {"parallel": {"zero": 3}, "train": {"microbatch_size": 1}},
    "tp 2": TP,
    "tp 2, sequence parallel": {**TP, "parallel": {"tp": 2, "sequence_parallel": True}},
    "collectives checked": {"parallel": {"check_collectives": True}},
    "bfloat16": {"precision": {"compute": "bf16"}},
    "float16": {"precision": {"compute": "fp16", "loss_scale": {"initial": 2.0**20, "growth_interval": 2}}},
    "dropout": {"model": {"dropout": 0.1}},
    "recompute full": {"memory": {"recompute": "full"}},
    "recompute selective": {"memory": {"recompute": "selective"}},
}
FOUR: dict[str, Sections] = {"hybrid 2x2": {"parallel": {"dp_replicate": 2, "dp_shard": 2}}}


def train_all(
    ctx: Rank,
    folder: Path,
    store: Path,
    runs: Mapping[str, Sections],
    common: Sections | None = None,
    resume: Mapping[str, str] | None = None,
) -> None:
    """One rank of several runs, one after the other in the same processes, each in ``folder`` under its name.

    ``common`` are sections of all of them. A run named in ``resume`` starts from the checkpoint of that path,
    relative to ``folder``.
    """
    ctx.launched()
    for name, sections in runs.items():
        os.environ["TORCHELASTIC_RUN_ID"] = name
        recipe = cli.recipe(folder / name, store, **(common or {}))
        for section, values in sections.items():
            recipe.setdefault(section, {}).update(values)
        start = (resume or {}).get(name)
        Trainer(recipe, resume=str(folder / start) if start else "none").fit()


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole."""
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(checkpoint, state, None)
    return state


def same_bits(ours: Path, theirs: Path, random_state: bool = True) -> None:
    """Two checkpoints hold equal tensors; without ``random_state``, which is of another form on another device, all
    others are."""
    a, b = tensors(ours), tensors(theirs)
    for state in (a, b):
        assert any(name.startswith("optimizer.") for name in state)
        assert any(name.startswith("rng.") for name in state)
        for name in [name for name in state if name.startswith("rng.") and not random_state]:
            del state[name]
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def sigterm_saves(folder: Path, store: Path, env: Mapping[str, str] | None = None, **sections: dict[str, Any]) -> None:
    """A run that is asked to end saves a checkpoint of its last step and leaves with a code of its own."""
    sections["train"] = sections.get("train", {}) | {"steps": 5000}
    recipe = cli.write_recipe(folder / "long.yaml", store, **{"metrics": {"interval": 2}, **sections})
    output = folder / "run-long"
    running = cli.start("train", str(recipe), "--nproc", "2", output=None, **(env or {}))
    cli.wait_for(lambda: (output / "metrics.jsonl").exists() and len(cli.steps_of(output)) > 4, 60, "a few steps")
    running.send_signal(signal.SIGTERM)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 75, out
    assert "SIGTERM: checkpoint at step" in out
    (saved,) = complete(output / "checkpoints")
    assert saved.name == f"step_{max(cli.steps_of(output))}"
