"""How large, and how long: what is measured in full, quickly, and in miniature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cases import Size

from accelbridge.models.config import ModelConfig


@dataclass(frozen=True)
class Llama:
    """Widths of one model's linear layers."""

    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    head_dim: int = 128

    def layers(self) -> dict[str, tuple[int, int]]:
        """(n, k) of each product x [m, k] w^T [k, n], as they are fused where inputs are shared."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.dim),
            "o": (self.dim, self.heads * self.head_dim),
            "gate and up": (2 * self.ffn_dim, self.dim),
            "down": (self.dim, self.ffn_dim),
        }


LLAMA_8B = Llama(4096, 32, 8, 14336)
LLAMA_70B = Llama(8192, 64, 8, 28672)
"""Llama 3, arXiv:2407.21783, table 3."""


@dataclass(frozen=True)
class Heads:
    """Attention of one layer: [batch, heads, sequence, head_dim]."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    tokens: int = 16384
    """Batch times sequence."""
    sequences: tuple[int, ...] = (4096, 8192)
    window: int = 1024


@dataclass(frozen=True)
class Sizes:
    """What one run measures."""

    name: str
    total_s: float
    """Seconds that a run takes at most, from the first section to the last."""
    budgets: Mapping[str, float]
    """Seconds that each section may take, its process's start included. The last one is given what others leave."""
    seconds: float
    """Of device time for one group of things that are compared."""
    rounds: int
    """In which they take turns."""
    rotate_bytes: int
    """Inputs are rotated over at least so many bytes, and over twice the L2 cache. Large, since a device may have
    another cache before its memory, of which no property tells."""
    copies: tuple[int, ...]
    """Bytes that are copied, to know the bandwidth."""
    llamas: Mapping[str, Llama]
    tokens: tuple[int, ...]
    heads: Heads
    decoder: ModelConfig
    """Trained, and a stack of its layers captured as a graph."""
    seq_len: int
    microbatches: tuple[int, ...]
    """Tried in this order until one fits into the memory."""
    steps: int
    """Timed steps of a training run, after as many as ``warmup``."""
    warmup: int
    stack_sequences: tuple[int, ...]
    overhead: Size
    turns: int
    turn_steps: int
    conform_levels: str = "core,fp8"
    conform_only: str = ""
    emulated: bool = False
    """Whether what is only emulated is timed, too: to see that this program runs, as that is nobody's speed."""
    host: bool = field(default=False)
    """Whether a host processor will do as the device."""


FULL = Sizes(
    name="full",
    total_s=465,
    budgets={
        "bandwidth": 20,
        "gemm": 105,
        "attention": 60,
        "kernels": 240,
        "training": 80,
        "graphs": 40,
        "overhead": 60,
        "conformance": 240,
    },
    seconds=1.2,
    rounds=6,
    rotate_bytes=512 * 2**20,
    copies=(64 * 2**20, 2**30),
    llamas={"8B": LLAMA_8B, "70B": LLAMA_70B},
    tokens=(4096, 8192),
    heads=Heads(),
    decoder=ModelConfig(vocab_size=32768, dim=2048, layers=16, heads=16, kv_heads=8, ffn_dim=8192),
    seq_len=4096,
    microbatches=(4, 2, 1),
    steps=12,
    warmup=4,
    stack_sequences=(512, 2048),
    overhead=Size(
        {"vocab_size": 257, "dim": 768, "layers": 12, "heads": 12, "kv_heads": 4, "ffn_dim": 2048},
        global_batch_size=8,
        seq_len=1024,
    ),
    turns=6,
    turn_steps=20,
)

QUICK = replace(
    FULL,
    name="quick",
    total_s=200,
    budgets={
        "bandwidth": 15,
        "gemm": 35,
        "attention": 25,
        "kernels": 90,
        "training": 50,
        "graphs": 25,
        "overhead": 40,
        "conformance": 60,
    },
    seconds=0.5,
    llamas={"8B": LLAMA_8B},
    tokens=(4096,),
    heads=Heads(sequences=(4096,)),
    steps=6,
    stack_sequences=(512,),
    turns=4,
    conform_levels="core",
    conform_only="INF,MM,ATT",
)

TINY = Sizes(
    name="tiny",
    total_s=115,
    budgets={
        "bandwidth": 20,
        "gemm": 30,
        "attention": 30,
        "kernels": 60,
        "training": 40,
        "graphs": 25,
        "overhead": 40,
        "conformance": 60,
    },
    seconds=0.02,
    rounds=2,
    rotate_bytes=2**18,
    copies=(2**18,),
    llamas={"miniature": Llama(64, 4, 2, 192, 32)},
    tokens=(128,),
    heads=Heads(heads=4, kv_heads=2, head_dim=16, tokens=128, sequences=(64,), window=16),
    decoder=ModelConfig(vocab_size=256, dim=64, layers=2, heads=2, kv_heads=1, ffn_dim=128),
    seq_len=64,
    microbatches=(2,),
    steps=2,
    warmup=1,
    stack_sequences=(32,),
    overhead=Size(
        {"vocab_size": 257, "dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 64},
        global_batch_size=4,
        seq_len=32,
    ),
    turns=2,
    turn_steps=3,
    conform_levels="core",
    conform_only="INF-001,INF-007,MM-001",
    emulated=True,
    host=True,
)

SIZES = {sizes.name: sizes for sizes in (FULL, QUICK, TINY)}
