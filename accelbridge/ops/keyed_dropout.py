"""The op dropout, whose mask no layout changes, and the stream of row keys that it draws from.

A mask element is a function of (seed, step, site, global sample id, global coordinate) alone. So one rank and
many, one microbatch and many, a slice and the whole, the forward pass and its recomputation draw equal bits, and
there is no generator whose position would have to be saved.

    keys_B = ops.dropout_keys(seed, step, sample_ids_B).to(device)  # once per microbatch, outside of compiled code
    with ops.dropout_stream(keys_B):                                # around forward and backward
        ...

What changes from step to step reaches the device as the data of ``keys_B``, so nothing is compiled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from accelbridge.hashing import Constant, lowbias32, plain
from accelbridge.hashing import key as _key


def dropout(
    x: Tensor, row_keys_B: Tensor, site: Tensor, p: float, starts: Sequence[int] = (), *, constant: Constant = plain
) -> Tensor:
    """``x / (1 - p)`` where the mask keeps, 0 (also for inf and NaN) where it drops, in the dtype of x.

    ``x [B, ...]`` is floating, ``row_keys_B`` int32 [B] comes from :func:`dropout_keys`, ``site`` is a 0-d int32
    tensor that tells the places of a model apart (data, not a number: layers that differ in nothing else then share
    one compiled graph). ``starts`` are the global coordinates of x's first element, one per dimension after the
    first; default: x is whole. An element is dropped with probability ``p`` in [0, 1), exact to 2**-32.

    With ``h`` = lowbias32 and all sums and products modulo 2**32, element (b, i, ..., j) is drawn by folding
    one coordinate after the other into the key: ``k = h(row_keys[b] ^ site)``, then ``k = h(k ^ h(i ^ site))`` up
    to ``j``. It is kept if k as a signed number is at least ``p * 2**32 - 2**31``. Per element this costs one ``h``.

    ``constant`` is for devices that compute in 64 bits once a Python number meets int32.

    Raises ``ValueError`` for shapes, dtypes or a probability that don't fit.
    """
    _check(x, row_keys_B, site, p, starts)
    if p == 0:
        return x
    keys = lowbias32(row_keys_B ^ site, constant)
    for dim in range(1, x.dim()):
        start = starts[dim - 1] if starts else 0
        # Both ends named: a length that is symbolic under a compiler stays so.
        coordinates = torch.arange(start, start + x.shape[dim], dtype=torch.int32, device=x.device)
        keys = lowbias32(keys.unsqueeze(-1) ^ lowbias32(coordinates ^ site, constant), constant)
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    return torch.where(keys >= constant(keys, threshold), x * (1 / (1 - p)), 0.0)


def _check(x: Tensor, row_keys_B: Tensor, site: Tensor, p: float, starts: Sequence[int]) -> None:
    if not 0 <= p < 1:
        raise ValueError(f"dropout takes a probability p of at least 0 and below 1; found {p}")
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"dropout takes x [B, ...] of a floating dtype; found {x.dtype} {tuple(x.shape)}")
    if row_keys_B.dtype != torch.int32 or row_keys_B.shape != x.shape[:1]:
        raise ValueError(
            f"dropout takes one int32 key per row of x; found keys {row_keys_B.dtype} {tuple(row_keys_B.shape)} and x "
            f"{tuple(x.shape)}; the rows of x are those of the batch, in its order"
        )
    if site.dtype != torch.int32 or site.dim():
        raise ValueError(f"dropout takes a site that is a 0-d int32 tensor; found {site.dtype} {tuple(site.shape)}")
    if starts and (len(starts) != x.dim() - 1 or min(starts) < 0):
        raise ValueError(
            f"dropout takes one start, not negative, per dimension of x after the first; found starts "
            f"{tuple(starts)} and x {tuple(x.shape)}"
        )


# ----------------------------------------------------------------------------------------------------- the stream


def dropout_keys(seed: int, step: int, sample_ids_B: Tensor) -> Tensor:
    """The key of each row, int32 [B] on the host, from integers of any size and ``sample_ids_B`` int64 [B].

    The first 32 bits of BLAKE2b of seed, step and global sample id: made on the host, where 64-bit integers are
    real, of ids that are there already.
    """
    ids: list[int] = sample_ids_B.tolist()
    keys = [_key(f"accelbridge dropout {seed} {step} {sample}") for sample in ids]
    return torch.tensor(keys, dtype=torch.int32, device="cpu")


class _Stream:
    """The keys of the rows that are being worked on, if any.

    One for the process, not one per thread: a backward pass, and with it a recomputation, runs on threads of the
    autograd engine.
    """

    keys_B: Tensor | None = None


_STREAM = _Stream()


@contextmanager
def dropout_stream(row_keys_B: Tensor | None) -> Iterator[None]:
    """Let the dropouts inside draw by ``row_keys_B`` int32 [B], on the model's device; None: nothing to draw by.

    Open it around forward and backward of one microbatch: recomputation in the backward pass draws again.
    """
    before = _STREAM.keys_B
    _STREAM.keys_B = row_keys_B
    try:
        yield
    finally:
        _STREAM.keys_B = before


def open_stream() -> Tensor:
    """The row keys of the stream that is open. Raises ``RuntimeError`` where none is."""
    if _STREAM.keys_B is None:
        raise RuntimeError(
            "dropout in training asked; no stream is open, so there is nothing that says which samples these are; "
            "Trainer opens one; in a loop of your own write, once, "
            "`accelbridge.models.name_sites(model)` and, around forward and backward of each microbatch, "
            "`with ops.dropout_stream(ops.dropout_keys(seed, step, sample_ids).to(device)):`"
        )
    return _STREAM.keys_B
