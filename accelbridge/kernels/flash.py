"""The op ``attention`` by the kernels of :mod:`.flash_forward` and :mod:`.flash_backward`: what launches them, as
custom ops with fake kernels, a gradient and a rule for DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from accelbridge.backend import Mask
from accelbridge.errors import Unsupported
from accelbridge.kernels import flash_backward as flash_backward_module
from accelbridge.kernels import flash_common
from accelbridge.kernels import flash_forward as flash_forward_module
from accelbridge.kernels.flash_candidate import BLOCKS_D, DTYPES, LONGEST, tile_name, variant
from accelbridge.kernels.tiles import Tile, bound, tile
from accelbridge.ops.dot_product import check_attention

# A kernel is launched with other arguments than those that it is written with.
common: Any = flash_common
forward_kernels: Any = flash_forward_module
backward_kernels: Any = flash_backward_module

_SMALLEST = 2.0**-126
"""The least normal number of float32: a scale below it counts as 0."""
_WIDEST = 2**23
"""Strides of rows up to which offsets within a tile, of at most 2^8 rows, are int32."""
_NUMBERS = "_document_numbers"
_PADDED = 128
"""A multiple of every tile of queries."""


def attention(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """See :func:`accelbridge.ops.attention`, which this serves in float32, bfloat16 and float16 for heads up to 256.

    Products are added in float32, of float32 operands as they are; softmax and its gradient are rounded to the dtype of
    q before they meet another factor. Deterministic, forward and backward. Takes any strides; a tensor whose rows are
    not dense along D is copied. DTensors may be split along B, and along H and G where the mesh divides G; others are
    gathered. Raises ``ValueError`` as the reference does, ``Unsupported`` for other dtypes, heads and lengths.
    """
    check_attention(q_BHSD, k_BGSD, v_BGSD, mask, softcap)
    _check_served(q_BHSD, k_BGSD, v_BGSD)
    keys = k_BGSD.shape[2]
    window = None if mask.window is None or mask.window >= keys else mask.window
    factor = q_BHSD.shape[3] ** -0.5 if scale is None else float(scale)
    out, lse = flash_forward(q_BHSD, k_BGSD, v_BGSD, _numbers(mask), mask.causal, window, factor, softcap)
    return (out, lse) if return_lse else out


def _check_served(q: Tensor, k: Tensor, v: Tensor) -> None:
    asked = "attention asked of the portable kernel"
    dtype = str(q.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise Unsupported(
            f"{asked} in {dtype}; it takes {', '.join(DTYPES)}; convert q, k and v, or bind the portable reference"
        )
    if not q.shape[3] == v.shape[3] <= BLOCKS_D[-1]:
        raise Unsupported(
            f"{asked} with heads of {q.shape[3]} and values of {v.shape[3]}; it takes equal ones up to {BLOCKS_D[-1]}; "
            "bind the portable reference"
        )
    longest = max(q.shape[2], k.shape[2])
    if longest > LONGEST:
        raise Unsupported(
            f"{asked} over {longest} positions; it counts them in int32, up to {LONGEST}; split the sequence"
        )


def _numbers(mask: Mask) -> Tensor | None:
    """Segment ids in int32, which are half the registers of int64. Kept in the mask, which all layers share."""
    segments = mask.segments_BS
    if segments is None or segments.dtype == torch.int32:
        return segments
    if segments.dtype.itemsize < 4 and not segments.dtype.is_floating_point:
        return segments.to(torch.int32)
    if segments.dtype != torch.int64:
        raise Unsupported(
            f"attention asked with segment ids in {segments.dtype}; the portable kernel compares integers; number the "
            "documents in int32 or int64"
        )
    if torch.compiler.is_compiling():
        return document_numbers(segments)
    kept = vars(mask).get(_NUMBERS)
    if kept is None:
        kept = vars(mask)[_NUMBERS] = document_numbers(segments)
    return kept


# ------------------------------------------------------------------------------------------------------ custom ops


@torch.library.custom_op("accelbridge::document_numbers", mutates_args=())
def document_numbers(segments: Tensor) -> Tensor:
    """int32 [B, S]: each id's place among the ids of its row, equal for equal ids, whatever they are."""
    ids, order = segments.sort(dim=-1)
    begins = torch.zeros_like(ids, dtype=torch.int32)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return torch.empty_like(begins).scatter_(1, order, begins.cumsum(-1, dtype=torch.int32))


