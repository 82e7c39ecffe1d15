"""The pieces of checkpoints, alone: whole or not there, verified when read, kept by rules."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.load import load, verify
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.retention import Retention
from accelbridge.checkpoint.save import Checkpointer, sweep
from accelbridge.checkpoint.stage import Stage
from accelbridge.errors import CheckpointError


def make(root: Path, step: int = 1, keep: int = 9, asynchronous: bool = True) -> dict[str, Tensor]:
    """Save a small state at ``step`` and return it."""
    state = {"a": torch.arange(1000.0), "b": torch.ones(3, 4, dtype=torch.bfloat16), "empty": torch.empty(0, 5)}
    saver = Checkpointer(root, group=None, rank=0, retention=Retention(keep), asynchronous=asynchronous)
    saver.save(state, Manifest(step=step, world_size=1))
    saver.close()
    return state


def like(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_round_trip(tmp_path: Path, asynchronous: bool) -> None:
    state = make(tmp_path, asynchronous=asynchronous)
    (path,) = manifests.complete(tmp_path)
    verify(path, manifests.read(path), None)
    found = like(state)
    load(path, found, None)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_an_asynchronous_save_holds_the_state_of_its_step(tmp_path: Path) -> None:
    state = {"a": torch.zeros(1_000_000)}
    saver = Checkpointer(tmp_path, group=None, rank=0, asynchronous=True)
    saver.save(state, Manifest(step=1, world_size=1))
    state["a"].fill_(7.0)  # the next step goes on at once
    saver.close()
    found = {"a": torch.ones(1_000_000)}
    load(tmp_path / "step_1", found, None)
    assert not found["a"].any()


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (2, 10, 9, 11):  # by number, not by name
        make(tmp_path, step, keep=2)
    assert [p.name for p in manifests.complete(tmp_path)] == ["step_10", "step_11"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_11"]


def test_a_published_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    make(tmp_path)
    before = (tmp_path / "step_1" / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="earlier checkpoints are intact"):
        make(tmp_path)
    assert (tmp_path / "step_1" / "manifest.json").read_bytes() == before


def test_what_a_kill_leaves_is_not_a_checkpoint(tmp_path: Path) -> None:
    make(tmp_path)
    shutil.copytree(tmp_path / "step_1", tmp_path / ".step_2.partial")
    (tmp_path / "step_3").mkdir()  # a folder without a manifest
    assert [p.name for p in manifests.complete(tmp_path)] == ["step_1"]
    sweep(tmp_path)
    assert not (tmp_path / ".step_2.partial").exists()
    with pytest.raises(CheckpointError, match=r"has no manifest\.json, so it is not a complete checkpoint"):
        manifests.read(tmp_path / "step_3")


def saved(root: Path, metrics: dict[int, dict[str, float]], retention: Retention) -> list[int]:
    """Save each step of ``metrics`` and return the steps that are left."""
    saver = Checkpointer(root, group=None, rank=0, retention=retention)
    for step, values in metrics.items():
        saver.save({"a": torch.zeros(1)}, Manifest(step=step, world_size=1, metrics=values))
    saver.close()
    return [manifests.read(path).step for path in manifests.complete(root)]


def test_every_kth_is_kept_for_good(tmp_path: Path) -> None:
    assert saved(tmp_path, {step: {} for step in range(2, 22, 2)}, Retention(newest=1, every=6)) == [6, 12, 18, 20]


def test_the_best_by_a_metric_are_kept_until_better_ones_come(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.5, 3: 2.5, 4: 1.5, 5: 1.0, 6: 4.0, 7: 5.0}
    metrics: dict[int, dict[str, float]] = {step: {"loss": loss} for step, loss in losses.items()}
    metrics[6] = {"validation_loss": 0.1}  # another metric: it does not compete
    assert saved(tmp_path, metrics, Retention(newest=1, metric="loss", best=2)) == [2, 5, 7]


def test_a_damaged_neighbour_is_no_candidate_and_fails_no_save(tmp_path: Path) -> None:
    best = Retention(newest=1, metric="loss")
    assert saved(tmp_path, {1: {"loss": 1.0}}, best) == [1]
    (tmp_path / "step_1" / "manifest.json").write_text("{")
    assert saved(tmp_path, {2: {"loss": 2.0}, 3: {"loss": 3.0}}, best) == [2, 3]


def test_host_memory_is_allocated_once(tmp_path: Path) -> None:
    stage = Stage()
    state = {"a": torch.arange(4.0), "b": torch.ones(2)}
    first = stage.copy(state)
    kept = first["a"].data_ptr()
    state["a"].fill_(7.0)
    second = stage.copy({"a": state["a"], "c": torch.zeros(5)})
    assert second["a"].data_ptr() == kept
    assert second["a"].tolist() == [7.0] * 4
    assert set(second) == {"a", "c"}, "what is gone from the state is gone from the copy"
    grown = stage.copy({"a": torch.arange(6.0)})
    assert grown["a"].tolist() == list(range(6))


def flip_a_byte(path: Path) -> str:
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "does not match its checksum"


def truncate(path: Path) -> str:
    os.truncate(path / "__0_0.distcp", 100)
    return "has 100 bytes; the manifest says"


def remove_a_shard(path: Path) -> str:
    (path / "__0_0.distcp").unlink()
    return "__0_0.distcp is missing"


@pytest.mark.parametrize("damage", [flip_a_byte, truncate, remove_a_shard])
def test_damage_is_named_with_its_file(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    make(tmp_path)
    path = tmp_path / "step_1"
    expected = damage(path)
    with pytest.raises(CheckpointError, match=expected) as error:
        verify(path, manifests.read(path), None)
    assert "__0_0.distcp" in str(error.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, r"format version 2, which is newer; this accelbridge .* reads version 1; use accelbridge"),
        ({"version": 0, "release": None}, "format version 0, which is older; .* use the release that wrote it"),
        ({"format": "something else"}, "is no accelbridge-checkpoint manifest"),
        ({"unheard of": 1}, "is damaged: it has an unknown entry 'unheard of'"),
        ({"step": "1"}, "is damaged: step"),
        ({"files": [1]}, "is damaged: files"),
    ],
)
def test_a_foreign_manifest_is_refused(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    make(tmp_path)
    file = tmp_path / "step_1" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=expected):
        manifests.read(tmp_path / "step_1")


def test_another_models_tensors_are_named(tmp_path: Path) -> None:
    state = make(tmp_path)
    wanted = {"a": torch.zeros(999), "c": torch.zeros(1), "empty": state["empty"]}
    with pytest.raises(CheckpointError, match="another model") as error:
        load(tmp_path / "step_1", wanted, None)
    for part in ("c is absent", "b is not in the model", r"a is (1000,), the model has (999,)", "3 differences"):
        assert part in str(error.value)


def test_another_dtype_is_no_conversion(tmp_path: Path) -> None:
    state = make(tmp_path)
    wanted = {**like(state), "b": torch.zeros(3, 4)}
    with pytest.raises(CheckpointError, match=r"b is bfloat16, the model has float32 \(1 differences\)"):
        load(tmp_path / "step_1", wanted, None)
    assert not wanted["a"].any()
