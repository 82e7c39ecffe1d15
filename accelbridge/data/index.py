"""``index.json``, which describes a token store and makes it one.

A store is a folder::

    index.json            this file
    tokens-00000.bin      token ids of whole documents, each ended by eod: little-endian uint16 or uint32
    documents-00000.bin   where each document of that shard ends: little-endian int64, counted in tokens from
                          the shard's first one; strictly increasing, the last is the shard's token count
    tokenizer.json        only where the tokenizer has such a file

The index holds no date, path or host, so equal input gives an equal index.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from accelbridge.config import Section
from accelbridge.errors import DataError

FORMAT = "accelbridge-tokens"
VERSION = 1
INDEX_FILE = "index.json"

# A name, never a path: an index is data from elsewhere and must not make us open files outside its folder.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]


class Shard(Section):
    """One pair of files. ``tokens`` counts the end-of-document ids too."""

    file: FileName
    tokens: Positive
    documents: Positive
    sha256: Sha256
    documents_file: FileName
    documents_sha256: Sha256


class Index(Section):
    """The content of ``index.json``."""

    format: Literal["accelbridge-tokens"] = FORMAT
    version: Literal[1] = VERSION
    dtype: Literal["uint16", "uint32"]
    vocab_size: Positive
    eod: Count
    tokenizer: dict[str, str]
    """What :meth:`~accelbridge.data.tokenizer.Tokenizer.describe` returned."""
    tokens: Count
    documents: Count
    source_bytes: Count
    """Size of the documents' text in UTF-8, for losses in bits per byte; 0 if unknown."""
    shards: tuple[Shard, ...]

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Index:
        if self.tokens != sum(shard.tokens for shard in self.shards):
            raise ValueError("tokens is not the sum over the shards")
        if self.documents != sum(shard.documents for shard in self.shards):
            raise ValueError("documents is not the sum over the shards")
        if self.eod >= self.vocab_size:
            raise ValueError(f"eod {self.eod} is outside the vocabulary of {self.vocab_size}")
        if self.dtype == "uint16" and self.vocab_size > 1 << 16:
            raise ValueError(f"a vocabulary of {self.vocab_size} does not fit uint16")
        return self

    @property
    def token_bytes(self) -> int:
        """Bytes per token in the shard files."""
        return 2 if self.dtype == "uint16" else 4

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    def fingerprint(self) -> str:
        """SHA-256 of the content, whatever its layout as text. It covers the data, whose hashes are in it."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def smallest_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The dtype that a store of this vocabulary uses. Raises ``DataError`` beyond 32 bits."""
    if not 0 < vocab_size <= 1 << 32:
        raise DataError(f"a vocabulary of {vocab_size} ids cannot be stored; it must be within 1..{1 << 32}")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def read_index(folder: Path) -> Index:
    """Read and check ``folder/index.json``.

    Raises ``DataError`` for a missing folder, one that is no store, a newer format, and a damaged index.
    """
    file = folder / INDEX_FILE
    found = _load(folder, file)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f'{folder} is not a token store: {file} does not say "format": "{FORMAT}"{_hint(folder)}')
    version = found.get("version")
    if isinstance(version, int) and version > VERSION:
        raise DataError(
            f"{file} has format version {version}, and this accelbridge reads up to {VERSION}; "
            "upgrade accelbridge, or rebuild the store with this one"
        )
    try:
        return Index.model_validate_json(json.dumps(found))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "index"
        raise DataError(f"{file} is damaged: {where}: {first['msg']}; rebuild the store") from error


def _load(folder: Path, file: Path) -> Any:
    if not folder.exists():
        raise DataError(f"there is no token store at {folder}: no such folder{_hint(folder)}")
    try:
        return json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder} is not a token store: it has no {INDEX_FILE}{_hint(folder)}") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is damaged: {error}; rebuild the store") from error


def _hint(folder: Path) -> str:
    """What to do about a ``folder`` that is no store."""
    inside = [str(child.parent) for child in sorted(folder.glob(f"*/{INDEX_FILE}"))] if folder.is_dir() else []
    if inside:
        return f"; did you mean {' or '.join(inside)}?"
    return "; build one with: accelbridge data build SOURCE OUT (the store is then OUT/train)"
