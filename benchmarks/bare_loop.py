"""What a careful person writes by hand: a Llama-type model and a loop with FSDP2, and nothing else around it.

This file imports nothing of accelbridge: it is what its overhead is measured against (overhead.py), and the peers of
peers.py train the same model on the same batches, each with its own library in place of ``main``.

Shape suffixes: B batch, S sequence, M model dim, H heads, G key/value heads, D head dim, P = D / 2, V vocabulary.
"""

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gate import Gate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# --------------------------------------------------------------------------------------------------- the model


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BSM: Tensor) -> Tensor:
        wide = x_BSM.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x_BSM.dtype)


def rotations(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions, float32 [S, P]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.arange(length, dtype=torch.float32, device=device).unsqueeze(-1) * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x_BSHD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    cos, sin = cos_SP.unsqueeze(-2), sin_SP.unsqueeze(-2)
    first, second = x_BSHD.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHD.dtype)


def visible_keys(segments_BS: Tensor) -> Tensor:
    """bool [B, 1, S, S]: which keys each query sees."""
    S = segments_BS.shape[1]
    before = torch.ones(S, S, dtype=torch.bool, device=segments_BS.device).tril()
    return ((segments_BS.unsqueeze(2) == segments_BS.unsqueeze(1)) & before).unsqueeze(1)


class Shared:
    """What all layers of a forward pass share; FSDP2 does not look into it to cast the rotations."""

    def __init__(self, cos_SP: Tensor, sin_SP: Tensor, visible_B1SS: Tensor | None) -> None:
        self.cos_SP, self.sin_SP, self.visible_B1SS = cos_SP, sin_SP, visible_B1SS


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x_BSM: Tensor, shared: Shared) -> Tensor:
        B, S, _ = x_BSM.shape
        q, k, v = (project(x_BSM).view(B, S, -1, self.head_dim) for project in (self.q, self.k, self.v))
        q = rotate(q, shared.cos_SP, shared.sin_SP).transpose(1, 2)
        k = rotate(k, shared.cos_SP, shared.sin_SP).transpose(1, 2)
        mask = shared.visible_B1SS
        out_BHSD = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.o(out_BHSD.transpose(1, 2).reshape(B, S, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x_BSM: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSM)) * self.up(x_BSM))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, ffn_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = SelfAttention(dim, heads, kv_heads)
        self.ffn_norm = RMSNorm(dim, norm_eps)
        self.ffn = FeedForward(dim, ffn_dim)

    def forward(self, x_BSM: Tensor, shared: Shared) -> Tensor:
        x_BSM = x_BSM + self.attention(self.attention_norm(x_BSM), shared)
        return x_BSM + self.ffn(self.ffn_norm(x_BSM))


class Llama(nn.Module):
    """Parameter names are those of the initial values in the case's ``state.pt``."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int,
        ffn_dim: int,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        documents: bool = True,
    ) -> None:
        super().__init__()
        self.head_dim, self.rope_theta, self.documents = dim // heads, rope_theta, documents
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, kv_heads, ffn_dim, norm_eps) for _ in range(layers))
        self.norm = RMSNorm(dim, norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens_BS: Tensor, segments_BS: Tensor) -> Tensor:
        """Logits [B, S, V]; a token sees those before it, with ``documents`` of its own segment only."""
        S, device = tokens_BS.shape[1], tokens_BS.device
        visible = visible_keys(segments_BS) if self.documents else None
        shared = Shared(*rotations(S, self.head_dim, self.rope_theta, device), visible)
        x_BSM = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSM = layer(x_BSM, shared)
        return self.head(self.norm(x_BSM))


def build(case: dict[str, Any]) -> Llama:
    """The model with the case's initial values."""
    model = Llama(**case["model"], documents=case.get("documents", True))
    model.load_state_dict(torch.load(Path(case["folder"]) / "state.pt", weights_only=True))
    return model


# ------------------------------------------------------------------------------- what the peers' loops share


