"""A small Llama-like language model and a training loop, for runs that must be equal on two devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64


class Block(nn.Module):
    """Attention and a gated feed-forward part."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_mid = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        y = self.norm_in(x)
        q, k, v = (
            part(y).view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).reshape(batch, length, dim))
        y = self.norm_mid(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Two blocks of width 32."""

    def __init__(self, dim: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(**options: Any) -> MakeOptimizer:
    """AdamW with the learning rate of these runs."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, **options)


def _unchanged(model: nn.Module) -> nn.Module:
    return model


@dataclass
class Run:
    """One training run; ``wrap`` shards, replicates or compiles the model."""

    device: str
    steps: int = 5
    optimizer: MakeOptimizer = field(default_factory=lambda: adamw(foreach=False))
    autocast: torch.dtype | None = None
    wrap: Callable[[Any], nn.Module] = _unchanged
    stream: int = 0
    """Which data: each rank its own."""
    model: nn.Module = field(init=False)

    def losses(self) -> list[float]:
        """Train from the same first values as every run and return the loss of each step."""
        torch.manual_seed(0)
        self.model = self.wrap(Model().to(self.device))
        optimizer = self.optimizer(self.model.parameters())
        losses = []
        for step in range(self.steps):
            loss = self._loss(step)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    def _loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.stream)
        tokens = torch.randint(0, VOCABULARY, (4, 17), generator=generator).to(self.device)
        kind = torch.device(self.device).type
        casting = torch.autocast(kind, dtype=self.autocast) if self.autocast else contextlib.nullcontext()
        with casting:
            logits = self.model(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
