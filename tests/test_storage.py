"""Quantized tensors in state dicts and files: what was meant comes back, and what is damaged is named."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from accelbridge.checkpoint.export import Quantize, export
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.save import Checkpointer
from accelbridge.cli import main
from accelbridge.errors import CheckpointError, ConfigError, Unsupported
from accelbridge.portable.fp8 import quantized
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.quantized import QuantizedTensor
from accelbridge.precision.scalings import SCALINGS
from accelbridge.precision.storage import from_state, names, to_state

FN, FNUZ, IEEE = FORMATS["float8_e4m3fn"], FORMATS["float8_e4m3fnuz"], FORMATS["float8_e4m3"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(scaling: str = "block128x128", name: str = "float8_e4m3fn") -> QuantizedTensor:
    return quantized(normal(130, 140), FORMATS[name], SCALINGS[scaling])


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    bits = torch.equal(a.codes(a.format.name), b.codes(a.format.name))
    return bits and torch.equal(a.scale, b.scale) and a.format == b.format and a.block == b.block


@pytest.mark.parametrize("scaling", list(SCALINGS))
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e4m3", "float8_e5m2fnuz", "float4_e2m1fn"])
def test_what_was_stored_comes_back(name: str, scaling: str, tmp_path: Path) -> None:
    q = weight(scaling, name)
    save_file(to_state("layers.0.w", q, scaling), tmp_path / "a.safetensors")
    torch.save(to_state("layers.0.w", q), tmp_path / "a.pt")
    files = load_file(tmp_path / "a.safetensors"), torch.load(tmp_path / "a.pt", weights_only=True)
    for state, named in zip(files, (scaling, ""), strict=True):
        assert names(state) == ["layers.0.w"]
        restored = from_state("layers.0.w", state, name)
        assert same(restored.tensor, q)
        assert (restored.scaling, restored.said) == (named, "")
        assert state["layers.0.w.codes"].dtype == torch.uint8
    e8m0 = SCALINGS[scaling].scale_format == "float8_e8m0fnu"
    assert files[0]["layers.0.w.scale"].dtype == (torch.uint8 if e8m0 else torch.float32)


def test_a_transposed_tensor_and_a_narrower_range_come_back() -> None:
    q = quantized(normal(4, 6), replace(FN, max=240.0), SCALINGS["row"]).t()
    assert same(from_state("w", to_state("w", q)).tensor, q)


def test_another_variant_is_converted_and_said_or_refused() -> None:
    q = weight()
    state = to_state("w", q, "block128x128")
    restored = from_state("w", state, "float8_e4m3fnuz")
    assert same(restored.tensor, q.convert(FNUZ))
    assert torch.equal(restored.tensor.dequantize(), q.dequantize())
    assert restored.said.startswith("w: converted from float8_e4m3fn to float8_e4m3fnuz, ")
    assert "scales times 2; every number kept" in restored.said
    codes = torch.tensor([[0x01, 0x02, 0x7E, 0x08]], dtype=torch.uint8)
    few = to_state("w", QuantizedTensor.of_codes(codes, torch.ones(1, 1), FN, (-1, -1)))
    said = "w: converted from float8_e4m3fn to float8_e4m3, other bits, scales times 2; 1 of 4 elements rounded"
    assert from_state("w", few, "float8_e4m3").said == said
    with pytest.raises(
        ConfigError, match=r"w asked as float8_e4m3fnuz without conversion; it is stored as float8_e4m3fn"
    ):
        from_state("w", state, "float8_e4m3fnuz", convert=False)
    assert same(from_state("w", state, "float8_e4m3fn", convert=False).tensor, q)
    with pytest.raises(ConfigError, match=r"w asked as float8; no such format"):
        from_state("w", state, "float8")
    with pytest.raises(Unsupported, match="no variant"):
        from_state("w", state, "float8_e5m2")


def test_scales_and_scalings_that_do_not_fit_are_refused() -> None:
    q = weight("mx")
    with pytest.raises(ConfigError, match=r'w asked.*"row", in blocks of \(1, -1\); its blocks are \(1, 32\)'):
        to_state("w", q, "row")
    with pytest.raises(ConfigError, match=r'"mx"; its scales are not all powers of two'):
        to_state("w", replace(q, scale=q.scale * 1.5), "mx")
    broken = quantized(torch.full((1, 32), float("nan")), FN, SCALINGS["mx"])
    assert from_state("w", to_state("w", broken, "mx")).tensor.dequantize().isnan().all()


def changed(**change: Any) -> Tensor:
    meaning = json.loads(bytes(to_state("w", weight())["w.quantized"].tolist())) | change
    return torch.frombuffer(bytearray(json.dumps(meaning).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("piece", "put", "error"),
    [
        ("codes", None, r"entry w\.codes is missing"),
        ("scale", None, r"entry w\.scale is missing"),
        ("quantized", None, r"entry w\.quantized is missing"),
        ("scale", [1.0], r"w\.scale is a list, not a tensor"),
        ("codes", torch.zeros(130, 140), r"w is damaged: its codes are torch.float32"),
        ("codes", torch.zeros(130, dtype=torch.uint8), r"w is damaged: .*make it a matrix"),
        ("codes", torch.zeros(300, 140, dtype=torch.uint8), r"w is damaged: .*scales are \(2, 2\)"),
        ("scale", torch.zeros(2, 2, dtype=torch.float64), r"w is damaged: its scales are torch.float64"),
        ("scale", torch.zeros(2, 3), r"w is damaged: .*scales are \(2, 3\)"),
        ("quantized", torch.zeros(3), r"w\.quantized is damaged: \(3,\) torch.float32"),
        ("quantized", torch.zeros(5000, dtype=torch.uint8), r"w\.quantized is damaged: \(5000,\)"),
        ("quantized", torch.zeros(3, dtype=torch.uint8), r"w\.quantized is damaged: not JSON"),
        ("quantized", torch.full((4000,), 0x5B, dtype=torch.uint8), r"w\.quantized is damaged: not JSON"),
        ("quantized", torch.tensor([0x5B, 0x5D], dtype=torch.uint8), r"w\.quantized is damaged: it is no object"),
        ("quantized", torch.tensor([0x7B, 0x7D], dtype=torch.uint8), r'damaged: "format" is missing'),
        ("quantized", changed(format="float8_e9"), r'"format" is \'float8_e9\', which this release does not know'),
        ("quantized", changed(format=["float8_e4m3fn"]), r'"format" is \['),
        ("quantized", changed(max=float("inf")), r'"max" is inf'),
        ("quantized", changed(max=1e9), r"w is damaged: .*largest number is 1e\+09"),
        ("quantized", changed(block=[0, 128]), r'"block" is \[0, 128\]'),
        ("quantized", changed(block=[True, 1]), r'"block" is \[True, 1\]'),
        ("quantized", changed(scaling="magic"), r'"scaling" is \'magic\''),
        ("quantized", changed(scale_format="pickle"), r'"scale_format" is'),
    ],
)
def test_damage_is_named(piece: str, put: Any, error: str) -> None:
    state: dict[str, Any] = to_state("w", weight())
    state[f"w.{piece}"] = put
    with pytest.raises(CheckpointError, match=error):
        from_state("w", {name: value for name, value in state.items() if value is not None})


# ----------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {
        "embed.weight": normal(50, 32),
        "layers.0.q.weight": normal(40, 32, seed=1),
        "layers.0.norm.weight": normal(32, seed=2),
        "layers.1.q.weight": normal(40, 32, seed=3),
        "head.weight": normal(50, 32, seed=4),
    }
    saver = Checkpointer(tmp_path, group=None, rank=0)
    saver.save({f"model.{name}": value for name, value in state.items()}, Manifest(step=1, world_size=1))
    saver.close()
    return tmp_path / "step_1"


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["accelbridge", "checkpoint", *args])
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_an_export_is_quantized_and_converted(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out, args = tmp_path / "out", ("--dtype", "bf16", "--quantize", "float8_e4m3fn", "--scaling", "mx")
    assert call(monkeypatch, "export", str(checkpoint), str(out), *args) == 0
    state = load_file(out / "model.safetensors")
    assert names(state) == ["layers.0.q.weight", "layers.1.q.weight"]
    assert [state[name].dtype for name in ("embed.weight", "head.weight", "layers.0.norm.weight")] == [
        torch.bfloat16
    ] * 3
    want = quantized(normal(40, 32, seed=1), FN, SCALINGS["mx"])
    assert same(from_state("layers.0.q.weight", state).tensor, want)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == {"format": "float8_e4m3fn", "scaling": "mx", "tensors": names(state)}

    other = tmp_path / "other.safetensors"
    to = ("convert", str(out / "model.safetensors"), str(other), "--format", "float8_e4m3fnuz")
    capfd.readouterr()
    assert call(monkeypatch, *to, "--no-convert") == 2
    assert "without conversion" in capfd.readouterr().err
    assert call(monkeypatch, *to) == 0
    assert capfd.readouterr().out.count("converted from float8_e4m3fn to float8_e4m3fnuz") == 2
    converted = load_file(other)
    assert converted.keys() == state.keys()
    assert same(from_state("layers.0.q.weight", converted).tensor, want.convert(FNUZ))
    assert torch.equal(converted["embed.weight"], state["embed.weight"])
    assert call(monkeypatch, *to) == 2
    assert "nothing is overwritten" in capfd.readouterr().err
    for file, said in ((checkpoint / "manifest.json", "cannot be read as safetensors"), (tmp_path / "no", "cannot be")):
        assert call(monkeypatch, "convert", str(file), str(tmp_path / "third"), "--format", "float8_e4m3fnuz") == 2
        assert said in capfd.readouterr().err


def test_what_is_quantized_can_be_chosen(checkpoint: Path, tmp_path: Path) -> None:
    done = export(checkpoint, tmp_path / "out", shard_bytes=4000, quantize=Quantize("float8_e4m3", "row", "*d.weight"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(names(index)) == {"embed.weight", "head.weight"}
    for name in names(index):
        assert len({index[f"{name}.{piece}"] for piece in ("codes", "scale", "quantized")}) == 1
    assert done.tensors == 5
    for quantize, error in (
        (("float8_e4m3fn", "row", "*.bias"), r"none of the 5 weights are matrices that match '\*.bias'"),
        (("float8", "row"), r"quantizing to float8 asked; no such format"),
        (("float8_e8m0fnu", "row"), r"quantizing to float8_e8m0fnu asked"),
        (("float8_e4m3fn", "rows"), r'scaling "rows" asked'),
    ):
        with pytest.raises(ConfigError, match=error):
            export(checkpoint, tmp_path / "more", quantize=Quantize(*quantize))


def test_weights_that_are_not_finite_are_not_quantized(tmp_path: Path) -> None:
    saver = Checkpointer(tmp_path, group=None, rank=0)
    saver.save({"model.0.w": torch.tensor([[1.0, float("inf")]])}, Manifest(step=1, world_size=1))
    saver.close()
    with pytest.raises(CheckpointError, match=r"0\.w has values that are not finite"):
        export(tmp_path / "step_1", tmp_path / "out", quantize=Quantize("float8_e4m3fn"))


def test_scaling_without_quantizing_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "export", str(checkpoint), str(tmp_path / "out"), "--scaling", "row") == 2
    assert "without --quantize" in capfd.readouterr().err