Batch = tuple[Tensor, Tensor, Tensor]
"""tokens int64 [B, S], targets int64 [B, S] (-100: none), segments int32 [B, S]."""


def batches(case: dict[str, Any], rank: int, size: int) -> Iterator[Batch]:
    """This rank's batch of each step: samples as ``order.npy`` has them, cut from ``tokens.npy``."""
    tokens = np.load(Path(case["folder"]) / "tokens.npy", mmap_mode="r")
    order = np.load(Path(case["folder"]) / "order.npy")
    length, share = case["seq_len"], case["global_batch_size"] // size
    for samples in order[:, rank * share : (rank + 1) * share]:
        rows = np.stack([tokens[i * length : (i + 1) * length + 1] for i in samples]).astype(np.int64)
        ends = rows[:, :-1] == case["end_of_document"]  # the token after one belongs to the next document
        segments = np.zeros(ends.shape, np.int32)
        targets = rows[:, 1:].copy()
        if case.get("documents", True):
            segments[:, 1:] = np.cumsum(ends[:, :-1], axis=1)
            targets[ends] = -100
        yield torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(targets), torch.from_numpy(segments)


def loss_sum(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), reduction="sum")


def count(targets_BS: Tensor) -> Tensor:
    return (targets_BS != -100).sum(dtype=torch.float32)


def build_optimizer(case: dict[str, Any], model: nn.Module) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": case["weight_decay"]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=case["lr"], betas=(0.9, 0.95), eps=1e-8, fused=True)


def rate(case: dict[str, Any], step: int) -> float:
    """Learning rate: linear warm-up, then a cosine to a tenth."""
    warmup, steps = case["warmup_steps"], case["steps"]
    if step < warmup:
        return case["lr"] * (step + 1) / warmup
    return case["lr"] * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - 1 - warmup))))


def set_rate(case: dict[str, Any], optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate(case, step)


class Log:
    """Keeps each step's loss, and adds them up over the ranks and prints at intervals."""

    def __init__(self, case: dict[str, Any], rank: int) -> None:
        self.interval, self.steps, self.rank = case["metrics_interval"], case["steps"], rank
        self.pending: list[Tensor] = []
        self.losses: list[float] = []

    def __call__(self, step: int, loss: Tensor) -> None:
        """``loss``: this rank's share of the step's mean loss."""
        self.pending.append(loss)
        if (step + 1) % self.interval == 0 or step + 1 == self.steps:
            losses = torch.stack(self.pending)
            dist.all_reduce(losses)
            self.losses += losses.tolist()
            self.pending.clear()
            if self.rank == 0:
                print(f"step {step + 1}  loss {self.losses[-1]:.4f}", flush=True)


def start() -> tuple[dict[str, Any], int, int]:
    """The case, and this process's rank and the number of them."""
    return json.loads(Path(sys.argv[1]).read_text()), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


# ---------------------------------------------------------------------------------------------------- the loop


def main() -> None:
    case, rank, size = start()
    place = case.get("device", "cpu")
    torch.get_device_module(place).set_device(0)
    dist.init_process_group(case.get("process_group", "gloo"))
    gate = Gate(torch.get_device_module(place).synchronize)
    model = build(case).to(place)
    compute = torch.bfloat16 if case["compute"] == "bfloat16" else None
    options: dict[str, Any] = {
        "mesh": init_device_mesh(place, (size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False),
    }
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = build_optimizer(case, model)
    log = Log(case, rank)
    for step, batch in enumerate(batches(case, rank, size)):
        gate(step)
        tokens, targets, segments = (tensor.to(place, non_blocking=True) for tensor in batch)
        total = count(targets)
        dist.all_reduce(total)
        loss = loss_sum(model(tokens, segments), targets) / total
        (loss * size).backward()  # FSDP2 takes the mean of the gradients
        nn.utils.clip_grad_norm_(model.parameters(), case["clip_norm"])
        set_rate(case, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        log(step, loss.detach())
    gate.finish(log.losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
