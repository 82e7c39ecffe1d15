"""Batches of few lengths: what is padded to what, and that it changes no loss."""

from __future__ import annotations

import logging

import pytest
import torch

from accelbridge.data.lengths import Lengths
from accelbridge.data.loader import IGNORE, Batch
from accelbridge.models.config import ModelConfig
from accelbridge.models.decoder import Decoder
from accelbridge.train.loss import NextTokenLoss


def batch(length: int) -> Batch:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, 16, (2, length + 1), generator=generator)
    segments = (torch.arange(length) >= length // 2).int().expand(2, length).contiguous()
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments, "sample_ids": torch.arange(2)}


@pytest.mark.parametrize(
    ("lengths", "padded"),
    [
        ((24, 24), (24, 24)),  # one length is never padded
        ((24, 20, 12, 11), (24, 24, 24, 16)),  # to one that came, up to twice as long; else to a power of two
        ((24, 50, 33), (24, 60, 60)),  # which is cut to the longest
        ((24, 70), (24, 70)),  # and what is longer stays as it is
    ],
)
def test_lengths_are_few(lengths: tuple[int, ...], padded: tuple[int, ...]) -> None:
    few = Lengths(60)
    assert tuple(few.pad(batch(length))["tokens"].shape[1] for length in lengths) == padded


def test_what_is_padded_counts_for_nothing() -> None:
    model = Decoder(ModelConfig(vocab_size=16, dim=16, layers=2, heads=2, ffn_dim=24))
    model.reset_parameters(0)
    loss, few, short = NextTokenLoss(model), Lengths(64), batch(13)
    few.pad(batch(24))
    padded = few.pad(short)
    assert padded["tokens"].shape == (2, 24)
    assert (padded["targets"][:, 13:] == IGNORE).all()
    assert padded["segments"].dtype == short["segments"].dtype
    assert torch.equal(padded["sample_ids"], short["sample_ids"])
    assert loss.count(padded) == loss.count(short) == 26
    torch.testing.assert_close(loss(model, padded), loss(model, short), rtol=1e-6, atol=0.0)


def test_padding_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    few = Lengths(64)
    with caplog.at_level(logging.INFO, "accelbridge"):
        for length in (24, 20, 20):
            few.pad(batch(length))
    assert caplog.messages == ["batches of 20 tokens are padded to 24: the device compiles a program for each length"]
