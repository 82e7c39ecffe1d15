"""Train a module and a dataset of your own on whatever backend is here: ``python examples/own_module.py OUT``.

torchrun --nproc-per-node 2 examples/own_module.py OUT        the same, sharded over two devices
torchrun --nproc-per-node 2 examples/own_module.py OUT 2      the same, every matrix split over them (parallel.tp)
"""

import sys

import torch
from torch import Tensor, nn

from accelbridge import Trainer
from accelbridge.parallel.spec import ShardingSpec


class Successor(nn.Module):
    def __init__(self, vocabulary: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, dim)) for _ in range(2))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def sharding_spec(self) -> ShardingSpec:  # only tp needs one
        styles = {"embed": "vocab_embedding", "layers.*.0": "column", "layers.*.2": "row", "head": "vocab_head"}
        return ShardingSpec(units=("layers.*",), tensor_parallel=styles)


torch.manual_seed(0)
numbers = torch.arange(300) % 64  # each is followed by the next; a dataset is whatever has len() and [i]
samples = [{"tokens": numbers[i : i + 16], "targets": numbers[i + 1 : i + 17]} for i in range(256)]
tp = int(sys.argv[2]) if len(sys.argv) > 2 else 1
recipe = {"parallel": {"tp": tp}, "train": {"steps": 60}, "optimizer": {"lr": 1e-2}, "output": {"dir": sys.argv[1]}}
Trainer(recipe, model=Successor(), data=samples).fit()
