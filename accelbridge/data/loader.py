"""Samples, and how they are dealt out to steps, ranks and microbatches.

The run is one endless sequence of global sample ids 0, 1, 2, ... Id k is sample ``order[k % n]`` of epoch
``k // n``; step s takes the ids ``s*G .. s*G+G-1`` (G: the global batch size). Nothing else is state: the
step number alone says where a run stands, on any layout, and a step sees the same samples on all of them.

Shapes: S sequence length, rows = microbatch size x coordinates of this process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, Self, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accelbridge.data.order import Permutation
from accelbridge.data.store import TokenStore
from accelbridge.errors import ConfigError, DataError

IGNORE = -100
"""The target of a position that has none; the loss leaves it out."""

PADDING = -1
"""The sample id of a row that only fills up an evaluation batch."""

Batch = dict[str, Tensor]


# -------------------------------------------------------------------------------------------------- samples


@runtime_checkable
class Samples(Protocol):
    """What a loader reads: anything with a length and samples by number, in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Tensor]: ...


class PackedSamples:
    """A token store cut into samples of ``seq_len`` tokens, without regard to where documents end.

    Sample i reads the tokens ``i*S .. i*S+S``; the last of them is only a target. What is left at the end of
    the store, less than a sample, is not used. A sample is a dict of

    * ``tokens`` int64 [S];
    * ``targets`` int64 [S], the next tokens; -100 where the next token belongs to another document;
    * ``segments`` int32 [S], the documents counted from 0 within the sample.

    Without ``document_mask`` there are no segments, as kernels want it that take no mask, and no target is left out:
    the store is one long document.
    Raises ``DataError`` if the store has fewer tokens than one sample.
    """

    def __init__(self, store: TokenStore, seq_len: int, document_mask: bool = True) -> None:
        if seq_len < 1:
            raise ConfigError(f"sequence length {seq_len} is not possible; it must be at least 1")
        self.store, self.seq_len, self.document_mask = store, seq_len, document_mask
        self._length = (store.tokens - 1) // seq_len
        if self._length < 1:
            raise DataError(
                f"{store.path} has {store.tokens} tokens, fewer than one sample of sequence length {seq_len} "
                f"({seq_len} + 1 tokens); use a shorter sequence or a larger store"
            )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Batch:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        start, length = index * self.seq_len, self.seq_len + 1
        tokens = self.store.window(start, length)
        targets = tokens[1:].copy()
        sample = {"tokens": torch.from_numpy(tokens[:-1])}
        if self.document_mask:
            segments = self.store.segments(start, length)
            targets[segments[1:] != segments[:-1]] = IGNORE
            sample["segments"] = torch.from_numpy(segments[:-1])
        return {**sample, "targets": torch.from_numpy(targets)}


def check_samples(samples: object, what: str = "training") -> Samples:
    """Return ``samples`` if it is map-style and not empty. Raises ``ConfigError`` or ``DataError``."""
    # An IterableDataset inherits a __getitem__ that only raises.
    if not isinstance(samples, Samples) or isinstance(samples, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"the {what} data is a {type(samples).__name__}, which is not map-style; resuming "
            "at the exact sample on any layout needs __len__ and __getitem__(index) -> dict of tensors"
        )
    if len(samples) < 1:
        raise DataError(f"the {what} data ({type(samples).__name__}) has no samples")
    return cast(Samples, samples)


def describe_samples(samples: Samples) -> str:
    """How many samples and what one holds, as text: what ranks compare where there is no fingerprint."""
    return f"{len(samples)} samples of {_signature(samples[0])}"


# -------------------------------------------------------------------------------------------------- loaders


class Loader:
    """Deals samples out to one process. Stateless: ask for any step, in any order, as often as wanted.

    Microbatch m of data-parallel coordinate r takes the ids ``s*G + (m*data_parallel + r)*microbatch_size +
    [0 .. microbatch_size)``; a process that feeds several coordinates has their rows one after the other.

    Args:
        samples: a map-style object; see :class:`Samples`. All its samples must have the same keys and shapes.
        global_batch_size: samples per step over all ranks and microbatches; a multiple of
            ``microbatch_size * data_parallel``.
        microbatch_size: samples per microbatch and coordinate.
        coordinates: the data-parallel coordinates of this process.
        data_parallel: the number of coordinates over all processes.
        seed: of the order, with the epoch.
        shuffle: a new order in each epoch; otherwise the order of ``samples``.

    Raises ``ConfigError`` for sizes that do not divide, and what :func:`check_samples` raises.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        global_batch_size: int,
        microbatch_size: int,
        coordinates: range,
        data_parallel: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.samples = check_samples(samples)
        _check_coordinates(coordinates, data_parallel)
        if microbatch_size < 1:
            raise ConfigError(f"microbatch size {microbatch_size} is not possible; it must be at least 1")
        per_microbatch = microbatch_size * data_parallel
        if global_batch_size < 1 or global_batch_size % per_microbatch:
            raise ConfigError(
                f"a global batch of {global_batch_size} samples is not a whole number of microbatches of "
                f"{microbatch_size} on {data_parallel} data-parallel ranks; use a multiple of "
                f"{per_microbatch}"
            )
        self.global_batch_size = global_batch_size
        self.microbatches = global_batch_size // per_microbatch
        """Microbatches per step."""
        self.seed, self.shuffle = seed, shuffle
        self._offsets = _deal(self.microbatches, microbatch_size, coordinates, data_parallel)

    def step(self, step: int) -> list[Batch]:
        """The microbatches of ``step`` (from 0): stacked samples, and ``sample_ids`` int64 [rows]."""
        if step < 0:
            raise ValueError(f"step {step}: steps are numbered from 0")
        ids = step * self.global_batch_size + self._offsets
        indices = self.indices(ids)
        return [_collate(self.samples, *rows) for rows in zip(indices, ids, strict=True)]

    def indices(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers within ``samples`` of global sample ids, same shape."""
        epochs, positions = np.divmod(sample_ids, len(self.samples))
        if not self.shuffle:
            return positions
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = Permutation(len(self.samples), self.seed, int(epoch))(positions[here])
        return indices


