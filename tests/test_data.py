"""Tokenizers, the store on disk, and the order of samples."""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import accelbridge
from accelbridge.data.config import DataConfig
from accelbridge.data.order import Permutation
from accelbridge.data.store import TokenStore, TokenWriter
from accelbridge.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, IdsOnly, Tokenizer, make_tokenizer
from accelbridge.errors import DataError

TEXTS = ["plain", "naïve, 数据 🙂", "line\r\nline\ttab", "</s> is text here", "x" * 1000]


def write_store(
    path: Path, documents: Sequence[Sequence[int]], tokenizer: Tokenizer | None = None, **options: Any
) -> Path:
    with TokenWriter(path, tokenizer or IdsOnly(vocab_size=1000, eod=999), **options) as writer:
        for document in documents:
            writer.append(document)
    return path


def random_documents(seed: int, count: int = 40) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 999, generator.integers(0, 30)).tolist() for _ in range(count)]


def train_tokenizer(path: Path, special: Sequence[str] = ("</s>",)) -> Path:
    """A small byte-level BPE, with the truncation that many published files carry."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the cat"] * 20, trainer)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding()
    tokenizer.save(str(path))
    return path


# ------------------------------------------------------------------------------------------------ tokenizers


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


def test_huggingface_round_trip_is_whole_and_never_ends_a_document(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(train_tokenizer(tmp_path / "tokenizer.json"))
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode([*ids, tokenizer.eod]) == text
        assert tokenizer.eod not in ids  # "</s>" in a document is text
    assert tokenizer.encode("the cat").size < len("the cat")  # merges are used


def test_huggingface_end_of_document(tmp_path: Path) -> None:
    file = train_tokenizer(tmp_path / "tokenizer.json", special=["<stop>", "<pad>"])
    with pytest.raises(DataError, match=r"which token .* ends a document: none is .*--eod TOKEN"):
        make_tokenizer(file)
    assert make_tokenizer(tmp_path, "<stop>").eod == 0  # a folder that has the file
    assert make_tokenizer(file, 1).eod == 1
    with pytest.raises(DataError, match=r"no token '<end>' .*--eod"):
        make_tokenizer(file, "<end>")
    with pytest.raises(DataError, match="id 400 is outside the vocabulary"):
        make_tokenizer(file, 400)


def test_tokenizer_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r'cannot read tokenizer .*/none.json: No such file.*pass "bytes"'):
        make_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad.json is not a Hugging Face tokenizer.json"):
        make_tokenizer(tmp_path / "bad.json")
    with pytest.raises(DataError, match="takes no --eod"):
        make_tokenizer("bytes", "</s>")
    with pytest.raises(DataError, match=r"cannot decode id 257: the vocabulary is 0..256"):
        ByteTokenizer().decode([65, 257])

    def without_tokenizers(name: str, *args: Any) -> Any:
        if name == "tokenizers":
            raise ModuleNotFoundError("No module named 'tokenizers'")
        return real_import(name, *args)

    real_import = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with pytest.raises(DataError, match=r"pip install 'accelbridge\[hf\]'"):
        make_tokenizer(tmp_path / "bad.json")


# ---------------------------------------------------------------------------------------- writing and reading


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1000, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_store_dtype_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    tokenizer = IdsOnly(vocab_size, eod=0)
    store = TokenStore(write_store(tmp_path / "s", [[1, vocab_size - 1]], tokenizer), verify="checksum")
    assert store.index.dtype == dtype
    assert store.window(0, 3).tolist() == [1, vocab_size - 1, 0]
    assert (tmp_path / "s" / "tokens-00000.bin").stat().st_size == 3 * (2 if dtype == "uint16" else 4)


@pytest.mark.parametrize("shard_tokens", [1, 7, 50, 10_000])
def test_windows_and_segments_do_not_depend_on_shards(tmp_path: Path, shard_tokens: int) -> None:
    documents = random_documents(seed=1)
    store = TokenStore(write_store(tmp_path / "s", documents, shard_tokens=shard_tokens))
    stream = [token for document in documents for token in [*document, 999]]
    owner = np.repeat(np.arange(len(documents)), [len(document) + 1 for document in documents])
    assert (store.tokens, store.documents) == (len(stream), len(documents))
    assert len(store.index.shards) > 1 or shard_tokens == 10_000

    generator = np.random.default_rng(2)
    for start in [0, *generator.integers(0, len(stream), 100)]:
        for length in {1, 2, int(generator.integers(1, len(stream) - start + 1)), len(stream) - int(start)}:
            if start + length <= len(stream):
                window, segments = store.window(start, length), store.segments(start, length)
                assert window.dtype == np.int64
                assert segments.dtype == np.int32
                assert window.tolist() == stream[start : start + length]
                assert segments.tolist() == (owner[start : start + length] - owner[start]).tolist()


def test_windows_outside_the_store_are_refused(tmp_path: Path) -> None:
    store = TokenStore(write_store(tmp_path / "s", [[1, 2, 3]]))
    for start, length in [(-1, 2), (0, 5), (4, 1), (0, 0)]:
        with pytest.raises(IndexError):
            store.window(start, length)


def test_store_survives_pickling_fork_and_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = TokenStore(write_store(Path("s"), [list(range(500))] * 50))
    expected = store.window(400, 300).tolist()
    pickled = pickle.dumps(store)
    assert len(pickled) < 2000  # the maps stay behind
    monkeypatch.chdir("/")
    assert pickle.loads(pickled).window(400, 300).tolist() == expected
    child = os.fork()
    if child == 0:
        os._exit(0 if store.window(400, 300).tolist() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first = TokenStore(write_store(tmp_path / "a", [[1, 2], [3]]))
    same = TokenStore(write_store(tmp_path / "b", [[1, 2], [3]]))
    other = TokenStore(write_store(tmp_path / "c", [[1, 2], [4]]))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    index = tmp_path / "b" / "index.json"
    index.write_text(json.dumps(json.loads(index.read_text()), sort_keys=True))
    assert TokenStore(tmp_path / "b").fingerprint == first.fingerprint


def test_store_carries_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(train_tokenizer(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").unlink()
    store = TokenStore(write_store(tmp_path / "s", [tokenizer.encode("the cat").tolist()], tokenizer))
    assert store.tokenizer().decode(store.window(0, store.tokens)) == "the cat"
    copy = tmp_path / "s" / "tokenizer.json"
    copy.write_text(copy.read_text() + " ")
    with pytest.raises(DataError, match=r"s/tokenizer.json is not the file that this store was built with"):
        store.tokenizer()
    with pytest.raises(DataError, match=r"checksum mismatch in .*/s/tokenizer.json"):
        store.verify()


def test_writer_is_atomic_and_never_overwrites(tmp_path: Path) -> None:
    def write_with(meanwhile: Callable[[], object]) -> None:
        with TokenWriter(tmp_path / "s", ByteTokenizer()) as writer:
            writer.append([1])
            assert not (tmp_path / "s").exists()
            meanwhile()

    with pytest.raises(KeyboardInterrupt):
        write_with(lambda: signal.raise_signal(signal.SIGINT))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match=r"/s already exists"):
        write_with((tmp_path / "s").mkdir)  # someone else was faster
    (tmp_path / "s").rmdir()
    write_store(tmp_path / "s", [[1]])
    before = (tmp_path / "s" / "index.json").read_text()
    with pytest.raises(DataError, match=r"/s already exists and is never overwritten; choose another path"):
        write_store(tmp_path / "s", [[2]])
    assert (tmp_path / "s" / "index.json").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


def test_writer_refuses_what_is_no_document(tmp_path: Path) -> None:
    for bad, message in [
        ([1, 1000], "has ids 1..1000"),
        ([-1], "has ids -1..-1"),
        ([0.5], "array of integer ids"),
    ]:
        with pytest.raises(DataError, match=message):
            write_store(tmp_path / "s", [bad])  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"no documents to write to .*/s"):
        write_store(tmp_path / "s", [])
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------- damaged stores


def edit_index(**changes: Any) -> Callable[[Path], object]:
    def edit(store: Path) -> None:
        index = json.loads((store / "index.json").read_text())
        (store / "index.json").write_text(json.dumps(index | changes))

    return edit


def edit_shard(**changes: Any) -> Callable[[Path], object]:
    def edit(store: Path) -> None:
        shards = json.loads((store / "index.json").read_text())["shards"]
        edit_index(shards=[shards[0] | changes, *shards[1:]])(store)

    return edit


def truncate(name: str, by: int) -> Callable[[Path], object]:
    def edit(store: Path) -> None:
        content = (store / name).read_bytes()
        (store / name).write_bytes(content[:-by] if by > 0 else content + b"\0" * -by)

    return edit


DAMAGES = {
    "no index": (
        lambda s: (s / "index.json").unlink(),
        r"/s is not a token store: it has no index.json.*data build",
    ),
    "half an index": (truncate("index.json", 40), r"index.json is damaged: .*rebuild"),
    "not ours": (edit_index(format="other"), r"/s is not a token store: .*does not say"),
    "newer": (
        edit_index(version=2),
        r"index.json has format version 2, .*reads up to 1; upgrade accelbridge",
    ),
    "old": (edit_index(version=0), r"index.json is damaged: version: "),
    "no dtype": (edit_index(dtype="int64"), r"index.json is damaged: dtype: "),
    "unknown key": (edit_index(colour=1), r"index.json is damaged: colour: Extra"),
    "bad total": (edit_index(tokens=5), r"index.json is damaged: .*tokens is not the sum"),
    "bad count": (edit_index(documents=5), r"index.json is damaged: .*documents is not the sum"),
    "bad eod": (edit_index(eod=1000), r"index.json is damaged: .*eod 1000 is outside"),
    "bad vocabulary": (edit_index(vocab_size=70000), r"index.json is damaged: .*does not fit uint16"),
    "a path": (edit_shard(file="../x.bin"), r"index.json is damaged: shards.0.file: "),
    "hidden": (edit_shard(documents_file=".."), r"index.json is damaged: shards.0.documents_file: "),
    "empty": (edit_index(shards=[], tokens=0, documents=0), r"/s is empty: it has no tokens"),
    "no shard": (lambda s: (s / "tokens-00001.bin").unlink(), r"/s/tokens-00001.bin is missing; restore"),
    "no ends": (
        lambda s: (s / "documents-00000.bin").unlink(),
        r"/s/documents-00000.bin is missing; restore",
    ),
    "truncated": (
        truncate("tokens-00001.bin", 2),
        r"tokens-00001.bin is truncated: it has 4 bytes instead of 6",
    ),
    "longer": (
        truncate("tokens-00000.bin", -2),
        r"tokens-00000.bin is too long: it has 10 bytes instead of 8",
    ),
    "truncated ends": (
        truncate("documents-00000.bin", 1),
        r"documents-00000.bin is truncated: it has 7 bytes",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_at_open(tmp_path: Path, damage: str) -> None:
    inflict, message = DAMAGES[damage]
    store = write_store(tmp_path / "s", [[1, 2, 3], [4, 5]], shard_tokens=3)
    inflict(store)
    with pytest.raises(DataError, match=message):
        TokenStore(store)


def test_a_folder_of_stores_is_pointed_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no token store at .*/none: no such folder; build one with"):
        TokenStore(tmp_path / "none")
    write_store(tmp_path / "out" / "train", [[1]])
    with pytest.raises(DataError, match=r"/out is not a token store: .*did you mean .*/out/train\?"):
        TokenStore(tmp_path / "out")
    with pytest.raises(DataError, match=r"is not a token store: it has no index.json"):
        TokenStore(tmp_path / "out" / "train" / "index.json")


@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents-00001.bin"])
def test_a_flipped_bit_is_found_by_checksum_only(tmp_path: Path, name: str) -> None:
    store = write_store(tmp_path / "s", [[1, 2, 3], [4, 5]], shard_tokens=3)
    content = bytearray((store / name).read_bytes())
    content[0] ^= 1
    (store / name).write_bytes(content)
    opened = TokenStore(store)
    with pytest.raises(DataError, match=rf"checksum mismatch in \S*/s/{name}: not the bytes that were written"):
        TokenStore(store, verify="checksum")
    if name.startswith("documents"):
        with pytest.raises(DataError, match=r"documents-00001.bin is damaged: its last document ends at 2"):
            opened.segments(0, opened.tokens)


# ---------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("n", [*range(1, 70), 100, 257, 1000, 4096, 10_007])
def test_permutation_is_a_bijection(n: int) -> None:
    for seed, epoch in [(0, 0), (1, 0), (0, 1), (-3, 10**12)]:
        order = Permutation(n, seed, epoch)(np.arange(n))
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(n))


def test_permutation_of_a_huge_range_is_injective() -> None:
    for n in [2**31 - 1, 2**40 + 3, 2**62]:
        some = np.concatenate([np.arange(20_000), n - 1 - np.arange(20_000)])
        order = Permutation(n, seed=5, epoch=2)(some)
        assert order.min() >= 0
        assert order.max() < n
        assert np.unique(order).size == some.size


def test_permutation_is_a_bijection_whatever_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    # Hashes just below 2**64, where a sum that is not reduced first would wrap.
    monkeypatch.setattr("accelbridge.data.order._mix", lambda x: ~(x & np.uint64(1)))
    order = Permutation(500, 0, 0)(np.arange(500))  # a grid of 23 x 22: neither divides 2**64
    assert np.array_equal(np.sort(order), np.arange(500))


def test_permutation_is_a_pure_function() -> None:
    whole = Permutation(1000, 7, 3)(np.arange(1000))
    assert np.array_equal(Permutation(1000, 7, 3)(np.arange(1000).reshape(10, 100)), whole.reshape(10, 100))
    assert int(Permutation(1000, 7, 3)(123)) == whole[123]
    # The order of a run must not change between releases, or checkpoints would resume with other samples.
    assert whole[:6].tolist() == [127, 495, 900, 621, 125, 412]


def permute_slowly(x: int, n: int, seed: int, epoch: int) -> int:
    """The definition of the order once more, in Python's unbounded integers."""
    rows = next(r for r in range(1, n + 1) if r * r >= n)
    columns = -(-n // rows)
    text = f"accelbridge order {seed} {epoch}".encode()
    keys = struct.unpack("<8Q", hashlib.blake2b(text, digest_size=64).digest())

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    while True:
        left, right = divmod(x, columns)
        for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
            left = (left + mix(right ^ key_left)) % rows
            right = (right + mix(left ^ key_right)) % columns
        x = left * columns + right
        if x < n:
            return x


@pytest.mark.parametrize(("n", "seed", "epoch"), [(1, 0, 0), (5, 1, 2), (1000, 7, 3), (10_007, -1, 40)])
def test_permutation_is_the_one_that_is_documented(n: int, seed: int, epoch: int) -> None:
    some = list(range(0, n, max(n // 50, 1)))
    assert Permutation(n, seed, epoch)(some).tolist() == [permute_slowly(x, n, seed, epoch) for x in some]


def test_permutation_mixes() -> None:
    n = 10_000
    order = Permutation(n, seed=0, epoch=0)(np.arange(n))
    assert (order == np.arange(n)).sum() < 10  # about 1 fixed point expected
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.04  # 4 standard deviations
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04
    # Each tenth of the epoch draws evenly from each tenth of the data (81 degrees of freedom).
    table = np.histogram2d(np.arange(n), order, bins=10)[0]
    assert ((table - n / 100) ** 2 / (n / 100)).sum() < 150


def test_seeds_and_epochs_are_independent() -> None:
    n = 10_000
    orders = [Permutation(n, seed, epoch)(np.arange(n)) for seed in range(3) for epoch in range(3)]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert (one == other).sum() < 10
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.045


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_small_permutations_are_uniform_over_epochs(n: int) -> None:
    epochs = 1500
    counts: NDArray[np.int64] = np.zeros((n, n), dtype=np.int64)
    for epoch in range(epochs):
        counts[np.arange(n), Permutation(n, seed=11, epoch=epoch)(np.arange(n))] += 1
    expected = epochs / n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_permutation_refuses_what_it_cannot() -> None:
    with pytest.raises(ValueError, match="n must be within"):
        Permutation(0, 0, 0)
    for outside in (-1, 10):
        with pytest.raises(IndexError, match=r"outside range\(10\)"):
            Permutation(10, 0, 0)([outside])
    assert Permutation(10, 0, 0)([]).shape == (0,)


# -------------------------------------------------------------------------------------------------- imports


def test_config_is_strict() -> None:
    assert DataConfig().document_mask
    with pytest.raises(ValueError, match="verify"):
        DataConfig.model_validate({"verify": "none"})


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("cli/data.py", "torch numpy pydantic tokenizers"),
        ("data/config.py", "torch numpy tokenizers"),
        ("data/build.py", "torch tokenizers"),
    ],
)
def test_what_an_import_brings(module: str, heavy: str) -> None:
    # Run as a file, so that what its package imports for other commands doesn't count.
    file = Path(accelbridge.__file__).parent / module
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(file.parents[2])!r}); runpy.run_path({str(file)!r}); "
        f"print([name for name in '{heavy}'.split() if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
