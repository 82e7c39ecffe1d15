"""Shape of a decoder. Free of torch."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import AfterValidator, ValidationInfo, model_validator

from accelbridge.config import Section

_FFN_MULTIPLE = 64


def _positive(value: float, info: ValidationInfo) -> float:
    if not 0 < value < math.inf:  # not a number is neither
        raise ValueError(f"{info.field_name} must be positive; found {value}; give a number above 0")
    return value


def _probability(value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"dropout must be at least 0 and below 1; found {value}; give a probability such as 0.1")
    return value


Count = Annotated[int, AfterValidator(_positive)]
Number = Annotated[float, AfterValidator(_positive)]
Probability = Annotated[float, AfterValidator(_probability)]


class ModelConfig(Section):
    """A Llama-type decoder: RMSNorm before each block, rotary positions, grouped heads, SwiGLU."""

    vocab_size: Count
    dim: Count
    layers: Count
    heads: Count
    kv_heads: Count | None = None
    """Key/value heads; default: as many as ``heads``."""
    head_dim: Count | None = None
    """Default: ``dim // heads``."""
    ffn_dim: Count | None = None
    """Default: 8/3 of ``dim``, rounded up to a multiple of 64."""
    rope_theta: Number = 10000.0
    norm_eps: Number = 1e-5
    window: Count | None = None
    """Sliding window: a token sees itself and at most ``window - 1`` before it."""
    softcap: Number | None = None
    """Attention scores are capped smoothly to +-``softcap``."""
    tie_embeddings: bool = False
    """The output projection is the embedding's parameter."""
    dropout: Probability = 0.0
    """Share of the elements that training drops from the embedding and from what each block adds; the same ones in
    every layout."""

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelConfig:
        if self.heads % self.resolved_kv_heads:
            fitting = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"heads must be a multiple of kv_heads; found heads={self.heads}, kv_heads={self.kv_heads}; "
                f"set kv_heads to one of {', '.join(map(str, fitting))}"
            )
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(
                f"dim must be a multiple of heads where head_dim is not given; found dim={self.dim}, "
                f"heads={self.heads}; change one of them or set head_dim"
            )
        if self.resolved_head_dim % 2:
            raise ValueError(
                f"head_dim must be even, since rotary positions turn pairs; found {self.resolved_head_dim}; "
                f"set head_dim to {self.resolved_head_dim + 1}, say"
            )
        return self

    @property
    def resolved_kv_heads(self) -> int:
        """``kv_heads`` or its default."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def resolved_head_dim(self) -> int:
        """``head_dim`` or its default."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def resolved_ffn_dim(self) -> int:
        """``ffn_dim`` or its default."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return -(-8 * self.dim // (3 * _FFN_MULTIPLE)) * _FFN_MULTIPLE

    def matmul_parameter_count(self) -> int:
        """Parameters that multiply every token: all projections and the output, also where that is tied."""
        attention = 2 * self.dim * self.resolved_head_dim * (self.heads + self.resolved_kv_heads)
        ffn = 3 * self.dim * self.resolved_ffn_dim
        return self.layers * (attention + ffn) + self.vocab_size * self.dim

    def parameter_count(self) -> int:
        """All parameters; a tied one counts once."""
        norms = (2 * self.layers + 1) * self.dim
        embedding = 0 if self.tie_embeddings else self.vocab_size * self.dim
        return self.matmul_parameter_count() + norms + embedding

    def flops_per_token(self, seq_len: int) -> int:
        """Model FLOPs of a training step per token, forward and backward: ``6 N + 12 L H D S``.

        PaLM (arXiv:2204.02311), appendix B, with N the parameters that multiply (no embedding look-up, no
        norms). By its convention the attention term counts every pair of tokens: it is not halved for a
        causal mask, nor reduced for a window or segments.
        """
        attention = 12 * self.layers * self.heads * self.resolved_head_dim * seq_len
        return 6 * self.matmul_parameter_count() + attention
