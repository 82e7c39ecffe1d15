"""What a decoder asks of the execution plan. Free of torch."""

from __future__ import annotations

from accelbridge.backend import Request
from accelbridge.models.config import ModelConfig


def decoder_requests(
    model: ModelConfig, dtype: str, seq_len: int, document_mask: bool, compiled: bool = False
) -> list[Request]:
    """One request per op that :class:`accelbridge.models.decoder.Decoder` calls, computed in ``dtype``.

    Shapes are the global ones, so that every rank asks the same. ``compiled``: its layers are, which the ops that a
    compiler could join to their neighbours are told as a need.
    """
    needs = {"causal"}
    needs |= {"segments"} if document_mask else set()
    needs |= {"window"} if model.window is not None else set()
    needs |= {"softcap"} if model.softcap is not None else set()
    needs |= {"gqa"} if model.resolved_kv_heads != model.heads else set()
    head = {"head_dim": model.resolved_head_dim, "heads": model.heads, "kv_heads": model.resolved_kv_heads}
    joined = frozenset({"compiled"} if compiled else ())
    wide = {"dim": model.dim, "sequence": seq_len}
    dropout = [Request("dropout", dtype, wide)] if model.dropout > 0 else []
    return [
        Request("embedding", dtype, wide | {"vocab": model.vocab_size}),
        Request("rms_norm", dtype, wide),
        Request("linear", dtype, wide | {"k": model.dim}),
        Request("rope", dtype, head | {"sequence": seq_len}, needs=joined),
        Request("attention", dtype, head | {"sequence": seq_len}, needs=frozenset(needs)),
        Request("swiglu", dtype, {"dim": model.resolved_ffn_dim, "sequence": seq_len}, needs=joined),
        *dropout,
    ]


def loss_request(dtype: str, split: bool, chunked: bool = False) -> Request:
    """Next-token loss; ``split``: of logits that stay split along the vocabulary; ``chunked``: that never exist
    whole."""
    return Request(f"{'vocab_parallel_' * split}{'linear_' * chunked}cross_entropy", dtype)