def evaluation_batches(samples: Samples, batch_size: int, coordinates: range, data_parallel: int) -> Iterator[Batch]:
    """Every sample exactly once, in order, as equally many batches of equal shape on every rank.

    Args:
        batch_size: samples per batch and coordinate; a batch has ``batch_size * len(coordinates)`` rows.

    Rows that are left over at the end are copies of the last sample whose ``sample_ids`` are -1: leave them out of
    every sum. So no rank waits for another, and no batch has another shape.
    """
    samples = check_samples(samples)
    _check_coordinates(coordinates, data_parallel)
    if batch_size < 1:
        raise ConfigError(f"evaluation batch size {batch_size} is not possible; it must be at least 1")
    count = -(-len(samples) // (batch_size * data_parallel))
    return _evaluate(samples, _deal(count, batch_size, coordinates, data_parallel))


def _evaluate(samples: Samples, ids: NDArray[np.int64]) -> Iterator[Batch]:
    last = len(samples) - 1
    for row_ids in ids:
        padded = row_ids > last
        yield _collate(samples, np.minimum(row_ids, last), np.where(padded, PADDING, row_ids))


def _deal(batches: int, batch_size: int, coordinates: range, data_parallel: int) -> NDArray[np.int64]:
    """Which of ``batches * batch_size * data_parallel`` ids this process takes, int64 [batches, rows]."""
    ids = np.arange(batches * data_parallel * batch_size, dtype=np.int64)
    mine = ids.reshape(batches, data_parallel, batch_size)[:, coordinates.start : coordinates.stop]
    return np.ascontiguousarray(mine).reshape(batches, -1)


def _check_coordinates(coordinates: range, data_parallel: int) -> None:
    if coordinates.step != 1 or not 0 <= coordinates.start < coordinates.stop <= data_parallel:
        raise ConfigError(
            f"data-parallel coordinates {coordinates} are not a part of range({data_parallel}); "
            "a process feeds at least one, and neighbouring ones"
        )


def _collate(samples: Samples, indices: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Batch:
    """Stack samples ``indices``. Raises ``DataError`` naming the first that is unlike the others."""
    rows = [samples[int(index)] for index in indices]
    first = _signature(rows[0])
    for index, row in zip(indices, rows, strict=True):
        if _signature(row) != first:
            raise DataError(
                f"sample {index} has {_signature(row)}, unlike sample {indices[0]} with {first}; all samples "
                "must have the same keys, shapes and dtypes"
            )
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if "sample_ids" in batch:
        raise DataError('samples must not have a key "sample_ids"; the loader adds it')
    return batch | {"sample_ids": torch.from_numpy(sample_ids.copy())}


def _signature(row: Mapping[str, Any]) -> dict[str, str]:
    for name, value in row.items():
        if not isinstance(value, Tensor):
            raise DataError(f"samples must be dicts of tensors; {name!r} is a {type(value).__name__}")
    return {name: f"{str(row[name].dtype).removeprefix('torch.')}{list(row[name].shape)}" for name in sorted(row)}


# ------------------------------------------------------------------------------------------------- prefetch


class Prefetcher:
    """Iterates over ``(step, microbatches)`` of steps ``start_step .. stop_step-1``, made on a second thread.

    At most ``ahead`` steps are made before they are asked for. What the loader raises is raised here, at the
    step where it happened; after that, and after :meth:`close`, the iteration is over. Use as a context
    manager, or call :meth:`close`, to stop early.
    """

    def __init__(self, loader: Loader, start_step: int, stop_step: int, *, ahead: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"ahead={ahead}: at least one step must be made ahead")
        self._loader = loader
        self._steps = iter(range(start_step, stop_step))
        self._pending: deque[tuple[int, Future[list[Batch]]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="accelbridge-data")
        for _ in range(ahead):
            self._submit()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, list[Batch]]:
        if not self._pending:
            self.close()
            raise StopIteration
        step, made = self._pending.popleft()
        try:
            microbatches = made.result()
        except BaseException:
            self.close()
            raise
        self._submit()
        return step, microbatches

    def restart(self, start_step: int, stop_step: int) -> None:
        """Go on with ``start_step .. stop_step-1`` instead of what was still to come."""
        ahead = max(1, len(self._pending))
        self._pending.clear()  # what is being made is dropped when it is done
        self._steps = iter(range(start_step, stop_step))
        for _ in range(ahead):
            self._submit()

    def close(self) -> None:
        """Drop what was made ahead and end the thread, after the step that it works on. Safe to repeat."""
        self._steps = iter(())
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._pending.append((step, self._thread.submit(self._loader.step, step)))
