"""Token stores: written as a stream, read through memory maps. ``index.py`` describes the format."""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accelbridge.data.files import absolute, sha256_of, staged_folder
from accelbridge.data.index import INDEX_FILE, Index, Shard, read_index, smallest_dtype
from accelbridge.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from accelbridge.errors import DataError

SHARD_TOKENS = 1 << 27
"""Tokens after which a new shard is begun: 256 MiB of uint16."""

_LITTLE_ENDIAN = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_OFFSET = np.dtype("<i8")


# -------------------------------------------------------------------------------------------------- writing


class TokenWriter:
    """Writes a token store document by document.

    Use as a context manager: the store appears at ``out`` when the block ends well, and not at all otherwise.
    Memory: one document, and 8 bytes per document of the current shard.

    Args:
        out: where the store will be; an existing path is never overwritten.
        tokenizer: gives vocabulary and end-of-document id, and is recorded in the index.
        shard_tokens: a shard is closed after the document that reaches this many tokens.

    Raises ``DataError`` if ``out`` exists or cannot be written, or no document was appended.
    """

    def __init__(self, out: str | os.PathLike[str], tokenizer: Tokenizer, *, shard_tokens: int = SHARD_TOKENS) -> None:
        self.out = absolute(out)
        self.documents = self.tokens = self.source_bytes = 0
        self._tokenizer = tokenizer
        self._dtype: Literal["uint16", "uint32"] = smallest_dtype(tokenizer.vocab_size)
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._open: _ShardFile | None = None
        self._staging = ExitStack()
        self._folder: Path | None = None

    def __enter__(self) -> Self:
        self._folder = self._staging.enter_context(staged_folder(self.out))
        return self

    def append(self, ids: ArrayLike, source_bytes: int = 0) -> None:
        """Add one document; ``eod`` is appended to it.

        Args:
            ids: integers in ``range(vocab_size)``, shape [tokens]; raises ``DataError`` for others.
            source_bytes: size of the document's text, for the index.
        """
        assert self._folder is not None, "TokenWriter is a context manager: append inside its with block"
        document = self._with_eod(np.asarray(ids))
        if self._open is None:
            self._open = _ShardFile(self._folder, len(self._shards))
        self._open.append(document)
        self.documents += 1
        self.tokens += document.size
        self.source_bytes += source_bytes
        if self._open.tokens >= self._shard_tokens:
            self._close_shard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            if self._open is not None:
                self._open.abandon()
            self._staging.__exit__(kind, error, trace)
            return
        with self._staging:
            self._finish()

    def _with_eod(self, ids: NDArray[Any]) -> NDArray[Any]:
        vocab_size = self._tokenizer.vocab_size
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise DataError(f"a document is a 1-d array of integer ids; found {ids.dtype} of shape {ids.shape}")
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            raise DataError(
                f"document {self.documents} has ids {ids.min()}..{ids.max()}, and the vocabulary is "
                f"0..{vocab_size - 1}; was it made with another tokenizer?"
            )
        document = np.empty(ids.size + 1, dtype=_LITTLE_ENDIAN[self._dtype])
        document[:-1] = ids
        document[-1] = self._tokenizer.eod
        return document

    def _close_shard(self) -> None:
        if self._open is not None:
            self._shards.append(self._open.close())
            self._open = None

    def _finish(self) -> None:
        assert self._folder is not None
        self._close_shard()
        if not self._shards:
            raise DataError(f"no documents to write to {self.out}; a token store has at least one")
        self._tokenizer.save(self._folder)
        index = Index(
            dtype=self._dtype,
            vocab_size=self._tokenizer.vocab_size,
            eod=self._tokenizer.eod,
            tokenizer=self._tokenizer.describe(),
            tokens=self.tokens,
            documents=self.documents,
            source_bytes=self.source_bytes,
            shards=tuple(self._shards),
        )
        _write_durably(self._folder / INDEX_FILE, index.to_json().encode())


class _ShardFile:
    """The shard being written."""

    def __init__(self, folder: Path, number: int) -> None:
        self._path = folder / f"tokens-{number:05d}.bin"
        self._documents_path = folder / f"documents-{number:05d}.bin"
        self._file = self._path.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self._ends = array("q")
        self.tokens = 0

    def append(self, document: NDArray[Any]) -> None:
        content = document.tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.tokens += document.size
        self._ends.append(self.tokens)

    def close(self) -> Shard:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        ends = np.asarray(self._ends).astype(_OFFSET).tobytes()
        _write_durably(self._documents_path, ends)
        return Shard(
            file=self._path.name,
            tokens=self.tokens,
            documents=len(self._ends),
            sha256=self._digest.hexdigest(),
            documents_file=self._documents_path.name,
            documents_sha256=hashlib.sha256(ends).hexdigest(),
        )

    def abandon(self) -> None:
        self._file.close()


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# -------------------------------------------------------------------------------------------------- reading


