"""Compute in bfloat16 on virtual devices: the numbers of the CPU backend, and gradients that add up in float32."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelbridge.errors import ConfigError
from accelbridge.train.trainer import Trainer
from backends.xla.tests import environment

HERE = Path(__file__).parent
STEPS = 10


pytestmark = environment.needs_torch_xla


def recipe(folder: Path, name: str, compute: str, **parallel: int) -> Path:
    sections: dict[str, Any] = {
        "model": {"vocab_size": 288, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 96},
        "data": {"train": str(folder / "store" / "train")},
        "train": {"steps": STEPS, "seq_len": 32, "global_batch_size": 8, "microbatch_size": 2 * 4 // parallel["data"]},
        "parallel": {key: value for key, value in parallel.items() if key != "data"},
        "precision": {"compute": compute},
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "metrics": {"interval": 5},
        "output": {"dir": str(folder / f"run-{name}")},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(sections))
    return path


def losses(folder: Path, name: str) -> list[float]:
    text = (folder / f"run-{name}" / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, text) if "event" not in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of both backends in both dtypes; the program of the sharded one is dumped."""
    folder = tmp_path_factory.mktemp("bfloat16")
    env = environment.environment(folder / "site")
    package = environment.ROOT / "accelbridge"
    build = ("data", "build", package, folder / "store", "--suffix", ".py", "--validation-fraction", "0.1")
    environment.python("-m", "accelbridge", *build, env=env)
    for compute in ("float32", "bfloat16"):
        Trainer(recipe(folder, f"cpu-{compute}", compute, data=1), backend="cpu").fit()
    for name, parallel in (("sharded", {"data": 4}), ("both", {"tp": 2, "data": 2})):
        flags = {"XLA_FLAGS": f"--xla_dump_to={folder / name} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=spmd.*"}
        command = ("-m", "accelbridge", "train", recipe(folder, name, "bfloat16", **parallel), "--backend", "xla")
        environment.python(*command, env=env | flags)
    return folder


@pytest.mark.parametrize("name", ["sharded", "both"])
def test_losses_are_those_of_bfloat16(folder: Path, name: str) -> None:
    """Closer to the CPU's bfloat16 than bfloat16's own rounding, as one run in float32 shows it, allows for."""
    ours, theirs, exact = (losses(folder, each) for each in (name, "cpu-bfloat16", "cpu-float32"))
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert ours != pytest.approx(exact, rel=1e-6), "this computed in float32"


def test_gradients_add_up_in_float32_between_devices(folder: Path) -> None:
    """Where data alone is parallel, nothing but gradients, loss and norms is reduced. Read where the partitioner has
    put in the collectives: later XLA's CPU client widens every one of them."""
    dumped = (folder / "sharded").glob("*after_spmd-partitioning*.txt")
    programs = "\n".join(path.read_text() for path in dumped)
    reduced = re.findall(r"= \(?(\w+)\[[^\n]* (?:all-reduce|reduce-scatter)\(", programs)
    assert "f32" in reduced
    assert "bf16" not in reduced
    assert re.search(r"= bf16\[[^\n]* dot\(", programs), "nothing was computed in bfloat16"


class OwnEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(288, 16)
        self.head = nn.Linear(16, 288, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_a_module_that_would_compute_in_float32_is_refused() -> None:
    from accelbridge_xla import bfloat16

    embed = OwnEmbedding().embed
    embed.register_forward_hook(bfloat16.watch("embed"))
    with pytest.raises(ConfigError, match=r"bfloat16 asked; module embed \(Embedding\) returned torch.float32"):
        embed(torch.tensor([1, 2]))


def test_gradients_of_the_ops_are_float32_sums() -> None:
    """Of many equal terms: in bfloat16 their sum would stand still at 256."""
    from accelbridge_xla import bfloat16

    x = torch.ones(1000, 4, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = torch.ones(3, 4, requires_grad=True), torch.zeros(3, requires_grad=True)
    out = bfloat16.linear(x, weight, bias)
    assert out.dtype == torch.bfloat16
    out.sum(dtype=torch.float32).backward()
    for gradient in (weight.grad, bias.grad):
        assert gradient is not None
        assert gradient.dtype == torch.float32
        assert bool((gradient == 1000).all())
    assert x.grad is not None
    assert bool((x.grad == 3).all())
    table = torch.zeros(5, 4, requires_grad=True)
    bfloat16.embedding(torch.zeros(1000, dtype=torch.int64), table).sum(dtype=torch.float32).backward()
    assert table.grad is not None
    assert bool((table.grad[0] == 1000).all())
