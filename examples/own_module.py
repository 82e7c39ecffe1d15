"""Train a module and a dataset of your own on whatever backend is here: ``python examples/own_module.py OUT``.

torchrun --nproc-per-node 2 examples/own_module.py OUT      the same, sharded over two devices
"""

import sys

import torch
from torch import Tensor, nn

from accelbridge import Trainer


class Classifier(nn.Module):
    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


class CountingUp:
    """256 samples in which each token is followed by the next number."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = torch.arange(index, index + 17) % 64
        return {"tokens": numbers[:-1], "targets": numbers[1:]}


torch.manual_seed(0)
recipe = {"train": {"steps": 60, "global_batch_size": 16}, "optimizer": {"lr": 1e-2}, "output": {"dir": sys.argv[1]}}
Trainer(recipe, model=Classifier(), data=CountingUp()).fit()
