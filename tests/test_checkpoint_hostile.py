"""A checkpoint made by a stranger is data: none runs code, leaves its folder, or hangs whoever reads it.

Every hostile pickle here would create a file; each test asserts that it is refused with an error that says so, and that
the file is not there.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.load import load, verify
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.save import Checkpointer
from accelbridge.errors import CheckpointError


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one tensor."""
    root = tmp_path_factory.mktemp("honest")
    saver = Checkpointer(root, group=None, rank=0)
    saver.save({"a": torch.arange(10.0)}, Manifest(step=1, world_size=1))
    saver.close()
    return root / "step_1"


@pytest.fixture
def stranger(honest: Path, tmp_path: Path) -> Path:
    """A copy of it, to be made hostile."""
    return Path(shutil.copytree(honest, tmp_path / "step_1"))


def seal(path: Path) -> None:
    """Give every file its true checksum, as an attacker would."""
    files = {name: manifests.fingerprint(path / name) for name in manifests.read(path).files}
    manifests.write(path, replace(manifests.read(path), files=files))
    verify(path, manifests.read(path), None)


def read(path: Path) -> Tensor:
    state = {"a": torch.zeros(10)}
    load(path, state, None)
    return state["a"]


class Reduced:
    """Unpickles by calling ``call(*arguments)``."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.how = (call, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.how


def payloads(proof: Path) -> dict[str, Any]:
    touch = f"open({str(proof)!r}, 'w')"
    evil = Reduced(os.system, f"touch {proof}")
    return {
        "os.system": evil,
        "eval": Reduced(eval, touch),
        "exec": Reduced(exec, touch),
        "nested": Metadata({}, planner_data=[{"deep": (evil,)}]),
        "as a key": Metadata({}, storage_data={Reduced(os.mkdir, str(proof)): 1}),
        "torch.storage": Reduced(torch.storage._load_from_bytes, pickle.dumps(evil)),
        "torch.load": Reduced(torch.load, str(proof)),
        "torch._utils": Reduced(_rebuild_tensor_v2, evil, 0, (1,), (1,), False, {}),
        "pickle.loads": Reduced(pickle.loads, pickle.dumps(evil)),
        "getattr": Reduced(getattr, os, "system"),
        "partial": Reduced(functools.partial, os.system, f"touch {proof}"),
        "methodcaller": Reduced(operator.methodcaller, "write_text", "x"),
    }


@pytest.mark.parametrize("name", payloads(Path("x")))
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_metadata_that_is_a_program(stranger: Path, tmp_path: Path, name: str, protocol: int) -> None:
    proof = tmp_path / "it ran"
    payload = payloads(proof)[name]
    try:
        hostile = pickle.dumps(payload, protocol=protocol)
    except (TypeError, pickle.PicklingError):
        pytest.skip("this protocol cannot say it")
    (stranger / ".metadata").write_bytes(hostile)
    seal(stranger)
    with pytest.raises(CheckpointError, match=r"which no checkpoint needs; it may be hostile|damaged"):
        read(stranger)
    assert not proof.exists()


def dotted(module: str, name: str) -> bytes:
    """A pickle that looks ``name``, with dots, up in ``module`` and calls it (protocol 4, STACK_GLOBAL)."""
    texts = b"".join(b"\x8c" + struct.pack("B", len(text)) + text.encode() for text in (module, name))
    return b"\x80\x04" + texts + b"\x93)R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "hub.load"),
        ("torch", "os.getcwd"),
        ("pathlib", "os.getcwd"),
        ("collections", "_sys.exit"),
        ("torch.distributed.checkpoint.metadata", "os.getcwd"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo.__init__.__globals__"),
    ],
)
def test_a_way_around_the_list_of_classes(stranger: Path, module: str, name: str) -> None:
    (stranger / ".metadata").write_bytes(dotted(module, name))
    seal(stranger)
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        read(stranger)


def test_a_pickle_cannot_change_a_class_of_this_process(stranger: Path) -> None:
    """BUILD with a pair sets attributes, also of a class."""
    hostile = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n"
        b"(N}X\x07\x00\x00\x00plantedX\x01\x00\x00\x00xstb."
    )
    pickle.loads(hostile)
    assert TensorStorageMetadata.planted == "x", "an ordinary unpickler does it"  # type: ignore[attr-defined]
    del TensorStorageMetadata.planted  # type: ignore[attr-defined]
    (stranger / ".metadata").write_bytes(hostile)
    seal(stranger)
    with pytest.raises(CheckpointError, match="not metadata"):
        read(stranger)
    assert not hasattr(TensorStorageMetadata, "planted")


def test_a_reference_out_of_the_pickle(stranger: Path) -> None:
    (stranger / ".metadata").write_bytes(b"Panything\n.")
    seal(stranger)
    with pytest.raises(CheckpointError, match="something outside of it"):
        read(stranger)


@pytest.mark.parametrize("content", [b"", b"\x80\x05", b"not a pickle", b"\x80\x04N.", b"\x80\x04]\x94h\xff."])
def test_metadata_that_is_rubbish(stranger: Path, content: bytes) -> None:
    (stranger / ".metadata").write_bytes(content)
    seal(stranger)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read(stranger)


# ------------------------------------------------------------------- metadata of known classes that say the wrong thing


def altered(path: Path, change: Callable[[Metadata], None]) -> None:
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(path)


def place(**changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        (entry,) = metadata.storage_data.values()
        for name, value in changes.items():
            setattr(entry, name, value)

    return change


def size_of(value: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a"].size = value  # type: ignore[union-attr]

    return change


def chunk(offset: int, size: int) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        (part,) = metadata.state_dict_metadata["a"].chunks  # type: ignore[union-attr]
        part.offsets, part.sizes = torch.Size([offset]), torch.Size([size])

    return change


def foreign_key(metadata: Metadata) -> None:
    metadata.storage_data = {("a",): next(iter(metadata.storage_data.values()))}


def no_places(metadata: Metadata) -> None:
    metadata.storage_data = None


def named_by_number(metadata: Metadata) -> None:
    metadata.storage_data = {MetadataIndex(7): next(iter(metadata.storage_data.values()))}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (place(relative_path="../secret"), "the manifest does not list"),
        (place(relative_path="/etc/hostname"), "the manifest does not list"),
        (place(relative_path=".metadata"), "the manifest does not list"),
        (place(relative_path=["__0_0.distcp"]), "the manifest does not list"),
        (place(offset=-1), "a place in a file is none"),
        (place(offset=2**70), "a place in a file is none"),
        (place(length=2**60), "beyond the end"),
        (place(length=True), "a place in a file is none"),
        (place(transform_descriptors=["zstd"]), "transformation"),
        (size_of(torch.Size([2**62])), "another model"),
        (size_of((2**70,)), "a shape is none"),
        (size_of("10"), "a shape is none"),
        (chunk(5, 10), "lies outside"),
        (foreign_key, "belongs to a tuple"),
        (named_by_number, "a name is a int"),
        (no_places, "where a dict belongs"),
    ],
)
def test_metadata_that_points_elsewhere(stranger: Path, change: Callable[[Metadata], None], expected: str) -> None:
    (stranger.parent / "secret").write_text("not for everybody")
    altered(stranger, change)
    with pytest.raises(CheckpointError, match=expected):
        read(stranger)


@pytest.mark.parametrize("archive", [True, False])
def test_an_entry_that_is_a_program(stranger: Path, tmp_path: Path, archive: bool) -> None:
    proof = tmp_path / "it ran"
    shard = stranger / "__0_0.distcp"
    torch.save(Reduced(os.system, f"touch {proof}"), shard, _use_new_zipfile_serialization=archive)
    altered(stranger, place(offset=0, length=shard.stat().st_size))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(stranger)
    assert not proof.exists()


def test_an_entry_that_is_no_tensor(stranger: Path, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(
        {"a": Reduced(os.system, f"touch {tmp_path / 'it ran'}")}, checkpoint_id=tmp_path / "foreign", no_dist=True
    )
    for file in (tmp_path / "foreign").iterdir():
        shutil.copy(file, stranger / file.name)
    seal(stranger)
    with pytest.raises(CheckpointError, match="a is absent"):
        read(stranger)
    assert not (tmp_path / "it ran").exists()


# --------------------------------------------------------------------------------------------------- the manifest


GOOD = {"bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "files",
    [
        *(
            {name: GOOD}
            for name in ("../../x", "/etc/passwd", "a/b", "a\\b", ".", "..", "", "manifest.json", "x\0y", "é")
        ),
        *({"x": GOOD | {"bytes": size}} for size in (-1, 2**63, 10**30, 1.5, True, "1", None)),
        *({"x": GOOD | {"sha256": digest}} for digest in ("", "g" * 64, "0" * 63, 5, ["0"])),
        {"x": {}},
        {"x": GOOD | {"more": 1}},
    ],
)
def test_a_manifest_that_lists_what_cannot_be(stranger: Path, files: dict[str, Any]) -> None:
    file = stranger / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"files": files}))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: files"):
        manifests.read(stranger)


@pytest.mark.parametrize(
    "entries",
    [
        {"step": -1},
        {"step": 2**63},
        {"step": 10**400},
        {"step": 1.5},
        {"world_size": 0},
        {"metrics": {"loss": float("nan")}},
        {"metrics": {"loss": "0"}},
        {"release": 7},
    ],
)
def test_a_manifest_with_numbers_that_cannot_be(stranger: Path, entries: dict[str, Any]) -> None:
    file = stranger / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        manifests.read(stranger)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b'"x"', b"{" * 100_000, b"[" * 100_000, b"\xff\xfe", b"1" * 9999]
)
def test_a_manifest_that_is_rubbish(stranger: Path, content: bytes) -> None:
    (stranger / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        manifests.read(stranger)


def test_a_manifest_without_end(stranger: Path) -> None:
    with open(stranger / "manifest.json", "r+b") as file:
        file.truncate(2**40)  # a hole: it takes no room
    with pytest.raises(CheckpointError, match=r"has 1099511627776 bytes"):
        manifests.read(stranger)


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
def test_links_lead_nowhere(stranger: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    shutil.move(stranger / name, outside)
    (stranger / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name}.* is a symbolic link"):
        verify(stranger, manifests.read(stranger), None)


def test_a_pipe_hangs_nobody(stranger: Path) -> None:
    (stranger / "__0_0.distcp").unlink()
    os.mkfifo(stranger / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        verify(stranger, manifests.read(stranger), None)


def test_files_that_are_not_listed_are_not_read(stranger: Path) -> None:
    """Neither do they make a checkpoint damaged: a user may leave notes in it."""
    (stranger / "__1_0.distcp").write_bytes(b"anything")
    verify(stranger, manifests.read(stranger), None)
    assert read(stranger).tolist() == list(range(10))
