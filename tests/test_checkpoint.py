"""Checkpoints: whole or not there, verified when read, and never able to run code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accelbridge import Trainer
from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.load import load, verify
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.save import Checkpointer, sweep
from accelbridge.errors import CheckpointError
from tests import cli

# ------------------------------------------------------------------------------------------- the pieces, alone


def make(root: Path, step: int = 1, keep: int = 9, asynchronous: bool = True) -> dict[str, Tensor]:
    """Save a small state at ``step`` and return it."""
    state = {"a": torch.arange(1000.0), "b": torch.ones(3, 4, dtype=torch.bfloat16), "empty": torch.empty(0, 5)}
    saver = Checkpointer(root, group=None, rank=0, keep=keep, asynchronous=asynchronous)
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
    saver = Checkpointer(tmp_path, group=None, rank=0, keep=1, asynchronous=True)
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
        ({"version": 2}, "format version 2; this accelbridge reads version 1"),
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


class Hostile:
    """Unpickles to the effect of a shell command."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.proof}",)


def test_a_hostile_checkpoint_runs_no_code(tmp_path: Path) -> None:
    state = make(tmp_path)
    proof = tmp_path / "it ran"
    (tmp_path / "step_1" / ".metadata").write_bytes(pickle.dumps(Hostile(proof)))
    with pytest.raises(CheckpointError, match=r"refers to posix\.system"):
        load(tmp_path / "step_1", like(state), None)
    assert not proof.exists()


def test_an_entry_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": Hostile(tmp_path / "it ran")}, checkpoint_id=tmp_path / "foreign", no_dist=True)
    with pytest.raises(CheckpointError, match="a is absent"):
        load(tmp_path / "foreign", {"a": torch.zeros(1)}, None)
    assert not (tmp_path / "it ran").exists()


def test_another_models_tensors_are_named(tmp_path: Path) -> None:
    state = make(tmp_path)
    wanted = {"a": torch.zeros(999), "c": torch.zeros(1), "empty": state["empty"]}
    with pytest.raises(CheckpointError, match="another model") as error:
        load(tmp_path / "step_1", wanted, None)
    for part in ("c is absent", "b is not in the model", r"a is (1000,), the model has (999,)", "3 differences"):
        assert part in str(error.value)


# ----------------------------------------------------------------------------------------------- in the trainer


def fit(folder: Path, store: Path, resume: str = "none", **sections: Any) -> None:
    recipe = cli.recipe(folder, store, **sections)
    recipe["train"]["steps"] = 6
    recipe["checkpoint"] = {"interval": 2, "keep": 9}
    Trainer(recipe, resume=resume).fit()


@pytest.fixture
def clean_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is the whole world, whatever started pytest."""
    for name in ("RANK", "WORLD_SIZE", "ACCELBRIDGE_BACKEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("clean_world")
def test_a_damaged_checkpoint_stops_the_resume(tmp_path: Path, store: Path) -> None:
    fit(tmp_path, store)
    shutil.rmtree(tmp_path / "checkpoints" / "step_6")
    flip_a_byte(tmp_path / "checkpoints" / "step_4")
    with pytest.raises(CheckpointError, match="step_4 is damaged"):
        fit(tmp_path, store, resume="auto")


@pytest.mark.usefixtures("clean_world")
def test_resuming_an_older_one_would_replace_the_newer(tmp_path: Path, store: Path) -> None:
    fit(tmp_path, store)
    with pytest.raises(CheckpointError, match=r"also holds step_4, step_6, .* move away what is newer or damaged"):
        fit(tmp_path, store, resume=str(tmp_path / "checkpoints" / "step_2"))


@pytest.mark.usefixtures("clean_world")
def test_a_finished_run_resumes_to_nothing_to_do(tmp_path: Path, store: Path) -> None:
    fit(tmp_path, store)
    before = (tmp_path / "checkpoints" / "step_6" / "manifest.json").read_bytes()
    fit(tmp_path, store, resume="auto")
    assert (tmp_path / "checkpoints" / "step_6" / "manifest.json").read_bytes() == before
    assert sorted(cli.steps_of(tmp_path)) == list(range(1, 7))
