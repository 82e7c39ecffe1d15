"""Samples, and how they are dealt out: masks, layouts, resuming, evaluation, prefetching."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from accelbridge.data.loader import Batch, Loader, PackedSamples, Prefetcher, evaluation_batches
from accelbridge.data.store import TokenStore, TokenWriter
from accelbridge.data.tokenizer import IdsOnly
from accelbridge.errors import ConfigError, DataError

EOD = 999


class Numbered:
    """Map-style samples that say who they are."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> Batch:
        assert 0 <= index < self.length
        return {"tokens": torch.full((3,), index), "targets": torch.full((3,), index)}


def make_loader(samples: Any, coordinates: range = range(1), data_parallel: int = 1, **changes: Any) -> Loader:
    options: dict[str, Any] = {"global_batch_size": 16, "microbatch_size": 2, "seed": 0, "shuffle": True}
    return Loader(samples, coordinates=coordinates, data_parallel=data_parallel, **(options | changes))


def make_store(path: Path, documents: list[list[int]], shard_tokens: int = 11) -> TokenStore:
    with TokenWriter(path, IdsOnly(1000, EOD), shard_tokens=shard_tokens) as writer:
        for document in documents:
            writer.append(document)
    return TokenStore(path)


def indices(batches: list[Batch]) -> list[int]:
    """Which of the ``Numbered`` samples are in ``batches``."""
    return [int(row[0]) for batch in batches for row in batch["tokens"]]


def ids(batches: list[Batch]) -> list[int]:
    return [int(sample_id) for batch in batches for sample_id in batch["sample_ids"]]


