"""A Llama-type decoder, written on :mod:`accelbridge.ops`.

Modules see local shapes when their parameters are split over heads, so head counts are inferred, never
stored. Nothing but parameters needs materialising after a build on the meta device.
Shape suffixes: B batch, S sequence, M model dim, H heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from accelbridge import ops
from accelbridge.backend import Mask
from accelbridge.models.config import ModelConfig
from accelbridge.models.dropout import Dropout, name_sites
from accelbridge.models.init import ONES, Init, initial_values
from accelbridge.models.shapes import DECODER_SPEC
from accelbridge.parallel.spec import ShardingSpec

_STD = 0.02


class Linear(nn.Linear):
    """``nn.Linear`` without bias, on :func:`accelbridge.ops.linear`; the decoder sets its values."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: see :meth:`Decoder.reset_parameters`."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight)


class ToLoss:
    """What an output projection can do besides logits: go on to the loss, so that they never exist whole."""

    weight: Any

    def loss(self, x_BSM: Tensor, targets_BS: Tensor, group: ProcessGroup | None = None) -> Tensor:
        """Sum of the cross-entropies of ``x weight^T``; ``group``: those who hold a part of the vocabulary each."""
        x_NM, targets_N = x_BSM.flatten(0, -2), targets_BS.flatten()
        if group is None:
            return ops.linear_cross_entropy(x_NM, self.weight, targets_N)
        return ops.vocab_parallel_linear_cross_entropy(x_NM, self.weight, targets_N, group)


class Head(ToLoss, Linear):
    """Output projection with a weight of its own."""


class Embedding(nn.Embedding):
    """``nn.Embedding`` on :func:`accelbridge.ops.embedding`; the decoder sets its values."""

    def reset_parameters(self) -> None:
        """Nothing: see :meth:`Decoder.reset_parameters`."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.embedding(input, self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm on :func:`accelbridge.ops.rms_norm`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x_BSM: Tensor) -> Tensor:
        return ops.rms_norm(x_BSM, self.weight, self.eps)


class TiedHead(ToLoss, nn.Module):
    """Output projection whose weight is the embedding's.

    It holds the embedding, not the parameter, and not as a child: moving a module off the meta device would
    give each owner a parameter of its own.
    """

    def __init__(self, embed: Embedding) -> None:
        super().__init__()
        self._embed = (embed,)

    @property
    def weight(self) -> Tensor:
        return self._embed[0].weight

    def forward(self, x_BSM: Tensor) -> Tensor:
        return ops.linear(x_BSM, self.weight)


class Context:
    """What all layers of one forward pass share.

    A plain class, since sharding wrappers look into dataclasses and containers to cast floating-point
    arguments to the compute dtype, and rotations must stay float32.
    """

    __slots__ = ("cos_SP", "mask", "sin_SP")

    def __init__(self, cos_SP: Tensor, sin_SP: Tensor, mask: Mask) -> None:
        self.cos_SP = cos_SP
        self.sin_SP = sin_SP
        self.mask = mask


class SelfAttention(nn.Module):
    """Causal self-attention with grouped heads and rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.resolved_head_dim
        self.softcap = config.softcap
        width, kv_width = config.heads * self.head_dim, config.resolved_kv_heads * self.head_dim
        self.q = Linear(config.dim, width)
        self.k = Linear(config.dim, kv_width)
        self.v = Linear(config.dim, kv_width)
        self.o = Linear(width, config.dim)

    def forward(self, x_BSM: Tensor, context: Context) -> Tensor:
        B, S, _ = x_BSM.shape
        q_BSHD, k_BSGD, v_BSGD = (project(x_BSM).view(B, S, -1, self.head_dim) for project in (self.q, self.k, self.v))
        q_BSHD = ops.rope(q_BSHD, context.cos_SP, context.sin_SP)
        k_BSGD = ops.rope(k_BSGD, context.cos_SP, context.sin_SP)
        out_BHSD = ops.attention(
            q_BSHD.transpose(1, 2),
            k_BSGD.transpose(1, 2),
            v_BSGD.transpose(1, 2),
            context.mask,
            softcap=self.softcap,
        )
        return self.o(out_BHSD.transpose(1, 2).reshape(B, S, -1))


