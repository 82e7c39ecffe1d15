"""Text <-> token ids: bytes, or a Hugging Face ``tokenizer.json``.

A tokenizer never emits its end-of-document id from text, whatever the text contains: the store adds that id
after each document.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accelbridge.data.files import absolute
from accelbridge.errors import DataError

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
"""Special tokens that are taken for the end of a document when none is named, in this order."""

TOKENIZER_FILE = "tokenizer.json"

Ids = NDArray[np.unsignedinteger[Any]]
"""Token ids of one document, shape [tokens], any unsigned integer dtype."""


class Tokenizer(ABC):
    """What a token store must know of the tokenizer that made it."""

    vocab_size: int
    """All ids are in ``range(vocab_size)``."""
    eod: int
    """The id that ends each document."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, without ``eod``."""

    @abstractmethod
    def decode(self, ids: ArrayLike) -> str:
        """The text of ``ids``; ``eod`` is left out. ``DataError`` for an id outside the vocabulary."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """What ``index.json`` keeps, enough for :func:`load_tokenizer`."""

    def save(self, folder: Path) -> None:  # noqa: B027 - most tokenizers need no file
        """Write the files that :meth:`describe` refers to."""

    def encode(self, text: str) -> Ids:
        """Ids of ``text``, without ``eod``."""
        return self.encode_batch([text])[0]

    def _content(self, ids: ArrayLike) -> NDArray[np.int64]:
        """``ids`` checked against the vocabulary, without ``eod``."""
        found = np.asarray(ids, dtype=np.int64).reshape(-1)
        outside = found[(found < 0) | (found >= self.vocab_size)]
        if outside.size:
            raise DataError(f"cannot decode id {outside[0]}: the vocabulary is 0..{self.vocab_size - 1}")
        return found[found != self.eod]


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8 (0..255), and 256 for the end of a document. Needs no file and no training."""

    vocab_size = 257
    eod = 256

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: ArrayLike) -> str:
        return self._content(ids).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def describe(self) -> dict[str, str]:
        return {"kind": "bytes"}


class IdsOnly(Tokenizer):
    """Stands for a tokenizer that isn't known here: for stores of ids made elsewhere, or synthetic ones."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size, self.eod = vocab_size, eod

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        raise DataError("this store was written from ids, without a tokenizer: text cannot be encoded")

    def decode(self, ids: ArrayLike) -> str:
        raise DataError("this store was written from ids, without a tokenizer: its ids cannot be decoded")

    def describe(self) -> dict[str, str]:
        return {"kind": "ids"}


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json`` read by the ``tokenizers`` library.

    Args:
        path: the file, or a folder that has a ``tokenizer.json``.
        eod: the token (text or id) that ends a document; by default the first of ``END_OF_DOCUMENT_TOKENS``
            that the vocabulary has.

    Raises ``DataError`` if the library or file is missing or the file is damaged, or no ``eod`` can be told.
    """

    def __init__(self, path: str | Path, eod: str | int | None = None) -> None:
        file = absolute(path)
        file = file / TOKENIZER_FILE if file.is_dir() else file
        self._content_bytes = _read_tokenizer_file(file)
        self._tokenizer = _parse_tokenizer(file, self._content_bytes)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # The largest id, not the count: vocabularies with holes exist.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eod = _find_eod(file, vocabulary, self.vocab_size, eod)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        # The fast form leaves out character offsets, which nothing here reads; tokenizers < 0.20 lacks it.
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        encodings = encode(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: ArrayLike) -> str:
        return self._tokenizer.decode(self._content(ids).tolist(), skip_special_tokens=False)

    def describe(self) -> dict[str, str]:
        digest = hashlib.sha256(self._content_bytes).hexdigest()
        return {"kind": "huggingface", "file": TOKENIZER_FILE, "sha256": digest}

    def save(self, folder: Path) -> None:
        (folder / TOKENIZER_FILE).write_bytes(self._content_bytes)


def make_tokenizer(name: str | Path, eod: str | int | None = None) -> Tokenizer:
    """``"bytes"``, or the path of a ``tokenizer.json`` or its folder. ``eod`` is for the latter."""
    if name == "bytes":
        if eod is not None:
            raise DataError(f"the bytes tokenizer ends documents with id 256; it takes no --eod (found {eod!r})")
        return ByteTokenizer()
    return HuggingFaceTokenizer(name, eod)


def load_tokenizer(description: Mapping[str, str], folder: Path, vocab_size: int, eod: int) -> Tokenizer:
    """The tokenizer of the store in ``folder``, from what :meth:`Tokenizer.describe` wrote into its index.

    Raises ``DataError`` if the kind is unknown or the file beside the index is not the one that made the
    store.
    """
    kind = description.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "ids":
        return IdsOnly(vocab_size, eod)
    if kind != "huggingface":
        raise DataError(f"{folder}: unknown tokenizer kind {kind!r}; a newer accelbridge may know it")
    tokenizer = HuggingFaceTokenizer(folder / TOKENIZER_FILE, eod)
    if tokenizer.describe() != dict(description):
        raise DataError(f"{folder / TOKENIZER_FILE} is not the file that this store was built with; rebuild the store")
    return tokenizer


def _read_tokenizer_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f'cannot read tokenizer {file}: {error.strerror}; pass "bytes" or a tokenizer.json') from error


def _parse_tokenizer(file: Path, content: bytes) -> tokenizers.Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"{file} needs the tokenizers library, which is not installed; pip install 'accelbridge[hf]'"
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file} is not a Hugging Face tokenizer.json: {error}") from error
    # Files often carry the lengths of the model they came from; a training document must come out whole.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # "<|endoftext|>" spelled in a document is text, and must not end it.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _find_eod(file: Path, vocabulary: Mapping[str, int], vocab_size: int, eod: str | int | None) -> int:
    if isinstance(eod, int):
        if not 0 <= eod < vocab_size:
            raise DataError(f"end-of-document id {eod} is outside the vocabulary of {file} (0..{vocab_size - 1})")
        return eod
    if eod is not None:
        if eod not in vocabulary:
            raise DataError(f"{file} has no token {eod!r} to end documents with; name another one with --eod TOKEN")
        return vocabulary[eod]
    for token in END_OF_DOCUMENT_TOKENS:
        if token in vocabulary:
            return vocabulary[token]
    raise DataError(
        f"cannot tell which token of {file} ends a document: none is {' '.join(END_OF_DOCUMENT_TOKENS)}; "
        "name it with --eod TOKEN (eod= in Python)"
    )