def equal(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


# --------------------------------------------------------------------------------------------------- samples


def test_a_packed_sample_by_hand(tmp_path: Path) -> None:
    # stream: 1 2 E 3 E E 4 5 | 6 7 E 8 ...
    store = make_store(tmp_path / "s", [[1, 2], [3], [], [4, 5, 6, 7], [8]])
    samples = PackedSamples(store, 7)
    first = samples[0]
    assert first["tokens"].tolist() == [1, 2, EOD, 3, EOD, EOD, 4]
    assert first["targets"].tolist() == [2, EOD, -100, EOD, -100, -100, 5]
    assert first["segments"].tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert [first[name].dtype for name in ("tokens", "targets", "segments")] == [torch.int64] * 2 + [torch.int32]
    assert len(samples) == 1  # 12 tokens: the second sample is not whole

    unmasked = PackedSamples(store, 7, document_mask=False)[0]
    assert unmasked["targets"].tolist() == [2, EOD, 3, EOD, EOD, 4, 5]
    assert "segments" not in unmasked  # a mask that hides nothing is one all the same


@pytest.mark.parametrize(("seq_len", "shard_tokens"), [*itertools.product([1, 2, 5, 16, 64], [1, 9, 10_000])])
def test_packed_samples_against_the_definition(tmp_path: Path, seq_len: int, shard_tokens: int) -> None:
    generator = np.random.default_rng(seq_len)
    documents = [generator.integers(0, EOD, generator.integers(0, 12)).tolist() for _ in range(60)]
    samples = PackedSamples(make_store(tmp_path / "s", documents, shard_tokens), seq_len)
    stream = [(token, number) for number, document in enumerate(documents) for token in [*document, EOD]]
    assert len(samples) == (len(stream) - 1) // seq_len
    for i in range(len(samples)):
        window = stream[i * seq_len : (i + 1) * seq_len + 1]
        sample = samples[i]
        assert sample["tokens"].tolist() == [token for token, _ in window[:-1]]
        assert sample["segments"].tolist() == [owner - window[0][1] for _, owner in window[:-1]]
        expected = [
            token if owner == previous else -100
            for (token, owner), (_, previous) in zip(window[1:], window, strict=False)
        ]
        assert sample["targets"].tolist() == expected


def test_every_token_but_the_first_of_a_document_is_a_target_once(tmp_path: Path) -> None:
    documents = [[i * 10 + j for j in range(5)] for i in range(40)]
    samples = PackedSamples(make_store(tmp_path / "s", documents), 6)
    targets = torch.cat([samples[i]["targets"] for i in range(len(samples))])
    stream = [token for document in documents for token in [*document, EOD]][: len(targets) + 1]
    expected = sorted(token for token in stream[1:] if token % 10 or token == EOD)
    assert sorted(targets[targets != -100].tolist()) == expected


def test_packed_samples_errors(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [[1, 2, 3]])
    assert len(PackedSamples(store, 3)) == 1
    message = r"/s has 4 tokens, fewer than one sample of sequence length 4 \(4 \+ 1 tokens\); use a shorter"
    with pytest.raises(DataError, match=message):
        PackedSamples(store, 4)
    with pytest.raises(ConfigError, match="sequence length 0"):
        PackedSamples(store, 0)
    for outside in (-1, 1):
        with pytest.raises(IndexError):
            PackedSamples(store, 3)[outside]


def test_packed_samples_work_in_a_torch_dataloader(tmp_path: Path) -> None:
    samples = PackedSamples(make_store(tmp_path / "s", [[1, 2, 3, 4]] * 20), 4)
    assert equal([pickle.loads(pickle.dumps(samples))[3]], [samples[3]])
    loader = torch.utils.data.DataLoader(samples, batch_size=4, num_workers=1)  # type: ignore[arg-type]
    assert sum(len(batch["tokens"]) for batch in loader) == len(samples)


# --------------------------------------------------------------------------------------------------- layouts

LAYOUTS = [
    (data_parallel, microbatch_size, per_process)
    for data_parallel in (1, 2, 4)
    for microbatch_size in (1, 2, 3, 4)
    for per_process in (1, 2, 4)
    if data_parallel % per_process == 0
]


@pytest.mark.parametrize(("data_parallel", "microbatch_size", "per_process"), LAYOUTS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_step_has_the_same_samples_in_every_layout(
    data_parallel: int, microbatch_size: int, per_process: int, shuffle: bool
) -> None:
    n, size = 37, 48  # several epochs, and steps that straddle them
    reference = make_loader(Numbered(n), global_batch_size=size, microbatch_size=size, shuffle=shuffle)
    processes = [
        make_loader(
            Numbered(n),
            range(first, first + per_process),
            data_parallel,
            global_batch_size=size,
            microbatch_size=microbatch_size,
            shuffle=shuffle,
        )
        for first in range(0, data_parallel, per_process)
    ]
    for step in (0, 1, 2, 1000):
        whole = reference.step(step)
        assert ids(whole) == list(range(step * size, (step + 1) * size))
        parts = [process.step(step) for process in processes]
        taken = [sample_id for part in parts for sample_id in ids(part)]
        assert sorted(taken) == ids(whole)  # disjoint over processes, and nothing left out
        assert dict(zip(taken, [i for part in parts for i in indices(part)], strict=True)) == dict(
            zip(ids(whole), indices(whole), strict=True)
        )
        for microbatches in zip(*parts, strict=True):  # microbatch m is the m-th part of the step everywhere
            together = sorted(ids(list(microbatches)))
            assert together == list(range(together[0], together[0] + microbatch_size * data_parallel))
            assert all(len(batch["tokens"]) == microbatch_size * per_process for batch in microbatches)


def test_rows_of_a_microbatch_follow_the_formula() -> None:
    loader = make_loader(Numbered(1000), range(1, 3), 4, global_batch_size=24, microbatch_size=3)
    microbatches = loader.step(5)
    assert len(microbatches) == loader.microbatches == 2
    for m, batch in enumerate(microbatches):
        expected = [5 * 24 + (m * 4 + r) * 3 + i for r in (1, 2) for i in range(3)]
        assert batch["sample_ids"].tolist() == expected
    assert microbatches[0]["sample_ids"].dtype == torch.int64


def test_resuming_on_another_layout_continues_the_straight_run() -> None:
    straight = make_loader(Numbered(50))
    seen = [sorted(indices(straight.step(step))) for step in range(12)]
    for data_parallel, microbatch_size in [(1, 2), (2, 4), (4, 1), (8, 2)]:
        resumed = [
            make_loader(Numbered(50), range(r, r + 1), data_parallel, microbatch_size=microbatch_size)
            for r in range(data_parallel)
        ]
        for step in range(5, 12):
            assert sorted(i for loader in resumed for i in indices(loader.step(step))) == seen[step]


def test_resuming_on_the_same_layout_is_bitwise(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [[i, i + 1, i + 2] for i in range(300)])
    straight = make_loader(PackedSamples(store, 8), range(2, 4), 4)
    expected = [straight.step(step) for step in range(25)]
    resumed = make_loader(PackedSamples(TokenStore(store.path), 8), range(2, 4), 4)
    assert all(equal(resumed.step(step), expected[step]) for step in range(11, 25))


def test_each_epoch_has_every_sample_once_in_a_new_order() -> None:
    loader = make_loader(Numbered(40), global_batch_size=8)
    order = [i for step in range(20) for i in indices(loader.step(step))]
    epochs = [order[start : start + 40] for start in range(0, 160, 40)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert indices(make_loader(Numbered(40), seed=1).step(0)) != indices(make_loader(Numbered(40)).step(0))
    unshuffled = make_loader(Numbered(10), shuffle=False)
    assert indices(unshuffled.step(0)) == [*range(10), *range(6)]


def test_a_batch_larger_than_the_data_spans_epochs() -> None:
    counts = np.bincount(indices(make_loader(Numbered(3), global_batch_size=12).step(0)), minlength=3)
    assert counts.tolist() == [4, 4, 4]


# ------------------------------------------------------------------------------------------------- bad input


class OnlyIterable:
    def __iter__(self) -> Iterator[Batch]:
        yield {"tokens": torch.zeros(1)}


class TorchIterable(torch.utils.data.IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        yield {"tokens": torch.zeros(1)}

    def __len__(self) -> int:
        return 1


class Uneven(Numbered):
    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {"tokens": torch.zeros(4 if index == 7 else 3)}


class Lists(Numbered):
    def __getitem__(self, index: int, /) -> dict[str, Any]:
        return {"tokens": [1, 2]}


class Taken(Numbered):
    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {"sample_ids": torch.zeros(1)}


@pytest.mark.parametrize("samples", [OnlyIterable(), TorchIterable(), 3, iter([])])
def test_samples_without_numbers_are_refused(samples: Any) -> None:
    message = r"is not map-style; resuming at the exact sample on any layout needs __len__ and __getitem__"
    with pytest.raises(ConfigError, match=rf"the training data is a {type(samples).__name__}.*{message}"):
        make_loader(samples)
    with pytest.raises(ConfigError, match="__getitem__"):
        evaluation_batches(samples, 1, range(1), 1)


def test_samples_that_cannot_be_stacked_are_named() -> None:
    with pytest.raises(DataError, match=r"sample 7 has .*float32\[4\].*, unlike sample \d+ with .*float32\[3\]"):
        make_loader(Uneven(16), microbatch_size=16).step(0)
    with pytest.raises(DataError, match="'tokens' is a list"):
        make_loader(Lists(16)).step(0)
    with pytest.raises(DataError, match='"sample_ids"; the loader adds it'):
        make_loader(Taken(16)).step(0)
    with pytest.raises(DataError, match=r"\(Numbered\) has no samples"):
        make_loader(Numbered(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 10, "data_parallel": 4}, r"10 samples .* of 2 on 4 .*; use a multiple of 8"),
        ({"global_batch_size": 0}, "use a multiple of 2"),
        ({"microbatch_size": 0}, "microbatch size 0"),
        ({"coordinates": range(1, 3), "data_parallel": 2}, r"range\(1, 3\) are not a part of range\(2\)"),
        ({"coordinates": range(0)}, "not a part of"),
        ({"coordinates": range(0, 4, 2), "data_parallel": 4}, "neighbouring"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_loader(Numbered(5), **changes)
    with pytest.raises(ValueError, match="numbered from 0"):
        make_loader(Numbered(5)).step(-1)


# ------------------------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16, 25])
@pytest.mark.parametrize(("data_parallel", "batch_size", "per_process"), [(1, 4, 1), (2, 3, 1), (4, 2, 2), (4, 1, 4)])
def test_evaluation_has_every_sample_once_and_pads(
    n: int, data_parallel: int, batch_size: int, per_process: int
) -> None:
    ranks = [
        list(evaluation_batches(Numbered(n), batch_size, range(r, r + per_process), data_parallel))
        for r in range(0, data_parallel, per_process)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) == -(-n // (batch_size * data_parallel))
    assert {batch["tokens"].shape for batches in ranks for batch in batches} == {(batch_size * per_process, 3)}
    in_order = [batch for together in zip(*ranks, strict=True) for batch in together]
    seen = ids(in_order)
    assert [i for i in seen if i >= 0] == list(range(n))
    assert all(i == -1 for i in seen[n:])
    for batch in in_order:
        for sample_id, targets in zip(batch["sample_ids"].tolist(), batch["targets"].tolist(), strict=True):
            assert targets == [n - 1 if sample_id == -1 else sample_id] * 3  # padding repeats the last sample


def test_evaluation_errors() -> None:
    with pytest.raises(ConfigError, match="batch size 0"):
        evaluation_batches(Numbered(3), 0, range(1), 1)
    with pytest.raises(ConfigError, match="not a part of"):
        evaluation_batches(Numbered(3), 1, range(1, 2), 1)


# -------------------------------------------------------------------------------------------------- prefetch


def data_threads() -> int:
    return sum(thread.name.startswith("accelbridge-data") for thread in threading.enumerate())


def test_prefetcher_gives_what_the_loader_gives() -> None:
    loader = make_loader(Numbered(30))
    with Prefetcher(loader, 3, 9) as batches:
        made = list(batches)
    assert [step for step, _ in made] == list(range(3, 9))
    assert all(equal(microbatches, loader.step(step)) for step, microbatches in made)
    assert list(Prefetcher(loader, 4, 4)) == []
    assert data_threads() == 0


class Recorded(Loader):
    """A loader that notes its steps, and fails at step 3."""

    def step(self, step: int) -> list[Batch]:
        self.__dict__.setdefault("made", []).append(step)
        if step == 3:
            raise DataError("shard 3 is gone")
        return super().step(step)


def recorded_loader() -> Recorded:
    return Recorded(
        Numbered(30),
        global_batch_size=4,
        microbatch_size=2,
        coordinates=range(1),
        data_parallel=1,
        seed=0,
        shuffle=True,
    )


def test_prefetcher_raises_at_the_failing_step_and_ends() -> None:
    batches = Prefetcher(recorded_loader(), 0, 10)
    assert [next(batches)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="shard 3 is gone"):
        next(batches)
    assert list(batches) == []
    assert data_threads() == 0


@pytest.mark.parametrize("ahead", [1, 2])
def test_prefetcher_is_bounded_and_closes_early(ahead: int) -> None:
    loader = recorded_loader()
    with Prefetcher(loader, 4, 1000, ahead=ahead) as batches:
        assert next(batches)[0] == 4
        deadline = time.monotonic() + 5
        while len(loader.__dict__.get("made", ())) < 1 + ahead and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        assert loader.__dict__["made"] == list(range(4, 5 + ahead))
    assert list(batches) == []
    assert data_threads() == 0
    batches.close()
    with pytest.raises(ValueError, match="ahead=0"):
        Prefetcher(loader, 0, 1, ahead=0)