@document_numbers.register_fake
def _(segments: Tensor) -> Tensor:
    return torch.empty_like(segments, dtype=torch.int32)


@torch.library.custom_op("accelbridge::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, D], lse [B, H, S] in float32) of q [B, H, S, D], k and v [B, G, S, D] and int32 ids [B, S]."""
    out, lse = _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if 0 in q.shape or 0 in k.shape:
        return out.zero_(), lse.fill_(-torch.inf)
    q, scale, _ = _with_positive_scale(q, scale)
    q, k, v = _dense(q), _dense(k), _dense(v)
    shape = _Shape(q, k)
    flags = _flags(causal, window, segments, softcap)
    how = shape.tile("flash_forward", flags)
    segments, spans = _spans(segments, how.blocks["QUERIES"])
    forward_kernels.flash_forward[shape.programs(how, "QUERIES")](
        q, k, v, segments, spans, out, lse, *_strides(q, k, v, out), *shape.sizes, scale, softcap or 1.0, window or 0,
        **shape.constants, **flags, **how.launch)  # fmt: skip
    return out, lse


@flash_forward.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("accelbridge::flash_backward", mutates_args=())
def flash_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, for those of ``out`` and, if it is not None, of ``lse``."""
    dq, dk, dv = _like(q), _like(k), _like(v)
    if 0 in q.shape or 0 in k.shape:
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, scale, sign = _with_positive_scale(q, scale)
    q, k, v, out, dout = (_dense(x) for x in (q, k, v, out, dout))
    shape = _Shape(q, k)
    rows = _tiles(shape.queries, _PADDED) * _PADDED
    delta, exponent = (lse.new_empty((*lse.shape[:2], rows)) for _ in range(2))
    how = tile("flash_delta")
    programs = rows // how.blocks["QUERIES"] * shape.heads * shape.batch
    backward_kernels.flash_delta[(programs,)](
        out, dout, lse.contiguous(), None if dlse is None else dlse.contiguous(), delta, exponent,
        *_strides(out, dout), shape.heads, shape.queries, rows,
        **shape.constants, DLSE=dlse is not None, **how.launch)  # fmt: skip
    flags = _flags(causal, window, segments, softcap)
    rest = (*shape.sizes, rows, scale, softcap or 1.0, window or 0)
    how = shape.tile("flash_backward_dq", flags)
    segments, spans = _spans(segments, how.blocks["QUERIES"])
    backward_kernels.flash_backward_dq[shape.programs(how, "QUERIES")](
        q, k, v, dout, exponent, delta, segments, spans, dq, *_strides(q, k, v, dout, dq), *rest,
        **shape.constants, **flags, **how.launch)  # fmt: skip
    how = shape.tile("flash_backward_dkdv", flags)
    segments, spans = _spans(segments, how.blocks["KEYS"])
    backward_kernels.flash_backward_dkdv[shape.programs(how, "KEYS")](
        q, k, v, dout, exponent, delta, segments, spans, dk, dv, *_strides(q, k, v, dout, dk, dv), *rest,
        **shape.constants, **flags, **how.launch)  # fmt: skip
    return dq if sign == 1 else dq.mul_(sign), dk, dv


@flash_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, segments, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, segments)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, segments = ctx.saved_tensors
    out = tensors[3]
    given = torch.zeros_like(out) if dout is None else dout
    return *flash_backward(given, dlse, *tensors, segments, *ctx.options), None, None, None, None, None


flash_forward.register_autograd(_gradient, setup_context=_save)


# -------------------------------------------------------------------------------------------------------- launches


class _Shape:
    """Sizes of one call, as the kernels take them."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.batch, self.heads, self.queries, self.head_dim = q.shape
        self.groups, self.keys = k.shape[1:3]
        self.dtype = str(q.dtype).removeprefix("torch.")

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.heads, self.groups, self.queries, self.keys

    @property
    def constants(self) -> dict[str, int]:
        return {"HEAD_DIM": self.head_dim, "BLOCK_D": max(16, 1 << (self.head_dim - 1).bit_length())}

    def tile(self, kernel: str, flags: dict[str, bool]) -> Tile:
        kind, masked = variant(self.head_dim, self.dtype), flags["WINDOW"] or flags["SEGMENTS"]
        return tile(tile_name(kernel, kind, masked, flags["SOFTCAP"], bound()))

    def programs(self, how: Tile, block: str) -> tuple[int]:
        """The grid: tiles of queries of each head, or of keys of each key/value head."""
        rows, heads = (self.queries, self.heads) if block == "QUERIES" else (self.keys, self.groups)
        count = _tiles(rows, how.blocks[block]) * heads * self.batch
        if count >= 2**31:
            raise Unsupported(
                f"attention asked of the portable kernel over {self.batch} x {heads} heads of {rows} positions; that "
                f"is {count} programs, and a grid has less than 2^31; split the batch"
            )
        return (count,)


def _tiles(rows: int, block: int) -> int:
    return -(-rows // block)


def _flags(causal: bool, window: int | None, segments: Tensor | None, softcap: float | None) -> dict[str, bool]:
    return {
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "SEGMENTS": segments is not None,
        "SOFTCAP": softcap is not None,
    }


def _spans(segments: Tensor | None, block: int) -> tuple[Tensor | None, Tensor | None]:
    """Contiguous ids, and for each tile of ``block`` positions where ids like its own begin and end."""
    if segments is None:
        return None, None
    ids = segments.contiguous()
    batch, length = ids.shape
    tiles = _tiles(length, block)
    spans = ids.new_empty((batch, tiles, 2), dtype=torch.int32)
    common.document_spans[(batch * tiles,)](ids, spans, length, BLOCK=block, **tile("document_spans").launch)
    return ids, spans


def _dense(x: Tensor) -> Tensor:
    """``x`` with rows dense along the last dimension, and not too far apart."""
    return x if x.stride(-1) == 1 and x.stride(-2) < _WIDEST else x.contiguous()


def _like(x: Tensor) -> Tensor:
    """Empty, laid out as ``x``, so that a model's [B, S, H, D] stays what it is, or contiguous where rows of ``x`` are
    not dense."""
    kept = x.stride(-1) == 1 and x.stride(-2) < _WIDEST
    return torch.empty_like(x, memory_format=torch.preserve_format if kept else torch.contiguous_format)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """(q, scale, sign) of which the kernels, which find the largest score before they scale it, make the same. The
    gradient of q is theirs times ``sign``; all of it is exact."""
    sign = 0 if abs(scale) < _SMALLEST else 1 if scale > 0 else -1
    return (q, scale, 1) if sign == 1 else (q * sign, abs(scale) if sign else 1.0, sign)


# --------------------------------------------------------------------------------------------------------- DTensor


def _splits(q: Any, k: Any, segments: Any) -> list[tuple[Placement, Placement | None]]:
    """(placement of what has heads, that of segments) in which every device's part is a call of its own. Heads: only
    where each device gets whole groups, whichever dimensions of the mesh they are split over."""
    whole = k.shape[1] % q.mesh.size() == 0
    heads: list[Placement] = [Replicate(), Shard(0), *([Shard(1)] if whole else [])]
    return [(each, None if segments is None else Replicate() if each == Shard(1) else each) for each in heads]


@register_sharding(torch.ops.accelbridge.document_numbers.default)
def _(segments: Any) -> list[tuple[list[Any], list[Any]]]:
    return [([each], [each]) for each in (Replicate(), Shard(0))]


@register_sharding(torch.ops.accelbridge.flash_forward.default)
def _(q: Any, k: Any, v: Any, segments: Any, *options: Any) -> list[tuple[list[Any], list[Any]]]:
    rest = [None] * len(options)
    return [([each] * 2, [each] * 3 + [ids, *rest]) for each, ids in _splits(q, k, segments)]


@register_sharding(torch.ops.accelbridge.flash_backward.default)
def _(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, segments: Any, *options: Any
) -> list[tuple[list[Any], list[Any]]]:
    rest = [None] * len(options)
    return [
        ([each] * 3, [each, None if dlse is None else each, *[each] * 5, ids, *rest])
        for each, ids in _splits(q, k, segments)
    ]
