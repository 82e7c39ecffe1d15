"""Building stores from text, and the ``accelbridge data`` command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from accelbridge.cli.data import app
from accelbridge.data import build as build_module
from accelbridge.data.build import build
from accelbridge.data.source import find_files
from accelbridge.data.store import TokenStore
from accelbridge.errors import ConfigError, DataError


def texts(store: Path) -> list[str]:
    """The documents of a byte-level store."""
    opened = TokenStore(store, verify="checksum")
    tokens, tokenizer = opened.window(0, opened.tokens).tolist(), opened.tokenizer()
    documents, start = [], 0
    for position, token in enumerate(tokens):
        if token == tokenizer.eod:
            documents.append(tokenizer.decode(tokens[start:position]))
            start = position + 1
    assert opened.segments(0, opened.tokens)[-1] == len(documents) - 1
    return documents


def write_files(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def write_jsonl(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


FOLDER: dict[str, str | bytes] = {
    "b.py": "b",
    "a/z.py": "z\r\n",
    "a/y.txt": "y",
    "a.py": "héllo",
    "empty.py": "",
    "image.py": b"\x89PNG\0\1",
    "latin.py": "é".encode("latin-1"),
    "tests/t.py": "t",
    "a/tests/u.py": "u",
}


# ------------------------------------------------------------------------------------------------- sources


def test_a_folder_is_read_in_sorted_order(tmp_path: Path) -> None:
    source = write_files(tmp_path / "src", FOLDER)
    summary = build(source, tmp_path / "out", suffixes=["py"], exclude=["tests"])
    assert texts(tmp_path / "out" / "train") == ["héllo", "z\r\n", "b"]
    assert (summary.documents, summary.tokens, summary.bytes) == (3, 13, 10)
    assert summary.skipped == {"binary": 1, "empty": 1, "excluded": 2, "not UTF-8": 1, "other suffix": 1}
    assert list(summary.splits) == ["train"]
    assert summary.splits["train"].fingerprint == TokenStore(tmp_path / "out" / "train").fingerprint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_exclude_patterns(tmp_path: Path) -> None:
    source = write_files(tmp_path / "src", FOLDER)

    def found(*exclude: str) -> list[str]:
        return [file.path.relative_to(source).as_posix() for file in find_files(source, [".py"], exclude)[0]]

    assert "tests/t.py" in found()
    assert found("a", "tests", "*t*.py", "i*") == ["a.py", "b.py"]
    assert found("a/*", "tests") == ["a.py", "b.py", "empty.py", "image.py", "latin.py"]
    assert found("*.py") == []


def test_jsonl_has_a_document_per_line(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "d.jsonl", [{"text": "one\n"}, {"text": ""}, {"text": "zwei 🙂", "id": 2}])
    source.write_text("\ufeff" + source.read_text() + "\n")
    summary = build(source, tmp_path / "out")
    assert texts(tmp_path / "out" / "train") == ["one\n", "zwei 🙂"]
    assert summary.skipped == {"empty": 2}
    write_jsonl(tmp_path / "e.jsonl", [{"body": "x"}])
    build(tmp_path / "e.jsonl", tmp_path / "out2", text_key="body")
    assert texts(tmp_path / "out2" / "train") == ["x"]
    folder = write_files(tmp_path / "mixed", {"a.jsonl": '{"text": "1"}\n{"text": "2"}', "b.txt": "3"})
    build(folder, tmp_path / "out3")
    assert texts(tmp_path / "out3" / "train") == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b'["a"]', "found a list instead of an object with a 'text' key"),
        (b"null", "found null instead of an object"),
        (
            b'{"txt": "a"}',
            r"no key 'text' \(found 'txt'\); did you mean \"txt\"\?; choose it with --text-key",
        ),
        (b"{}", r"no key 'text' \(found none\)"),
        (b'{"text": 3}', "'text' is a number instead of text"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (rb'{"text": "\ud800"}', "'text' is not valid Unicode"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    source = tmp_path / "d.jsonl"
    source.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"/d.jsonl:2: {message}"):
        build(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]  # nothing half-built is left


def test_sources_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*/none: No such file"):
        build(tmp_path / "none", tmp_path / "out")
    source = write_files(tmp_path / "src", {"a.bin": b"\0", "b.txt": ""})
    with pytest.raises(DataError, match=r"/src has no text to train on \(left out: 1 binary, 1 empty\)"):
        build(source, tmp_path / "out")
    with pytest.raises(DataError, match=r"left out: 2 other suffix"):
        build(source, tmp_path / "out", suffixes=[".py"])
    with pytest.raises(DataError, match="neither a folder nor a regular file"):
        build("/dev/null", tmp_path / "out")
    os.mkfifo(source / "pipe")
    (source / "c.txt").write_text("c")
    assert build(source, tmp_path / "out").skipped["not a regular file"] == 1


def test_an_unreadable_file_or_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_files(tmp_path / "src", {"b/a.txt": "a"})
    refused = PermissionError(13, "Permission denied", str(source / "b"))  # raised by hand: root may read all

    def refuse(*_: Any, **__: Any) -> Any:
        raise refused

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        message = r"cannot read .*/a.txt: Permission denied; make it readable or exclude it"
        with pytest.raises(DataError, match=message):
            build(source, tmp_path / "out")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot read .*/b: Permission denied; make it readable or exclude it"):
        build(source, tmp_path / "out")


CHANGES = {
    "rewritten": (lambda file: os.utime(file, ns=(0, 0)), "_read", "1.txt changed while it was read"),
    "grown": (lambda file: file.write_text("longer"), "_read", "1.txt changed while it was read"),
    "removed": (lambda file: file.unlink(), "_read", "cannot read .*/1.txt: No such file"),
    "added": (lambda file: file.with_name("9.txt").touch(), "_read", "9.txt changed during the build"),
    "changed after it was read": (
        lambda file: file.touch(),
        "_check_filled",
        "1.txt changed during the build",
    ),
    "removed after it was read": (
        lambda file: file.unlink(),
        "_check_filled",
        "1.txt changed during the build",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_is_an_error(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inflict, when, message = CHANGES[change]
    source = write_files(tmp_path / "src", {f"{i}.txt": "text" for i in range(3)})
    os.utime(source / "1.txt", ns=(10**18, 10**18))
    original = getattr(build_module, when)

    def meanwhile(*arguments: Any) -> Any:
        inflict(source / "1.txt")
        return original(*arguments)

    monkeypatch.setattr(build_module, when, meanwhile)
    with pytest.raises(DataError, match=message):
        build(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_out_may_lie_within_the_source(tmp_path: Path) -> None:
    source = write_files(tmp_path / "src", {"a.txt": "a"})
    build(source, source / "data" / "out")
    assert texts(source / "data" / "out" / "train") == ["a"]


def test_out_is_never_overwritten(tmp_path: Path) -> None:
    source = write_files(tmp_path / "src", {"a.txt": "a"})
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"/out already exists and is never overwritten"):
        build(source, tmp_path / "out")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"/link already exists"):
        build(source, tmp_path / "link")


def test_out_that_cannot_be_written(tmp_path: Path) -> None:
    source = write_files(tmp_path / "src", {"a.txt": "a"})
    with pytest.raises(DataError, match=r"cannot write .*/a.txt/out: "):
        build(source, source / "a.txt" / "out")


# ---------------------------------------------------------------------------------------------------- splits


def test_validation_is_chosen_by_content(tmp_path: Path) -> None:
    documents = [f"document {i}" for i in range(400)]
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents + documents])
    first = build(source, tmp_path / "a", validation_fraction=0.25)
    train, validation = texts(tmp_path / "a" / "train"), texts(tmp_path / "a" / "validation")
    assert sorted(train + validation) == sorted(documents + documents)
    assert not set(train) & set(validation)  # copies stay together
    assert 140 < len(validation) < 260

    write_jsonl(tmp_path / "b.jsonl", [{"text": text} for text in [*documents[::-1], "one more"]])
    build(tmp_path / "b.jsonl", tmp_path / "b", validation_fraction=0.25)
    assert set(validation) <= set(texts(tmp_path / "b" / "validation"))  # whatever the order and the rest

    again = build(source, tmp_path / "c", validation_fraction=0.25)
    other = build(source, tmp_path / "d", validation_fraction=0.25, seed=1)
    assert again.splits["train"].fingerprint == first.splits["train"].fingerprint
    assert other.splits["train"].fingerprint != first.splits["train"].fingerprint


def test_a_single_text_is_cut_between_lines(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    source = write_files(tmp_path, {"a.txt": text, "b.txt": "x" * 10}) / "a.txt"
    build(source, tmp_path / "a", validation_fraction=0.1)
    (train,), (validation,) = texts(tmp_path / "a" / "train"), texts(tmp_path / "a" / "validation")
    assert train + validation == text
    assert train.endswith("\n")
    assert 0.08 < len(validation) / len(text) < 0.13
    build(tmp_path / "b.txt", tmp_path / "b", validation_fraction=0.2)
    assert texts(tmp_path / "b" / "validation") == ["xx"]


def test_splits_that_cannot_be(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    for fraction in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="validation fraction"):
            build(source, tmp_path / "out", validation_fraction=fraction)
    with pytest.raises(DataError, match=r"none of the 1 documents of .* fell to validation; use another"):
        build(source, tmp_path / "out", validation_fraction=1e-9)
    with pytest.raises(DataError, match="fell to train"):
        build(source, tmp_path / "out", validation_fraction=1 - 1e-9)


def test_batches_and_shards_do_not_change_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(50)])
    build(source, tmp_path / "a")
    monkeypatch.setattr(build_module, "_BATCH_CHARACTERS", 20)
    build(source, tmp_path / "b", shard_tokens=30)
    assert texts(tmp_path / "a" / "train") == texts(tmp_path / "b" / "train")
    assert len(TokenStore(tmp_path / "b" / "train").index.shards) > 5


def test_a_huggingface_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "a b"}, {"text": "  "}, {"text": "b z"}])
    summary = build(source, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    store = TokenStore(tmp_path / "out" / "train")
    assert store.window(0, store.tokens).tolist() == [1, 2, 0, 2, 3, 0]
    assert summary.skipped == {"no tokens": 1}
    assert store.tokenizer().decode([1, 2]) == "a b"


# --------------------------------------------------------------------------------------------- command line


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_command_line(tmp_path: Path) -> None:
    source = write_files(tmp_path / "src", FOLDER)
    options = (
        "--suffix",
        ".py",
        "--suffix",
        ".txt",
        "--exclude",
        "tests",
        "--validation-fraction",
        "0.5",
        "--seed",
        3,
    )
    output = invoke("build", source, tmp_path / "out", *options)
    assert "left out: 1 binary, 1 empty, 2 excluded, 1 not UTF-8" in output
    assert "/out/train: " in output
    assert "/out/validation: " in output

    assert invoke("verify", tmp_path / "out").count("all checksums match") == 2
    assert "vocab size            257" in invoke("show", tmp_path / "out" / "train")
    facts = json.loads(invoke("show", "--json", tmp_path / "out"))
    assert [Path(store["path"]).name for store in facts] == ["train", "validation"]
    assert sum(store["documents"] for store in facts) == 4

    shard = tmp_path / "out" / "validation" / "tokens-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(DataError, match=r"checksum mismatch in .*/validation/tokens-00000.bin"):
        invoke("verify", tmp_path / "out")
    with pytest.raises(DataError, match=r"/src is not a token store"):
        invoke("show", source)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_standard_error(
    tmp_path: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("accelbridge.data.progress._SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    source = write_files(tmp_path / "src", {"a.txt": "a" * 2_000_000})
    build(source, tmp_path / "out", show_progress=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "tokenizing src" in captured.err
    if not terminal:
        assert captured.err == "tokenizing src: 2 of 2 MB\n"
    build(source, tmp_path / "quiet")
    assert capfd.readouterr().err == ""