class FeedForward(nn.Module):
    """SwiGLU block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.resolved_ffn_dim)
        self.up = Linear(config.dim, config.resolved_ffn_dim)
        self.down = Linear(config.resolved_ffn_dim, config.dim)

    def forward(self, x_BSM: Tensor) -> Tensor:
        return self.down(ops.swiglu(self.gate(x_BSM), self.up(x_BSM)))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = SelfAttention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)
        self.attention_dropout, self.ffn_dropout = _dropout(config), _dropout(config)

    def forward(self, x_BSM: Tensor, context: Context) -> Tensor:
        x_BSM = x_BSM + _dropped(self.attention_dropout, self.attention(self.attention_norm(x_BSM), context))
        return x_BSM + _dropped(self.ffn_dropout, self.ffn(self.ffn_norm(x_BSM)))


def _dropout(config: ModelConfig) -> Dropout | None:
    return Dropout(config.dropout) if config.dropout else None


def _dropped(dropout: Dropout | None, x_BSM: Tensor) -> Tensor:
    return x_BSM if dropout is None else dropout(x_BSM)


class Decoder(nn.Module):
    """Token ids to logits. Built under ``torch.device("meta")`` it holds no memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.dim)
        self.embed_dropout = _dropout(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = TiedHead(self.embed) if config.tie_embeddings else Head(config.dim, config.vocab_size)
        name_sites(self)
        self.reset_parameters()

    def forward(self, tokens_BS: Tensor, segments_BS: Tensor | None = None, targets_BS: Tensor | None = None) -> Tensor:
        """Logits ``[B, S, V]`` of the token after each one, in the parameters' dtype; with ``targets_BS`` the sum of
        their cross-entropies instead, for which logits never exist whole (-100: not counted).

        ``segments_BS`` holds a document id per token; a token sees its own document only. Positions run on
        over document boundaries: rotary attention depends on their differences alone.
        """
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        cos_SP, sin_SP = ops.rope_table(positions_S, self.config.resolved_head_dim, self.config.rope_theta)
        mask = Mask(causal=True, window=self.config.window, segments_BS=segments_BS)
        context = Context(cos_SP, sin_SP, mask)
        x_BSM = _dropped(self.embed_dropout, self.embed(tokens_BS))
        for layer in self.layers:
            x_BSM = layer(x_BSM, context)
        x_BSM = self.norm(x_BSM)
        return self.head(x_BSM) if targets_BS is None else self.head.loss(x_BSM, targets_BS)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Fill all parameters as :meth:`initialiser` says; nothing on the meta device.

        ``seed`` defaults to torch's, so that ``torch.manual_seed`` decides. A model filled by
        :func:`~accelbridge.models.init.initial_values` with the same seed and names is equal, bit by bit.
        """
        seed = torch.initial_seed() if seed is None else seed
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not parameter.is_meta:
                    rows = range(parameter.shape[0])
                    parameter.copy_(initial_values(seed, name, tuple(parameter.shape), rows, self.initialiser(name)))

    def initialiser(self, name: str) -> Init:
        """How the parameter of this full name starts: norms at one, the rest normal with deviation 0.02.

        Projections into the residual stream are smaller by ``sqrt(2 * layers)``, since so many are added up
        (GPT-2, section 2.3). Raises ``ValueError`` for another name.
        """
        owner = name.removesuffix(".weight").rpartition(".")[2]
        if owner in ("attention_norm", "ffn_norm", "norm"):
            return ONES
        if owner in ("o", "down"):
            return Init("normal", _STD / math.sqrt(2 * self.config.layers))
        if owner in ("embed", "head", "q", "k", "v", "gate", "up"):
            return Init("normal", _STD)
        raise ValueError(f"the decoder has no parameter {name}")

    def sharding_spec(self) -> ShardingSpec:
        """Each layer is gathered on its own; heads, the feed-forward and the vocabulary are split over tp."""
        return DECODER_SPEC

    def attention_needs(self, segments: bool = False) -> frozenset[str]:
        """What this model asks of the op attention (see :class:`~accelbridge.backend.Request`).

        ``segments``: whether batches will carry document ids.
        """
        asked = {
            "causal": True,
            "window": self.config.window is not None,
            "softcap": self.config.softcap is not None,
            "gqa": self.config.resolved_kv_heads != self.config.heads,
            "segments": segments,
        }
        return frozenset(need for need, wanted in asked.items() if wanted)
