"""Attention, forward: one program per tile of queries and head, over the tiles of keys that its mask leaves, with a
running maximum and sum (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135)."""

from __future__ import annotations

import triton
import triton.language as tl

from accelbridge.kernels.flash_common import INF, LN2, LOG2E, key_ranges, load_rows, sees, store_rows, tanh


@triton.jit
def flash_forward(
    q_ptr, k_ptr, v_ptr, segments_ptr, spans_ptr, out_ptr, lse_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    out_stride_b, out_stride_h, out_stride_s,
    heads, groups, queries, keys, scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """``out_BHSD`` and ``lse_BHS`` (float32, contiguous) of q [B, H, S, D] and k, v [B, G, S, D], rows dense along D.

    Floor: reads q, k and v and writes out and lse once, ``(2 H Sq + 2 G Sk) B D`` elements and ``4 B H Sq`` bytes;
    multiplies and adds ``4 D`` for each pair of a query and a key that it sees (``Sq Sk`` of a head, half of it causal,
    ``Sq W`` within a window W), besides one exponential. From ``D = 64`` and some hundred keys on the operations are
    the longer time on every accelerator with matrix units.
    """
    tiles = tl.cdiv(queries, QUERIES)
    program = tl.program_id(0)
    tile = program % tiles
    if CAUSAL:  # the longest first, so that the shortest fill the last wave
        tile = tiles - 1 - tile
    head = program // tiles
    batch = (head // heads).to(tl.int64)
    query_head = head % heads
    group = query_head // (heads // groups)

    start = tile * QUERIES
    q_ptr += batch * q_stride_b + query_head.to(tl.int64) * q_stride_h
    k_ptr += batch * k_stride_b + group.to(tl.int64) * k_stride_h
    v_ptr += batch * v_stride_b + group.to(tl.int64) * v_stride_h
    out_ptr += batch * out_stride_b + query_head.to(tl.int64) * out_stride_h
    q = load_rows(q_ptr, q_stride_s, start, queries, QUERIES, BLOCK_D, HEAD_DIM)

    row = start + tl.arange(0, QUERIES)
    shift = keys - queries
    place = row + shift
    first, whole, whole_end, end = key_ranges(start + shift, keys, window, QUERIES, KEYS, CAUSAL, WINDOW)
    query_segment = 0
    if SEGMENTS:
        segments_ptr += batch * keys
        span_ptr = spans_ptr + (batch * tiles + tile) * 2
        first = tl.maximum(first, tl.load(span_ptr) // KEYS * KEYS)
        end = tl.minimum(end, tl.load(span_ptr + 1))
        query_segment = tl.load(segments_ptr + tl.minimum(row, queries - 1))[:, None]

    factor = scale * LOG2E
    if SOFTCAP:
        factor = LOG2E
    out = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    peak = tl.full((QUERIES,), -INF, tl.float32)  # of the scores before their factor
    total = tl.zeros((QUERIES,), tl.float32)
    for at in range(first, end, KEYS):
        k = load_rows(k_ptr, k_stride_s, at, keys, KEYS, BLOCK_D, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            scores = softcap * tanh(scores * (scale / softcap))
        if SEGMENTS or (at < whole) | (at + KEYS > whole_end):
            key = at + tl.arange(0, KEYS)
            key_segment = 0
            if SEGMENTS:
                key_segment = tl.load(segments_ptr + key, mask=key < keys, other=0)[None, :]
            seen = sees(place[:, None], key[None, :], keys, window, query_segment, key_segment,
                        CAUSAL, WINDOW, SEGMENTS)  # fmt: skip
            scores = tl.where(seen, scores, -INF)
        risen = tl.maximum(peak, tl.max(scores, 1))
        origin = tl.where(risen == -INF, 0.0, risen)  # a row may have seen nothing yet
        weights = tl.math.exp2(scores * factor - (origin * factor)[:, None])
        shrink = tl.math.exp2((peak - origin) * factor)
        total = total * shrink + tl.sum(weights, 1)
        v = load_rows(v_ptr, v_stride_s, at, keys, KEYS, BLOCK_D, HEAD_DIM)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        peak = risen

    blind = total == 0.0  # a row that sees nothing: out 0, lse -inf
    total = tl.where(blind, 1.0, total)
    store_rows(out_ptr, out_stride_s, start, queries, out / total[:, None], QUERIES, BLOCK_D, HEAD_DIM)
    lse = tl.where(blind, -INF, (peak * factor + tl.math.log2(total)) * LN2)
    tl.store(lse_ptr + head.to(tl.int64) * queries + row, lse, mask=row < queries)
