"""Documents from files: a folder of text, one text file, or JSONL.

A file whose name ends in ``.jsonl`` or ``.ndjson`` has a document per line, wherever it is found; any other
file is one document. What is not text is left out and counted by reason.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from accelbridge.errors import DataError, did_you_mean

JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class SourceFile:
    """A file as it was found; another size or time of change later means that it was changed meanwhile."""

    path: Path
    size: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        return self.path.name.lower().endswith(JSONL_SUFFIXES)


# -------------------------------------------------------------------------------------------------- finding


def find_files(
    source: Path, suffixes: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[list[SourceFile], Counter[str]]:
    """List the files of ``source``, sorted by relative path, and count by reason what is left out.

    Args:
        source: a file, or a folder that is searched to any depth; links to folders are not followed.
        suffixes: take only names that end in one of these (".py"); empty: all. Ignored for a single file.
        exclude: shell patterns; leave out what has a path relative to ``source``, or a part of one, that
            matches.

    Raises ``DataError`` if ``source`` or a folder in it is missing or cannot be read.
    """
    skipped: Counter[str] = Counter()
    found = _stat(source)
    if not stat.S_ISDIR(found.st_mode):
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{source} is neither a folder nor a regular file")
        return [SourceFile(source, found.st_size, found.st_mtime_ns)], skipped
    files = []
    for relative in sorted(_walk(source, exclude, skipped)):
        path = source / relative
        if suffixes and not relative.lower().endswith(tuple(_with_dot(suffix) for suffix in suffixes)):
            skipped["other suffix"] += 1
        elif not path.is_file():
            skipped["not a regular file"] += 1
        else:
            found = _stat(path)
            files.append(SourceFile(path, found.st_size, found.st_mtime_ns))
    return files, skipped


def _walk(source: Path, exclude: Sequence[str], skipped: Counter[str]) -> Iterator[str]:
    """Yield paths relative to ``source`` with forward slashes, in any order."""
    for folder, folders, names in os.walk(source, onerror=_cannot_list):
        prefix = Path(folder).relative_to(source)
        kept = [name for name in folders if not _matches((prefix / name).as_posix(), exclude)]
        skipped["excluded"] += len(folders) - len(kept)
        folders[:] = kept  # what os.walk descends into
        for name in names:
            relative = (prefix / name).as_posix()
            if _matches(relative, exclude):
                skipped["excluded"] += 1
            else:
                yield relative


def _matches(relative: str, patterns: Sequence[str]) -> bool:
    name = relative.rpartition("/")[2]  # parent folders that match were never descended into
    return any(fnmatchcase(relative, pattern) or fnmatchcase(name, pattern) for pattern in patterns)


def _with_dot(suffix: str) -> str:
    return (suffix if suffix.startswith(".") else f".{suffix}").lower()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _cannot_list(error: OSError) -> NoReturn:
    raise DataError(f"cannot read {error.filename}: {error.strerror}; make it readable or exclude it") from error


# -------------------------------------------------------------------------------------------------- reading


class Reader:
    """Reads the documents of files.

    Args:
        text_key: the key of a JSONL line that has the document.
        skipped: counts what is left out, by reason.
        advance: called with the number of source bytes just read.
    """

    def __init__(self, text_key: str, skipped: Counter[str], advance: Callable[[int], None]) -> None:
        self._text_key, self._skipped, self._advance = text_key, skipped, advance

    def documents(self, file: SourceFile) -> Iterator[str]:
        """Yield the texts of ``file``. ``DataError`` if it can't be read, changes, or has a bad line."""
        texts = self._lines(file) if file.is_jsonl else self._whole(file)
        for text in texts:
            if text:
                yield text
            else:
                self._skipped["empty"] += 1

    def _whole(self, file: SourceFile) -> Iterator[str]:
        content = b"".join(_chunks(file))
        self._advance(file.size)
        if b"\0" in content:
            self._skipped["binary"] += 1
            return
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            self._skipped["not UTF-8"] += 1
            return
        yield text

    def _lines(self, file: SourceFile) -> Iterator[str]:
        for number, line in enumerate(_chunks(file), start=1):
            self._advance(len(line))
            yield self._parse(line, f"{file.path}:{number}") if line.strip() else ""

    def _parse(self, line: bytes, where: str) -> str:
        try:
            entry = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}; each line must be one object") from error
        if not isinstance(entry, dict):
            raise DataError(f"{where}: found {_kind(entry)} instead of an object with a {self._text_key!r} key")
        if self._text_key not in entry:
            hint = did_you_mean(self._text_key, list(entry))
            keys = " ".join(map(repr, entry)) or "none"
            raise DataError(f"{where}: no key {self._text_key!r} (found {keys}){hint}; choose it with --text-key")
        text = entry[self._text_key]
        if not isinstance(text, str):
            raise DataError(f"{where}: {self._text_key!r} is {_kind(text)} instead of text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
            raise DataError(f"{where}: {self._text_key!r} is not valid Unicode: {error.reason}") from error
        return text


def _chunks(file: SourceFile) -> Iterator[bytes]:
    """Yield ``file`` line by line; raise ``DataError`` if it isn't, or doesn't stay, as it was found."""
    try:
        with file.path.open("rb") as stream:
            if file.is_jsonl:
                yield from stream
            else:
                yield stream.read()
            now = os.fstat(stream.fileno())
    except OSError as error:
        raise DataError(f"cannot read {file.path}: {error.strerror}; make it readable or exclude it") from error
    if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
        raise DataError(f"{file.path} changed while it was read; build again once nothing writes to it")


def _kind(value: object) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
    }
    return names.get(type(value), "an object")