class TokenStore:
    """A token store, read through memory maps that are opened when first touched.

    Tokens have global addresses 0..tokens-1 across all shards. Safe to pickle, to use after a fork, and to
    read from several threads.

    Args:
        path: the store's folder.
        verify: "size" compares the size of every file with the index; "checksum" also reads and hashes them.

    Raises ``DataError`` for what is missing, damaged, empty, or no store, naming the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: Literal["size", "checksum"] = "size") -> None:
        self.path = absolute(path)
        self.index = read_index(self.path)
        if not self.index.shards:
            raise DataError(f"{self.path} is empty: it has no tokens; rebuild it from a source that has text")
        for shard in self.index.shards:
            self._check_size(shard.file, shard.tokens * self.index.token_bytes)
            self._check_size(shard.documents_file, shard.documents * _OFFSET.itemsize)
        if verify == "checksum":
            self.verify()
        self._starts = [0, *accumulate(shard.tokens for shard in self.index.shards)]
        self._maps: dict[str, NDArray[Any]] = {}

    @property
    def tokens(self) -> int:
        """All tokens, end-of-document ids included."""
        return self.index.tokens

    @property
    def documents(self) -> int:
        return self.index.documents

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the index's content, which contains that of every shard."""
        return self.index.fingerprint()

    def window(self, start: int, length: int) -> NDArray[np.int64]:
        """Tokens ``start .. start+length-1``, int64 [length]. Raises ``IndexError`` outside the store."""
        parts = [
            self._map(shard.file, _LITTLE_ENDIAN[self.index.dtype])[low:high]
            for shard, _, low, high in self._parts(start, length)
        ]
        return np.concatenate(parts, dtype=np.int64)

    def segments(self, start: int, length: int) -> NDArray[np.int32]:
        """Documents of the same window, counted from 0 at its first token, int32 [length]."""
        begins = np.zeros(length, dtype=np.int32)
        for shard, shard_start, low, high in self._parts(start, length):
            ends = self._document_ends(shard)
            first, last = np.searchsorted(ends, [low, high], side="right")
            # A document ends where the next one begins, possibly in the next shard; the window's own end is
            # none.
            positions = ends[first:last] + (shard_start - start)
            begins[positions[positions < length]] = 1
        return np.cumsum(begins, dtype=np.int32)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made this store, from the files in its folder."""
        return load_tokenizer(self.index.tokenizer, self.path, self.index.vocab_size, self.index.eod)

    def verify(self) -> None:
        """Hash every file in chunks and compare; raises one ``DataError`` that names all that differ."""
        expected = {shard.file: shard.sha256 for shard in self.index.shards}
        expected |= {shard.documents_file: shard.documents_sha256 for shard in self.index.shards}
        if self.index.tokenizer.get("kind") == "huggingface":
            expected[TOKENIZER_FILE] = self.index.tokenizer.get("sha256", "")
        wrong = [str(self.path / name) for name, digest in expected.items() if self._digest(name) != digest]
        if wrong:
            raise DataError(
                f"checksum mismatch in {', '.join(wrong)}: not the bytes that were written; "
                "restore them from a copy or rebuild the store"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Maps would be pickled as copies of the whole data; the other process opens its own.
        return self.__dict__ | {"_maps": {}}

    def _parts(self, start: int, length: int) -> Iterator[tuple[Shard, int, int, int]]:
        """Yield (shard, address of its first token, low, high) for the pieces ``low:high`` of a window."""
        if start < 0 or length < 1 or start + length > self.tokens:
            raise IndexError(f"window {start}..{start + length - 1} of {self.path}, which has {self.tokens} tokens")
        number = bisect_right(self._starts, start) - 1
        while number < len(self.index.shards) and self._starts[number] < start + length:
            shard, shard_start = self.index.shards[number], self._starts[number]
            yield (
                shard,
                shard_start,
                max(start - shard_start, 0),
                min(start + length - shard_start, shard.tokens),
            )
            number += 1

    def _document_ends(self, shard: Shard) -> NDArray[Any]:
        ends = self._map(shard.documents_file, _OFFSET)
        if ends[-1] != shard.tokens:
            raise DataError(
                f"{self.path / shard.documents_file} is damaged: its last document ends at {ends[-1]}, "
                f"and the shard has {shard.tokens} tokens; rebuild the store"
            )
        return ends

    def _map(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        if name not in self._maps:
            try:
                self._maps[name] = np.asarray(np.memmap(self.path / name, dtype=dtype, mode="r"))
            except (OSError, ValueError) as error:
                raise DataError(f"cannot read {self.path / name}: {error}") from error
        return self._maps[name]

    def _check_size(self, name: str, expected: int) -> None:
        file = self.path / name
        try:
            found = file.stat().st_size
        except FileNotFoundError:
            raise DataError(f"{file} is missing; restore it from a copy or rebuild the store") from None
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror}") from error
        if found != expected:
            what = "truncated" if found < expected else "too long"
            raise DataError(
                f"{file} is {what}: it has {found} bytes instead of {expected}; "
                "restore it from a copy or rebuild the store"
            )

    def _digest(self, name: str) -> str:
        try:
            return sha256_of(self.path / name)
        except OSError as error:
            raise DataError(f"cannot read {self.path / name}: {error.strerror}") from error
