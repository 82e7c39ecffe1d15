"""From text to token stores: ``OUT/train`` and, if asked for, ``OUT/validation``."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from accelbridge.data.files import absolute, refuse_existing, staged_folder
from accelbridge.data.progress import progress
from accelbridge.data.source import Reader, SourceFile, find_files
from accelbridge.data.store import SHARD_TOKENS, TokenStore, TokenWriter
from accelbridge.data.tokenizer import Tokenizer, make_tokenizer
from accelbridge.errors import ConfigError, DataError

_BATCH_CHARACTERS = 4 << 20
"""Text that is tokenized at a time: enough to keep the tokenizer's threads busy, little enough to hold."""
_BATCH_DOCUMENTS = 4096


@dataclass(frozen=True)
class SplitSummary:
    """One store that was built."""

    path: Path
    documents: int
    tokens: int
    bytes: int
    fingerprint: str


@dataclass(frozen=True)
class BuildSummary:
    """What a build did. The counts are sums over the splits; ``bytes`` is the documents' text in UTF-8."""

    documents: int
    tokens: int
    bytes: int
    skipped: dict[str, int]
    """What was left out, by reason."""
    splits: dict[str, SplitSummary]
    """By name: "train", "validation"."""
    seconds: float


def build(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | str | Path = "bytes",
    eod: str | int | None = None,
    validation_fraction: float = 0.0,
    text_key: str = "text",
    suffixes: Sequence[str] = (),
    exclude: Sequence[str] = (),
    seed: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    show_progress: bool = False,
) -> BuildSummary:
    """Build token stores from the text in ``source``; ``out`` appears whole or not at all.

    Args:
        source: a folder (see :func:`~accelbridge.data.source.find_files`), a text file, or a JSONL file.
        out: a new folder that will have ``train`` and, for a positive fraction, ``validation``.
        tokenizer: "bytes", the path of a ``tokenizer.json``, or a tokenizer.
        eod: the token that ends documents, where a ``tokenizer.json`` doesn't have a well-known one.
        validation_fraction: share of the documents, chosen by a hash of (seed, content), so equal documents
            never end up in both splits. Of a single text file, which is one document, it is the end of the
            text.
        text_key: the key of a JSONL line that has the document.
        suffixes, exclude: which files of a folder to take.
        seed: of the choice of validation documents.
        shard_tokens: a shard is closed after the document that reaches this many tokens.
        show_progress: show a bar (on a terminal) or lines on standard error.

    Raises ``DataError`` for a source that is missing, unreadable, without text or changing, a bad JSONL line,
    or an existing ``out``, and ``ConfigError`` for an impossible fraction.
    """
    started = time.monotonic()
    if not 0.0 <= validation_fraction < 1.0:
        raise ConfigError(f"validation fraction {validation_fraction} is not possible; it must be within 0..1, not 1")
    source, out = absolute(source), absolute(out)
    refuse_existing(out)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = make_tokenizer(tokenizer, eod)
    files, skipped = find_files(source, suffixes, exclude)
    is_one_text = source.is_file() and not files[0].is_jsonl
    splitter = _Splitter(validation_fraction, seed, cut=is_one_text)
    with staged_folder(out) as staged, ExitStack() as stack:
        writers = {
            name: stack.enter_context(TokenWriter(staged / name, tokenizer, shard_tokens=shard_tokens))
            for name in splitter.names
        }
        with progress(f"tokenizing {source.name}", sum(file.size for file in files), show_progress) as advance:
            documents = _read(files, Reader(text_key, skipped, advance))
            for batch in _batches(splitter.assign(documents)):
                _write(batch, tokenizer, writers, skipped)
        _check_filled(source, writers, skipped)
        _check_unchanged(source, files, find_files(source, suffixes, exclude)[0], staged)
    return _summarise(out, splitter.names, skipped, time.monotonic() - started)


class _Splitter:
    """Says which split a document belongs to."""

    def __init__(self, fraction: float, seed: int, cut: bool) -> None:
        self.names = ("train", "validation") if fraction > 0 else ("train",)
        self._fraction, self._cut = fraction, cut
        self._key = hashlib.blake2b(str(seed).encode(), digest_size=16).digest()

    def assign(self, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield (split, text) of each document; with ``cut`` each text is itself divided, head and tail."""
        for text in texts:
            if self._cut and self._fraction > 0:
                yield from self._divide(text)
            else:
                yield self._choose(text), text

    def _choose(self, text: str) -> str:
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=self._key).digest()
        return "validation" if int.from_bytes(digest) < self._fraction * 2**64 else "train"

    def _divide(self, text: str) -> Iterator[tuple[str, str]]:
        middle = round(len(text) * (1 - self._fraction))
        middle = text.rfind("\n", 0, middle) + 1 or middle  # between lines, if there are any
        parts = (("train", text[:middle]), ("validation", text[middle:]))
        return ((name, part) for name, part in parts if part)


def _read(files: Sequence[SourceFile], reader: Reader) -> Iterator[str]:
    for file in files:
        yield from reader.documents(file)


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Group documents so that a batch is neither too many of them nor too much text."""
    batch: list[tuple[str, str]] = []
    characters = 0
    for split, text in documents:
        batch.append((split, text))
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write(
    batch: Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
    writers: dict[str, TokenWriter],
    skipped: Counter[str],
) -> None:
    encoded = tokenizer.encode_batch([text for _, text in batch])
    for (split, text), ids in zip(batch, encoded, strict=True):
        if ids.size:
            writers[split].append(ids, source_bytes=len(text.encode("utf-8")))
        else:  # a tokenizer may drop all of a text, such as lone spaces
            skipped["no tokens"] += 1


def _check_filled(source: Path, writers: dict[str, TokenWriter], skipped: Counter[str]) -> None:
    """Raise ``DataError`` if there are no documents, or none for one of the splits."""
    total = sum(writer.documents for writer in writers.values())
    if total == 0:
        left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()) if count)
        raise DataError(f"{source} has no text to train on (left out: {left_out or 'nothing'})")
    for name, writer in writers.items():
        if not writer.documents:
            raise DataError(
                f"none of the {total} documents of {source} fell to {name}; use another validation fraction "
                "or seed, or build the validation store from a source of its own"
            )


def _check_unchanged(source: Path, before: list[SourceFile], now: list[SourceFile], staged: Path) -> None:
    """Raise ``DataError`` if files were added, removed or changed; ``staged`` may lie within the source."""
    now = [file for file in now if not file.path.is_relative_to(staged)]
    if now != before:
        first = min((file.path for file in {*now} ^ {*before}), default=source)
        raise DataError(f"{first} changed during the build; build again once nothing writes to {source}")


def _summarise(out: Path, names: Sequence[str], skipped: Counter[str], seconds: float) -> BuildSummary:
    indexes = {name: TokenStore(out / name).index for name in names}
    splits = {
        name: SplitSummary(out / name, index.documents, index.tokens, index.source_bytes, index.fingerprint())
        for name, index in indexes.items()
    }
    return BuildSummary(
        documents=sum(split.documents for split in splits.values()),
        tokens=sum(split.tokens for split in splits.values()),
        bytes=sum(split.bytes for split in splits.values()),
        skipped={reason: count for reason, count in sorted(skipped.items()) if count},
        splits=splits,
        seconds=seconds,
    )
