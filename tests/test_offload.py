"""Copies between device, host and files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from accelbridge.errors import DataError
from accelbridge.portable.offload import PortableOffload

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip
SHAPES = [(), (1,), (7, 3), (0,), (3, 0, 2)]


@pytest.fixture
def offload() -> PortableOffload:
    return PortableOffload("cpu")


def make(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.complex64) * 10
    if dtype.is_complex:
        return x.to(dtype)
    return (x.real > 0).clone() if dtype == torch.bool else x.real.abs().to(dtype)


def bits(x: Tensor) -> bytes:
    return x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_and_files_return_the_same_bits(
    offload: PortableOffload, tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = make(dtype, shape)
    host = offload.to_host(x).wait()
    assert same(host, x)
    assert same(offload.to_device(host).wait(), x)
    offload.write(tmp_path / "x", x)
    out = torch.empty_like(x)
    assert offload.read(tmp_path / "x", out) is out
    assert same(out, x)
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[::2, 1:],
        lambda x: x[:1].expand(5, -1),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: x.to(torch.complex64).conj().imag,
        lambda x: torch.ops.aten._neg_view(x),
        lambda x: torch.nn.Parameter(x),
    ],
    ids=["transposed", "strided", "expanded", "conjugated", "negated", "negated whole", "parameter"],
)
def test_views_are_copied_by_value(offload: PortableOffload, tmp_path: Path, view) -> None:
    x = view(make(torch.float32, (6, 4)))
    offload.write(tmp_path / "x", x)
    out = torch.empty(x.shape, dtype=x.dtype)
    assert same(offload.read(tmp_path / "x", out), x)
    assert same(offload.to_host(x).wait(), x)
    # A destination that isn't contiguous.
    wide = torch.zeros(*x.shape, 2, dtype=x.dtype)
    assert same(offload.read(tmp_path / "x", wide[..., 0]), x)
    assert not wide[..., 1].any()


def test_copies_never_alias(offload: PortableOffload) -> None:
    x = torch.ones(3)
    for copy in (offload.to_host(x).wait(), offload.to_device(x).wait()):
        x.zero_()
        assert torch.equal(copy, torch.ones(3))
        x.fill_(1)
    assert not offload.pinned
    assert not copy.is_pinned()


def test_destinations_are_filled_and_checked(offload: PortableOffload) -> None:
    x = make(torch.float32, (2, 3))
    out = torch.nn.Parameter(torch.zeros(2, 3))
    assert offload.to_host(x, out).wait() is out
    assert same(out, x)
    for wrong in (torch.zeros(3), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, device="meta")):
        with pytest.raises(ValueError, match=r"must be float32 \(2, 3\) on cpu; found"):
            offload.to_host(x, wrong)
        with pytest.raises(ValueError, match=r"must be float32 \(2, 3\) on cpu; found"):
            offload.to_device(x, wrong)


# ------------------------------------------------------------------------------------------------------ files


@pytest.fixture
def stored(offload: PortableOffload, tmp_path: Path) -> Path:
    offload.write(tmp_path / "x.bin", torch.arange(12.0).view(3, 4))
    return tmp_path / "x.bin"


def expect_refusal(offload: PortableOffload, path: Path, words: str, out: Tensor | None = None) -> None:
    out = torch.full((3, 4), 7.0) if out is None else out
    before = out.clone()
    with pytest.raises(DataError, match=rf"x\.bin: .*{words}"):
        offload.read(path, out)
    assert same(out, before)


@pytest.mark.parametrize("change", ["flip", "short", "long", "header", "magic", "empty", "huge header", "deep header"])
def test_a_damaged_file_is_refused_and_changes_nothing(offload: PortableOffload, stored: Path, change: str) -> None:
    content = bytearray(stored.read_bytes())
    words = "header"
    if change == "flip":
        content[-5] ^= 1
        words = "checksum"
    elif change in ("short", "long"):
        content = content[:-1] if change == "short" else content + b"\0"
        words = f"48 bytes of elements, found {47 if change == 'short' else 49}"
    elif change == "header":
        content[14] ^= 0xFF
    elif change == "magic":
        content[0] ^= 1
    elif change == "empty":
        content = bytearray()
    elif change == "huge header":
        content[8:12] = b"\xff\xff\xff\xff"
    else:
        content = content[:8] + (60000).to_bytes(4, "little") + b"[" * 60000
    stored.write_bytes(content)
    expect_refusal(offload, stored, words)


def test_other_shapes_dtypes_and_missing_files_are_refused(offload: PortableOffload, stored: Path) -> None:
    expect_refusal(offload, stored, r"shape \[4, 3\], found \[3, 4\]", torch.zeros(4, 3))
    expect_refusal(offload, stored, "dtype int32, found float32", torch.zeros(3, 4, dtype=torch.int32))
    stored.unlink()
    expect_refusal(offload, stored, "no such file")


@pytest.mark.parametrize("key", ["version", "byteorder", "crc32"])
def test_every_word_of_the_header_counts(offload: PortableOffload, stored: Path, key: str) -> None:
    content = stored.read_bytes()
    length = int.from_bytes(content[8:12], "little")
    header = json.loads(content[12 : 12 + length])
    del header[key]
    text = json.dumps(header).encode()
    stored.write_bytes(content[:8] + len(text).to_bytes(4, "little") + text + content[12 + length :])
    expect_refusal(offload, stored, "checksum" if key == "crc32" else key)


def test_a_failed_write_leaves_what_was_there(
    offload: PortableOffload, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        offload.write(stored, torch.zeros(3, 4))
    monkeypatch.undo()
    assert os.listdir(stored.parent) == ["x.bin"]
    assert torch.equal(offload.read(stored, torch.zeros(3, 4)), torch.arange(12.0).view(3, 4))


def test_writing_replaces(offload: PortableOffload, stored: Path) -> None:
    offload.write(stored, torch.ones(2, dtype=torch.int8))
    assert torch.equal(offload.read(stored, torch.zeros(2, dtype=torch.int8)), torch.ones(2, dtype=torch.int8))


def test_reading_fills_a_parameter_outside_of_autograd(offload: PortableOffload, stored: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    offload.read(stored, parameter)
    assert parameter.is_leaf
    assert torch.equal(parameter, torch.arange(12.0).view(3, 4))


# ------------------------------------------------------------------------------------------------ accelerator


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="this machine has no accelerator")
def test_an_accelerator_copies_through_pinned_memory(tmp_path: Path) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    offload = PortableOffload(accelerator.type)
    x = torch.randn(1 << 20, device=accelerator)
    expected = x.cpu()
    transfer = offload.to_host(x)
    x.zero_()  # queued after the copy, so the copy doesn't see it
    host = transfer.wait()
    assert offload.pinned
    assert host.is_pinned()
    assert same(host, expected)
    assert same(offload.to_device(host).wait().cpu(), expected)
    offload.write(tmp_path / "x", x.copy_(host))
    assert same(offload.read(tmp_path / "x", torch.empty_like(x)).cpu(), expected)
    assert not PortableOffload(accelerator.type, pinned=False).to_host(x).wait().is_pinned()
