"""``accelbridge checkpoint``: what it lists, verifies and exports is what the run wrote."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accelbridge.checkpoint.export import export
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.save import Checkpointer
from accelbridge.cli import main
from accelbridge.errors import CheckpointError, ConfigError
from accelbridge.models.config import ModelConfig
from accelbridge.models.decoder import Decoder
from tests import cli
from tests.ranks import run_ranks
from tests.scenes import TP, train_all
from tests.scenes import tensors as tensors_of

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A run of two ranks that split the model over tp, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("export")
    sections = {**TP, "train": {"steps": 4}, "checkpoint": {"interval": 2}}
    run_ranks(train_all, 2, folder, store, {"run": sections}, timeout=120)
    return folder / "run"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """``accelbridge checkpoint ARGS`` in this process: exit code, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["accelbridge", "checkpoint", *args])
        code = 0
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {n.removeprefix("model."): t for n, t in tensors_of(checkpoint).items() if n.startswith("model.")}


def test_an_export_loads_into_the_model(run: Path, tmp_path: Path, call: Call) -> None:
    code, said, _ = call("export", str(run / "checkpoints" / "step_4"), str(tmp_path / "out"))
    assert code == 0
    assert "model.safetensors" in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["format"], config["step"]) == ("accelbridge-model", 4)
    model = Decoder(ModelConfig.model_validate(config["model"]))
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    expected = weights(run / "checkpoints" / "step_4")
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in said


def test_above_a_size_there_are_several_files_and_an_index(run: Path, tmp_path: Path) -> None:
    done = export(run / "checkpoints" / "step_4", tmp_path / "out", "bfloat16", shard_bytes=10_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert {*files, "model.safetensors.index.json", "config.json"} == set(done.files)
    found = {name: load_file(tmp_path / "out" / file)[name] for name, file in index["weight_map"].items()}
    expected = weights(run / "checkpoints" / "step_4")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in found.items())
    assert index["metadata"]["total_size"] == done.bytes == sum(tensor.nbytes for tensor in found.values())
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 10_000


def test_values_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, group=None, rank=0)
    saver.save({"model.a": torch.tensor([1e6])}, Manifest(step=1, world_size=1))
    saver.close()
    with pytest.raises(CheckpointError, match=r"model\.a has values up to 1e\+06, which float16 cannot hold"):
        export(tmp_path / "step_1", tmp_path / "out", "float16")
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"], "no half of an export is left"


def test_what_cannot_be_exported(run: Path, tmp_path: Path, call: Call) -> None:
    checkpoint = run / "checkpoints" / "step_4"
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        export(checkpoint, tmp_path / "there")
    code, _, said = call("export", str(checkpoint), str(tmp_path / "out"), "--dtype", "int4")
    assert code == 2
    assert "--dtype int4 asked" in said
    damaged = Path(shutil.copytree(checkpoint, tmp_path / "step_4"))
    (damaged / "__1_0.distcp").unlink()
    code, _, said = call("export", str(damaged), str(tmp_path / "out"))
    assert code == 2
    assert "__1_0.distcp is missing" in said
    saver = Checkpointer(tmp_path, group=None, rank=0)
    saver.save({"optimizer.a": torch.zeros(1)}, Manifest(step=1, world_size=1))
    saver.close()
    with pytest.raises(CheckpointError, match="holds no weights"):
        export(tmp_path / "step_1", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_verify(run: Path, tmp_path: Path, call: Call) -> None:
    code, said, _ = call("verify", str(run / "checkpoints" / "step_4"))
    assert code == 0
    assert "all checksums match" in said
    assert "__1_0.distcp" in said
    damaged = Path(shutil.copytree(run / "checkpoints" / "step_4", tmp_path / "step_4"))
    content = bytearray((damaged / "__1_0.distcp").read_bytes())
    content[-1] ^= 1
    (damaged / "__1_0.distcp").write_bytes(content)
    code, said, error = call("verify", str(damaged))
    assert code == 2
    assert [line.split()[0] for line in said.splitlines() if "distcp" in line] == ["ok", "DAMAGED"]
    assert "__1_0.distcp does not match its checksum" in error
    assert call("verify", str(tmp_path / "absent"))[0] == 2


def test_list(run: Path, tmp_path: Path, call: Call) -> None:
    output = Path(shutil.copytree(run, tmp_path / "run"))
    (output / "checkpoints" / "step_2" / "manifest.json").write_text("{")
    (output / "checkpoints" / ".step_6.partial").mkdir()
    (output / "checkpoints" / "step_9.damaged").mkdir()
    code, said, _ = call("list", str(output))
    assert code == 0
    states = {line.split()[0]: line.split()[1] for line in said.splitlines()}
    assert states == {
        "step_2": "unusable",
        "step_4": "complete",
        ".step_6.partial": "unfinished",
        "step_9.damaged": "set",
    }
    loss = cli.steps_of(run)[4]["loss"]
    assert f"loss {loss:.4f}" in said
    rows = json.loads(call("list", str(output / "checkpoints"), "--json")[1])
    assert rows[1]["metrics"] == {"loss": loss}
    assert rows[1]["ranks"] == 2
    assert call("list", str(tmp_path / "absent"))[0] == 2
