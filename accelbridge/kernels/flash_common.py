"""What the forward and the backward kernels of attention share: which tiles and which scores a mask leaves, how rows
are loaded, tanh. Functions of the device only.

Query i stands at key ``i + keys - queries``, as in :func:`accelbridge.ops.visible_keys`. Ranges are half open, their
ends multiples of a tile but for the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))


@triton.jit
def load_rows(ptr, stride, start, limit, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows ``start`` and following as [ROWS, BLOCK_D], with 0 from row ``limit`` and from element HEAD_DIM on."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    at = (ptr + tl.cast(start, tl.int64) * stride) + (row[:, None] * stride + dim[None, :])
    kept = start + row[:, None] < limit
    if BLOCK_D != HEAD_DIM:
        kept = kept & (dim[None, :] < HEAD_DIM)
    return tl.load(at, mask=kept, other=0.0)


@triton.jit
def store_rows(
    ptr, stride, start, limit, x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """The counterpart of :func:`load_rows`; rounds ``x`` to the dtype of ``ptr``."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    at = (ptr + tl.cast(start, tl.int64) * stride) + (row[:, None] * stride + dim[None, :])
    kept = start + row[:, None] < limit
    if BLOCK_D != HEAD_DIM:
        kept = kept & (dim[None, :] < HEAD_DIM)
    tl.store(at, x.to(ptr.dtype.element_ty), mask=kept)


@triton.jit
def sees(
    place, key, keys, window, query_segment, key_segment,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Which of ``key`` a query at ``place`` sees; both, and their segment ids, shaped to be broadcast to the scores."""
    seen = key < keys
    if CAUSAL:
        seen = seen & (key <= place)
    if WINDOW:
        seen = seen & (key > place - window)
    if SEGMENTS:
        seen = seen & (query_segment == key_segment)
    return seen


@triton.jit
def key_ranges(
    place, keys, window, QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Of the keys that queries at ``place`` .. ``place + QUERIES - 1`` may see: (first, first of the tiles that all of
    them see whole, end of those, end). With tiles of KEYS keys."""
    end = tl.cast(keys, tl.int32)
    whole_end = end
    if CAUSAL:
        end = tl.minimum(end, tl.maximum(place + QUERIES, 0))
        whole_end = tl.minimum(whole_end, tl.maximum(place + 1, 0))
    whole_end = whole_end // KEYS * KEYS
    first = end * 0
    whole = first
    if WINDOW:
        first = tl.maximum(place - window + 1, 0) // KEYS * KEYS
        whole = tl.cdiv(tl.maximum(place + QUERIES - window, 0), KEYS) * KEYS
    return first, whole, whole_end, end


@triton.jit
def query_ranges(
    key, shift, queries, window, QUERIES: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """The same of the queries that may see keys ``key`` .. ``key + KEYS - 1``, in tiles of QUERIES; ``shift`` is what
    is added to a query's index to get its place."""
    end = tl.cast(queries, tl.int32)
    first = end * 0
    whole = first
    whole_end = end
    if CAUSAL:
        first = tl.maximum(key - shift, 0) // QUERIES * QUERIES
        whole = tl.cdiv(tl.maximum(key + KEYS - 1 - shift, 0), QUERIES) * QUERIES
    if WINDOW:
        end = tl.minimum(end, tl.maximum(key + KEYS - 1 - shift + window, 0))
        whole_end = tl.minimum(whole_end, tl.maximum(key - shift + window, 0))
    whole_end = whole_end // QUERIES * QUERIES
    return first, whole, whole_end, end


@triton.jit
def tanh(x):
    """To a few units in the last place: a series near 0, where 1 - 2 / (1 + exp(2 x)) would cancel."""
    square = x * x
    series = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0)))
    decay = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(square < 0.04, series, tl.where(x < 0.0, -far, far))


@triton.jit
def document_spans(segments_ptr, spans_ptr, length, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """For each tile of BLOCK positions: the first position, and one past the last, whose segment id lies between the
    tile's least and largest. None outside has a document in common with the tile; where documents lie one after the
    other, that leaves little more than those the tile is part of.

    Segments int32 [B, length], contiguous; spans int32 [B, tiles, 2]. One program per tile and batch row.
    Moves ``B * tiles * length`` ids through the caches, which is ``1 / (H * D)`` of the operations of attention itself.
    """
    tiles = tl.cdiv(length, BLOCK)
    program = tl.program_id(0)
    tile = program % tiles
    ids_ptr = segments_ptr + (program // tiles).to(tl.int64) * length
    own = tl.load(ids_ptr + tl.minimum(tile * BLOCK + tl.arange(0, BLOCK), length - 1))
    least = tl.min(own, 0)
    largest = tl.max(own, 0)
    first = tl.cast(length, tl.int32)
    end = first * 0
    for start in range(0, length, CHUNK):
        at = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + at, mask=at < length, other=0)
        near = (at < length) & (ids >= least) & (ids <= largest)
        first = tl.minimum(first, tl.min(tl.where(near, at, length), 0))
        end = tl.maximum(end, tl.max(tl.where(near, at + 1, 0), 0))
    tl.store(spans_ptr + program.to(tl.int64) * 2, first)
    tl.store(spans_ptr + program.to(tl.int64) * 2 + 1, end)
