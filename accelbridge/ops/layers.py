"""Portable references of the ops of a layer: embedding, linear, rms_norm, rope, swiglu."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of ``weight_VD`` by token id: ``[*tokens.shape, D]`` in the weight's dtype."""
    if weight_VD.dim() != 2:
        raise ValueError(f"embedding takes a weight [vocabulary, dim]; found shape {tuple(weight_VD.shape)}")
    return F.embedding(tokens_BS, weight_VD)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for ``x [*, in]``, ``weight [out, in]``, ``bias [out]``: ``[*, out]``."""
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear takes x [*, in] and weight [out, in] with the same in; "
            f"found x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear takes a bias [out]; found bias {tuple(bias.shape)} and weight {tuple(weight.shape)}")
    # Under autocast two dtypes are as good as one: torch casts both.
    if x.device != weight.device or (x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type)):
        raise ValueError(
            f"linear takes x and weight of one dtype on one device; "
            f"found x {x.dtype} on {x.device} and weight {weight.dtype} on {weight.device}"
        )
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in ``x.dtype`` (arXiv:1910.07467, eq.
    4).

    ``weight [x.shape[-1]]``. Everything is computed in float32 (float64 for float64) and rounded once.
    """
    check_rms_norm(x, weight)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def rope_table(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines for :func:`rope`: two float32 tensors ``[*positions.shape, head_dim / 2]``.

    Pair i turns by ``position * theta ** (-2 i / head_dim)`` (arXiv:2104.09864, eq. 15).
    """
    if head_dim % 2:
        raise ValueError(f"rope turns pairs, so it needs an even head_dim; found {head_dim}")
    # Named dtypes: torch.set_default_dtype(bfloat16) must not reach angles that grow with the position.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.to(torch.float32).unsqueeze(-1) * theta**-exponents
    return angles.cos(), angles.sin()


def rope(x_BSHD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """Rotary position embedding of ``x_BSHD`` (sequence before heads, as a projection leaves it).

    ``cos_SP`` and ``sin_SP`` come from :func:`rope_table`, ``[S, P]`` or, for positions per row, ``[B, S,
    P]``. Dimension i is paired with i + D/2 (the order of Llama checkpoints in Hugging Face format). Computed
    in float32 (float64 for float64), result in the dtype of x.
    """
    check_rope(x_BSHD, cos_SP, sin_SP)
    cos, sin = cos_SP.unsqueeze(-2), sin_SP.unsqueeze(-2)
    first, second = x_BSHD.to(torch.promote_types(x_BSHD.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHD.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` with ``silu(x) = x * sigmoid(x)`` (arXiv:2002.05202, eq. 6); shapes and dtype
    equal.

    For 16-bit inputs it rounds twice, after each factor: float32 intermediates would double what is saved for
    the backward pass.
    """
    check_swiglu(gate, up)
    return F.silu(gate) * up


# --------------------------------------------------------------------------------- checks, shared with other kernels


def check_rms_norm(x: Tensor, weight: Tensor) -> None:
    """Raise ``ValueError`` for shapes that :func:`rms_norm` does not take."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm takes a weight as long as the last dimension of x; "
            f"found weight {tuple(weight.shape)} and x {tuple(x.shape)}"
        )


def check_rope(x_BSHD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> None:
    """Raise ``ValueError`` for shapes that :func:`rope` does not take."""
    if cos_SP.shape[-1] * 2 != x_BSHD.shape[-1] or cos_SP.shape[-2] != x_BSHD.shape[1]:
        raise ValueError(
            f"rope takes x [B, S, H, D] and cos, sin [S, D/2]; "
            f"found x {tuple(x_BSHD.shape)} and cos {tuple(cos_SP.shape)}"
        )


def check_swiglu(gate: Tensor, up: Tensor) -> None:
    """Raise ``ValueError`` for shapes that :func:`swiglu` does not take."""
    if gate.shape != up.shape:
        raise ValueError(f"swiglu takes two equal shapes; found {tuple(gate.shape)} and {tuple(up.shape)}")
