"""Attention, backward: the softmax is made anew from lse, tile by tile (Dao, arXiv:2307.08691, section 3.1.2).

With P the softmax, dP = dO V^T and delta = rowsum(dO o O) - dLSE:

    dV = P^T dO        dS = P o (dP - delta) o slope of the cap        dQ = scale dS K        dK = scale dS^T Q

dQ is summed by programs that own tiles of queries, dK and dV, over the heads of their group, by programs that own tiles
of keys. No two programs add to one number, there is no atomic operation, and every run gives the same bits. The price:
Q K^T and dO V^T are multiplied twice, seven products instead of the five of a kernel that adds dQ atomically.
"""

from __future__ import annotations

import triton
import triton.language as tl

from accelbridge.kernels.flash_common import INF, LOG2E, key_ranges, load_rows, query_ranges, sees, store_rows, tanh


@triton.jit
def flash_delta(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, exponent_ptr,
    out_stride_b, out_stride_h, out_stride_s, dout_stride_b, dout_stride_h, dout_stride_s, heads, queries, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, DLSE: tl.constexpr,
):  # fmt: skip
    """Per query and head, float32: ``delta``, and ``exponent``, lse in base 2, with infinity in the place of -infinity
    so that the softmax of a row that sees nothing is 0. Both [B, H, rows], where rows beyond ``queries``, up to a
    multiple of every tile, are such rows too: so nothing that reads them has to ask.

    Floor: reads out and dout, ``4 B H Sq D`` bytes of 16-bit formats, and 12 to 16 bytes of each row besides; its
    operations are nothing to that.
    """
    tiles = tl.cdiv(rows, QUERIES)
    program = tl.program_id(0)
    start = program % tiles * QUERIES
    head = program // tiles
    batch = (head // heads).to(tl.int64)
    query_head = (head % heads).to(tl.int64)
    out_ptr += batch * out_stride_b + query_head * out_stride_h
    dout_ptr += batch * dout_stride_b + query_head * dout_stride_h
    out = load_rows(out_ptr, out_stride_s, start, queries, QUERIES, BLOCK_D, HEAD_DIM).to(tl.float32)
    dout = load_rows(dout_ptr, dout_stride_s, start, queries, QUERIES, BLOCK_D, HEAD_DIM).to(tl.float32)
    row = start + tl.arange(0, QUERIES)
    of_lse = head.to(tl.int64) * queries + row
    delta = tl.sum(out * dout, 1)
    if DLSE:
        delta -= tl.load(dlse_ptr + of_lse, mask=row < queries, other=0.0)
    lse = tl.load(lse_ptr + of_lse, mask=row < queries, other=-INF)
    at = head.to(tl.int64) * rows + row
    tl.store(delta_ptr + at, delta, mask=row < rows)
    tl.store(exponent_ptr + at, tl.where(lse == -INF, INF, lse * LOG2E), mask=row < rows)


@triton.jit
def flash_backward_dq(
    q_ptr, k_ptr, v_ptr, dout_ptr, exponent_ptr, delta_ptr, segments_ptr, spans_ptr, dq_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    dout_stride_b, dout_stride_h, dout_stride_s, dq_stride_b, dq_stride_h, dq_stride_s,
    heads, groups, queries, keys, rows, scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gradient of q, one program per tile of queries and head.

    Floor: reads q, k, v and dout, and writes dq, once: ``(3 H Sq + 2 G Sk) B D`` elements; three products of ``2 D``
    operations, ``6 D`` for each pair of a query and a key that it sees.
    """
    tiles = tl.cdiv(queries, QUERIES)
    program = tl.program_id(0)
    tile = program % tiles
    if CAUSAL:  # the longest first
        tile = tiles - 1 - tile
    head = program // tiles
    batch = (head // heads).to(tl.int64)
    query_head = head % heads
    group = query_head // (heads // groups)

    start = tile * QUERIES
    q_ptr += batch * q_stride_b + query_head.to(tl.int64) * q_stride_h
    dout_ptr += batch * dout_stride_b + query_head.to(tl.int64) * dout_stride_h
    dq_ptr += batch * dq_stride_b + query_head.to(tl.int64) * dq_stride_h
    k_ptr += batch * k_stride_b + group.to(tl.int64) * k_stride_h
    v_ptr += batch * v_stride_b + group.to(tl.int64) * v_stride_h
    q = load_rows(q_ptr, q_stride_s, start, queries, QUERIES, BLOCK_D, HEAD_DIM)
    dout = load_rows(dout_ptr, dout_stride_s, start, queries, QUERIES, BLOCK_D, HEAD_DIM)
    row = start + tl.arange(0, QUERIES)
    exponent = tl.load(exponent_ptr + head.to(tl.int64) * rows + row)
    delta = tl.load(delta_ptr + head.to(tl.int64) * rows + row)

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

    dq = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    for at in range(first, end, KEYS):
        k = load_rows(k_ptr, k_stride_s, at, keys, KEYS, BLOCK_D, HEAD_DIM)
        v = load_rows(v_ptr, v_stride_s, at, keys, KEYS, BLOCK_D, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        capped = scores
        if SOFTCAP:
            capped = tanh(scores * (scale / softcap))
            softmax = tl.math.exp2(capped * (softcap * LOG2E) - exponent[:, None])
        else:
            softmax = tl.math.exp2(scores * (scale * LOG2E) - exponent[:, None])
        if SEGMENTS or (at < whole) | (at + KEYS > whole_end):
            key = at + tl.arange(0, KEYS)
            key_segment = 0
            if SEGMENTS:
                key_segment = tl.load(segments_ptr + key, mask=key < keys, other=0)[None, :]
            seen = sees(place[:, None], key[None, :], keys, window, query_segment, key_segment,
                        CAUSAL, WINDOW, SEGMENTS)  # fmt: skip
            softmax = tl.where(seen, softmax, 0.0)
        dscores = softmax * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        if SOFTCAP:
            dscores *= 1.0 - capped * capped
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
    store_rows(dq_ptr, dq_stride_s, start, queries, dq * scale, QUERIES, BLOCK_D, HEAD_DIM)


@triton.jit
def flash_backward_dkdv(
    q_ptr, k_ptr, v_ptr, dout_ptr, exponent_ptr, delta_ptr, segments_ptr, spans_ptr, dk_ptr, dv_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    dout_stride_b, dout_stride_h, dout_stride_s, dk_stride_b, dk_stride_h, dk_stride_s,
    dv_stride_b, dv_stride_h, dv_stride_s,
    heads, groups, queries, keys, rows, scale, softcap, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, SOFTCAP: tl.constexpr,
    DV_LAST: tl.constexpr,
):  # fmt: skip
    """Gradients of k and v, one program per tile of keys and key/value head, over all query heads of its group. Whether
    dv is multiplied before the gradient of the scores is known or after it, DV_LAST, changes nothing but how many
    registers a compiler takes.

    Floor: reads q, k, v and dout, and writes dk and dv, once: ``(2 H Sq + 4 G Sk) B D`` elements; four products of
    ``2 D`` operations, ``8 D`` for each pair of a query and a key that it sees.
    """
    tiles = tl.cdiv(keys, KEYS)
    program = tl.program_id(0)
    tile = program % tiles  # under a causal mask most queries see the first keys: the longest first
    batch = (program // tiles // groups).to(tl.int64)
    group = program // tiles % groups

    start = tile * KEYS
    k_ptr += batch * k_stride_b + group.to(tl.int64) * k_stride_h
    v_ptr += batch * v_stride_b + group.to(tl.int64) * v_stride_h
    k = load_rows(k_ptr, k_stride_s, start, keys, KEYS, BLOCK_D, HEAD_DIM)
    v = load_rows(v_ptr, v_stride_s, start, keys, KEYS, BLOCK_D, HEAD_DIM)
    key = start + tl.arange(0, KEYS)
    shift = keys - queries
    first, whole, whole_end, end = query_ranges(start, shift, queries, window, QUERIES, KEYS, CAUSAL, WINDOW)
    key_segment = 0
    if SEGMENTS:
        segments_ptr += batch * keys
        span_ptr = spans_ptr + (batch * tiles + tile) * 2
        first = tl.maximum(first, tl.load(span_ptr) // QUERIES * QUERIES)
        end = tl.minimum(end, tl.load(span_ptr + 1))
        key_segment = tl.load(segments_ptr + tl.minimum(key, keys - 1))[:, None]

    dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
    dv = tl.zeros((KEYS, BLOCK_D), tl.float32)
    members = heads // groups
    steps = tl.cdiv(tl.maximum(end - first, 0), QUERIES)
    # One loop over all heads of the group, so that loads of the next are in flight while one ends.
    for step in range(members * steps):
        head = group.to(tl.int64) * members + step // steps
        at = first + step % steps * QUERIES
        row = at + tl.arange(0, QUERIES)
        q = load_rows(q_ptr + (batch * q_stride_b + head * q_stride_h), q_stride_s, at, queries,
                      QUERIES, BLOCK_D, HEAD_DIM)  # fmt: skip
        dout = load_rows(dout_ptr + (batch * dout_stride_b + head * dout_stride_h), dout_stride_s, at, queries,
                         QUERIES, BLOCK_D, HEAD_DIM)  # fmt: skip
        exponent = tl.load(exponent_ptr + (batch * heads + head) * rows + row)
        delta = tl.load(delta_ptr + (batch * heads + head) * rows + row)
        # Transposed, [KEYS, QUERIES], so that the softmax enters its product as it is.
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        dsoftmax = tl.dot(v, tl.trans(dout), input_precision="ieee")  # here it costs the fewest registers
        capped = scores
        if SOFTCAP:
            capped = tanh(scores * (scale / softcap))
            softmax = tl.math.exp2(capped * (softcap * LOG2E) - exponent[None, :])
        else:
            softmax = tl.math.exp2(scores * (scale * LOG2E) - exponent[None, :])
        if SEGMENTS:
            query_segment = tl.load(segments_ptr + row, mask=row < queries, other=0)[None, :]
            seen = sees((row + shift)[None, :], key[:, None], keys, window, query_segment, key_segment,
                        CAUSAL, WINDOW, SEGMENTS)  # fmt: skip
            softmax = tl.where(seen, softmax, 0.0)
        elif CAUSAL:  # noqa: SIM102 (this is decided when it is compiled, the next when it runs)
            # Without it there is nothing to hide: what lies beyond the keys is never stored.
            if (at < whole) | (at + QUERIES > whole_end):
                seen = sees((row + shift)[None, :], key[:, None], keys, window, 0, 0, CAUSAL, WINDOW, SEGMENTS)
                softmax = tl.where(seen, softmax, 0.0)
        if not DV_LAST:
            dv = tl.dot(softmax.to(dout.dtype), dout, dv, input_precision="ieee")
        dscores = softmax * (dsoftmax - delta[None, :])
        if SOFTCAP:
            dscores *= 1.0 - capped * capped
        if DV_LAST:
            dv = tl.dot(softmax.to(dout.dtype), dout, dv, input_precision="ieee")
        dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
    dk_ptr += batch * dk_stride_b + group.to(tl.int64) * dk_stride_h
    dv_ptr += batch * dv_stride_b + group.to(tl.int64) * dv_stride_h
    store_rows(dk_ptr, dk_stride_s, start, keys, dk * scale, KEYS, BLOCK_D, HEAD_DIM)
    store_rows(dv_ptr, dv_stride_s, start, keys, dv, KEYS, BLOCK_D, HEAD_DIM)
