"""The file store: what is written is what is read, and whatever the disk does is a clean error, never wrong data."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from accelbridge.errors import ConfigError
from accelbridge.memory.store import (
    Bandwidth,
    DamagedRecord,
    FileStore,
    Record,
    StoreDeviceError,
    StoreError,
    StoreFull,
    StoreGone,
    StoreOptions,
    StoreReadOnly,
    bandwidth,
    measure,
)
from accelbridge.memory.store.buffers import ALIGNMENT, aligned
from accelbridge.memory.store.files import DIRECT, Files
from accelbridge.memory.store.layout import Layout
from accelbridge.memory.store.place import look_at

SMALL = StoreOptions(buffer_size=ALIGNMENT, buffer_count=2, queue_depth=3)
RECORDS = [
    Record("weight", (50, 77), torch.float32),
    Record("moment", (4096,), torch.float32),
    Record("half", (3, 5), torch.bfloat16),
    Record("step", (), torch.int64),
    Record("none", (0, 4), torch.float32),
    Record("bytes", (3 * ALIGNMENT + 1,), torch.float8_e4m3fn),
]


class Faulty(Files):
    """The operating system with one fault: ``errno`` or a short count, from the ``after``-th call of a kind on."""

    def __init__(self, call: str = "", number: int = 0, after: int = 0, short: int | None = None) -> None:
        self.call, self.number, self.left, self.short = call, number, after, short
        self.calls: list[str] = []
        self._lock = threading.Lock()

    def _faulty(self, call: str) -> bool:
        with self._lock:
            self.calls.append(call)
            if call != self.call:
                return False
            self.left -= 1
            return self.left < 0

    def _check(self, call: str) -> None:
        if self._faulty(call) and self.number:
            raise OSError(self.number, os.strerror(self.number))

    def open(self, path: Path, flags: int) -> int:
        self._check("open")
        return super().open(path, flags)

    def allocate(self, descriptor: int, size: int) -> None:
        self._check("allocate")
        super().allocate(descriptor, size)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._faulty("read"):
            if self.number:
                raise OSError(self.number, os.strerror(self.number))
            buffers = [buffers[0][: self.short]] if self.short is not None else buffers
        return super().read(descriptor, buffers, offset)

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._faulty("write"):
            if self.number:
                raise OSError(self.number, os.strerror(self.number))
            buffers = [buffers[0][: self.short]] if self.short is not None else buffers
        return super().write(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        self._check("sync")
        super().sync(descriptor)

    def fail(self, call: str, number: int = 0, after: int = 0, short: int | None = None) -> None:
        """From now on."""
        self.call, self.number, self.left, self.short = call, number, after, short


class NoDirect(Files):
    """A file system that takes no direct I/O."""

    def open(self, path: Path, flags: int) -> int:
        if flags & DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags)


def values(record: Record, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (record.size,), dtype=torch.uint8, generator=generator)
    return drawn.view(record.dtype).reshape(record.shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.fixture(params=["direct", "buffered"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    if request.param == "buffered":
        return NoDirect()
    if not look_at(tmp_path).direct:
        pytest.skip("no direct I/O in the folder for tests")
    return Files()


@pytest.fixture
def store(tmp_path: Path, files: Files) -> Iterator[FileStore]:
    with FileStore.create(tmp_path / "rank_0.store", RECORDS, SMALL, files) as made:
        yield made


# ---------------------------------------------------------------------------------------------- reading, writing


@pytest.mark.parametrize("alignment", ["aligned", "odd"])
def test_what_is_written_is_read(store: FileStore, alignment: str) -> None:
    """Both ways of memory, and again after the store was closed and opened."""

    def memory(record: Record) -> torch.Tensor:
        if alignment == "aligned":
            return store.empty(record.name)
        spare = torch.empty(record.size + 8, dtype=torch.uint8)
        return spare[8:].view(record.dtype).reshape(record.shape)

    written = {}
    for generation in range(2):
        for seed, record in enumerate(RECORDS):
            x = memory(record).copy_(values(record, 10 * generation + seed))
            written[record.name] = x
            store.write(record.name, x, generation)
        for record in RECORDS:
            found = store.read(record.name, memory(record), generation).wait()
            assert same(found, written[record.name]), record.name
    targets = {record.name: memory(record) for record in RECORDS}
    store.sync()
    store.close()
    with FileStore.open(store.path, SMALL, store._files) as again:
        for name, out in targets.items():
            assert again.generation(name) == 1
            assert same(again.read(name, out, 1).wait(), written[name]), name


def test_aligned_memory_takes_no_staging_buffer(tmp_path: Path) -> None:
    """The buffers are all taken away: only what needs none can still go on."""
    if not look_at(tmp_path).direct:
        pytest.skip("no direct I/O in the folder for tests")
    record = Record("a", (2 * ALIGNMENT,), torch.uint8)
    with FileStore.create(tmp_path / "store", [record], SMALL) as store:
        assert store._mover._staging is not None
        with store._mover._staging.one(), store._mover._staging.one():
            x = store.empty("a").random_()
            store.write("a", x, 0).wait()
            assert same(store.read("a", store.empty("a"), 0).wait(), x)
            odd = store.write("a", torch.zeros(record.size + 1, dtype=torch.uint8)[1:], 1)
            assert not odd.done()
        odd.wait()


def test_calls_for_one_record_follow_each_other(store: FileStore) -> None:
    """Neither write is waited for: the read sees the second."""
    record = RECORDS[0]
    first, second = values(record, 1), values(record, 2)
    store.write("weight", first, 1)
    store.write("weight", second, 2)
    assert same(store.read("weight", torch.empty(record.shape), 2).wait(), second)


def test_a_record_that_was_never_written_is_refused(store: FileStore) -> None:
    with pytest.raises(DamagedRecord, match='record "moment" asked; it was never written whole'):
        store.read("moment", store.empty("moment")).wait()
    assert store.generation("moment") is None


def test_another_generation_is_refused(store: FileStore) -> None:
    store.write("step", torch.tensor(3), 7).wait()
    with pytest.raises(DamagedRecord, match='"step" of generation 8 asked; it is of generation 7'):
        store.read("step", store.empty("step"), 8).wait()
    assert store.read("step", store.empty("step"), 7).wait() == 3


@pytest.mark.parametrize(
    ("name", "x", "said"),
    [
        ("step", torch.tensor(1.0), r"is torch.int64 \(\); found a tensor of torch.float32 \(\)"),
        ("moment", torch.zeros(3), r"found a tensor of torch.float32 \(3,\)"),
        ("other", torch.zeros(3), "was made without it"),
        ("weight", torch.zeros(77, 50).t(), "a contiguous host tensor asked"),
        ("weight", torch.zeros(50, 77, device="meta"), "found one on meta"),
    ],
)
def test_another_tensor_is_refused(store: FileStore, name: str, x: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        store.write(name, x, 0)


def test_a_closed_store_says_so(store: FileStore) -> None:
    store.close()
    store.close()
    with pytest.raises(ValueError, match="is closed"):
        store.read("step", torch.tensor(0))


def test_a_store_says_how_it_works(store: FileStore) -> None:
    said = store.describe()
    assert said["engine"] == "3 threads of preadv and pwritev"
    assert said["direct"] is True or "refuses direct I/O" in str(said["direct"])
    assert (said["direct"] is True) == (not said["warnings"])


# ---------------------------------------------------------------------------------------------- damage


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        found = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([found ^ 1]))


def test_one_bit_anywhere_is_seen(store: FileStore) -> None:
    record = RECORDS[0]
    x = values(record, 5)
    store.write("weight", x, 0).wait()
    store.sync()
    slot = store.layout.slots["weight"]
    store.close()
    used = [slot.offset + place for place in (0, 8, 12, 20, 24, 24 + 4 * slot.blocks - 1)]
    for offset in [*used, slot.payload, slot.payload + ALIGNMENT + 3, slot.payload + record.size - 1]:
        flip(store.path, offset)
        with FileStore.open(store.path, SMALL, store._files) as again, pytest.raises(DamagedRecord, match="weight"):
            again.read("weight", again.empty("weight"), 0).wait()
        flip(store.path, offset)
    with FileStore.open(store.path, SMALL, store._files) as again:
        assert same(again.read("weight", again.empty("weight"), 0).wait(), x)


def test_a_mixture_of_two_writes_is_refused(store: FileStore) -> None:
    """Each block in turn is that of the earlier write, as a kill could leave it."""
    slot = store.layout.slots["weight"]
    store.write("weight", values(RECORDS[0], 1), 1).wait()
    store.sync()
    earlier = store.path.read_bytes()
    store.write("weight", values(RECORDS[0], 2), 2).wait()
    store.sync()
    later = store.path.read_bytes()
    store.close()
    for block in range(slot.blocks):
        first, size = slot.span(block)
        begin = slot.payload + first
        torn = later[:begin] + earlier[begin : begin + size] + later[begin + size :]
        store.path.write_bytes(torn)
        with FileStore.open(store.path, SMALL, store._files) as again, pytest.raises(DamagedRecord, match="torn"):
            again.read("weight", again.empty("weight")).wait()


def test_a_header_of_another_store_or_record_is_refused(tmp_path: Path) -> None:
    records = [Record("a", (8,), torch.float32), Record("b", (8,), torch.float32)]
    one, two = Layout(records, ALIGNMENT), Layout(records, ALIGNMENT)
    header = one.slots["a"].header(3, [7])
    assert one.slots["a"].parse(header) == (3, [7])
    for other in (one.slots["b"], two.slots["a"]):
        with pytest.raises(DamagedRecord, match="header is damaged"):
            other.parse(header)


@pytest.mark.parametrize("damage", ["cut", "text", "other", "empty"])
def test_a_file_that_is_no_store(store: FileStore, damage: str) -> None:
    store.close()
    if damage == "text":
        flip(store.path, 40)
    else:
        content = {"cut": store.path.read_bytes()[:100], "other": b"x" * 9000, "empty": b""}[damage]
        store.path.write_bytes(content)
    with pytest.raises(DamagedRecord, match="make a new one"):
        FileStore.open(store.path, SMALL, store._files)


def test_a_store_in_use_is_left_alone(store: FileStore) -> None:
    for make in (lambda: FileStore.open(store.path, SMALL), lambda: FileStore.create(store.path, RECORDS[:1], SMALL)):
        with pytest.raises(StoreError, match="another process has it open"):
            make()
    assert [path.name for path in store.path.parent.iterdir()] == [store.path.name]
    store.write("step", torch.tensor(3), 0).wait()
    assert store.read("step", torch.tensor(0)).wait() == 3


# ---------------------------------------------------------------------------------------------- faults of the disk

FAULTS = [
    (errno.ENOSPC, StoreFull, "No space left"),
    (errno.EDQUOT, StoreFull, "quota"),
    (errno.EIO, StoreDeviceError, "Input/output error"),
    (errno.EROFS, StoreReadOnly, "Read-only"),
    (errno.ESTALE, StoreGone, "Stale file handle"),
    (errno.ENODEV, StoreGone, "No such device"),
    (errno.EINVAL, StoreError, "Invalid argument"),
]


@pytest.mark.parametrize(("number", "kind", "said"), FAULTS, ids=[errno.errorcode[n] for n, _, _ in FAULTS])
@pytest.mark.parametrize("after", [0, 2])
def test_a_failed_write_is_an_error_and_no_record(
    tmp_path: Path, number: int, kind: type[StoreError], said: str, after: int
) -> None:
    files = Faulty()
    with FileStore.create(tmp_path / "store", RECORDS, SMALL, files) as store:
        store.write("weight", values(RECORDS[0], 1), 1).wait()
        files.fail("write", number, after)
        with pytest.raises(kind, match=f"write of .* {tmp_path / 'store'} asked; .*{said}"):
            store.write("weight", values(RECORDS[0], 2), 2).wait()
        files.fail("")
        if after:  # the first write may have reached the disk
            with pytest.raises(DamagedRecord):
                store.read("weight", store.empty("weight")).wait()
        with pytest.raises(DamagedRecord):
            store.read("weight", store.empty("weight"), 2).wait()
        x = values(RECORDS[0], 3)  # the store itself goes on
        store.write("weight", x, 3).wait()
        assert same(store.read("weight", store.empty("weight"), 3).wait(), x)


@pytest.mark.parametrize(("number", "kind", "said"), FAULTS[2:], ids=[errno.errorcode[n] for n, _, _ in FAULTS[2:]])
def test_a_failed_read_is_an_error(tmp_path: Path, number: int, kind: type[StoreError], said: str) -> None:
    files = Faulty()
    with FileStore.create(tmp_path / "store", RECORDS, SMALL, files) as store:
        x = values(RECORDS[0], 1)
        store.write("weight", x, 1).wait()
        files.fail("read", number, after=1)
        with pytest.raises(kind, match=f"read of .* asked; .*{said}"):
            store.read("weight", store.empty("weight")).wait()
        files.fail("")
        assert same(store.read("weight", store.empty("weight")).wait(), x)


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_call_that_moves_less_is_repeated(tmp_path: Path, call: str) -> None:
    options = StoreOptions(buffer_size=4 * ALIGNMENT, buffer_count=2, queue_depth=2)
    record = Record("a", (9 * ALIGNMENT,), torch.uint8)
    files = Faulty()
    with FileStore.create(tmp_path / "store", [record], options, files) as store:
        files.fail(call, short=ALIGNMENT)
        x = store.empty("a").random_()
        store.write("a", x, 0).wait()
        assert same(store.read("a", store.empty("a")).wait(), x)
        assert files.calls.count(call) >= 9


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_call_that_moves_nothing_ends(tmp_path: Path, call: str) -> None:
    files = Faulty()
    with FileStore.create(tmp_path / "store", RECORDS, SMALL, files) as store:
        store.write("weight", values(RECORDS[0], 1), 1).wait()
        files.fail(call, short=0)
        handle = (store.read if call == "read" else lambda name, x: store.write(name, x, 2))(
            "weight", store.empty("weight")
        )
        with pytest.raises(StoreDeviceError, match=f"{call} of .* asked; it ended after 0 bytes"):
            handle.wait()


def test_a_file_that_was_cut_short(store: FileStore) -> None:
    store.write("weight", values(RECORDS[0], 1), 1).wait()
    os.truncate(store.path, store.layout.slots["weight"].payload + ALIGNMENT)
    with pytest.raises(StoreDeviceError, match="the file is shorter than it was made"):
        store.read("weight", store.empty("weight"), 1).wait()


def test_a_failed_flush_is_said(tmp_path: Path) -> None:
    files = Faulty()
    with FileStore.create(tmp_path / "store", RECORDS, SMALL, files) as store:
        files.fail("sync", errno.EIO)
        with pytest.raises(StoreDeviceError, match=r"flush of .* Input/output error"):
            store.sync()


@pytest.mark.parametrize("call", ["open", "allocate", "write", "sync"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_store_appears_whole_or_not_at_all(tmp_path: Path, call: str, after: int) -> None:
    path = tmp_path / "store"
    with FileStore.create(path, RECORDS, SMALL) as store:
        store.write("step", torch.tensor(11), 1).wait()
    files = Faulty(call, errno.ENOSPC, after)
    try:
        FileStore.create(path, RECORDS[3:], SMALL, files).close()
    except StoreFull:
        with FileStore.open(path, SMALL) as store:
            assert len(store.layout.slots) == len(RECORDS)
            assert store.read("step", torch.tensor(0), 1).wait() == 11
    else:
        assert files.left >= 0, "the fault came, and nobody noticed"
    assert [found.name for found in tmp_path.iterdir()] == ["store"]


# ---------------------------------------------------------------------------------------------- bad input


def test_too_little_space_is_found_before(tmp_path: Path) -> None:
    class Small(Files):
        def free(self, folder: Path) -> int:
            return 30_000

    needed = Layout(RECORDS, ALIGNMENT).size
    with pytest.raises(
        StoreFull, match=f"{needed:,} bytes in .* asked; 30,000 are free; free {needed - 30_000:,} more"
    ):
        FileStore.create(tmp_path / "store", RECORDS, SMALL, Small())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_began_makes_room(tmp_path: Path) -> None:
    left = tmp_path / "store.tmp"
    left.write_bytes(b"x" * 100_000)

    class Small(Files):
        def free(self, folder: Path) -> int:
            return 0 if left.exists() else 1 << 20

    FileStore.create(tmp_path / "store", RECORDS, SMALL, Small()).close()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, said in (("gone", "there is no such folder"), ("file", "it is no folder")):
        with pytest.raises(StoreGone, match=f"offload to {tmp_path / name} asked; {said}"):
            FileStore.create(tmp_path / name / "store", RECORDS, SMALL)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written(tmp_path: Path, number: int) -> None:
    with pytest.raises(StoreReadOnly, match=f"offload to {tmp_path} asked; .*give a path that can be written to"):
        look_at(tmp_path, Faulty("open", number))


def test_memory_given_as_a_disk_is_warned_of() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or Files().type_of(shm) != "tmpfs":
        pytest.skip("no tmpfs here")
    (warning,) = look_at(shm).warnings
    assert "/dev/shm asked for offload to NVMe; it is tmpfs, which is host memory" in warning


def test_a_page_cache_in_between_is_warned_of(tmp_path: Path) -> None:
    place = look_at(tmp_path, NoDirect())
    assert not place.direct
    if place.file_system != "tmpfs":
        assert "its file system refuses direct I/O" in place.warnings[0]


def test_buffers_larger_than_the_host_are_refused(tmp_path: Path) -> None:
    greedy = StoreOptions(buffer_count=4096, buffer_size=1 << 33)
    with pytest.raises(StoreError, match=r"buffer_count 4096 and buffer_size 8,589,934,592 asked, 35,184,372,088,832"):
        FileStore.create(tmp_path / "store", RECORDS, greedy)
    assert list(tmp_path.iterdir()) == []


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='record "a" asked twice'):
        FileStore.create(tmp_path / "store", [Record("a", (1,), torch.uint8)] * 2, SMALL)


def test_an_allocator_of_odd_addresses_is_refused(tmp_path: Path) -> None:
    if not look_at(tmp_path).direct:
        pytest.skip("no direct I/O in the folder for tests")
    with pytest.raises(ValueError, match="multiples of 4096"):
        FileStore.create(tmp_path / "store", RECORDS, SMALL, allocate=lambda size: aligned(size + 8)[8:])


# ---------------------------------------------------------------------------------------------- bandwidth


def test_a_measurement_leaves_nothing(tmp_path: Path) -> None:
    found = measure(tmp_path, seconds=0.1)
    assert found.read > 1e6
    assert found.write > 1e6
    assert list(tmp_path.iterdir()) == []


def test_a_rate_counts_all_that_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock that moves by 0.3 s for each wait: three turns begin within 0.5 s, and all three are waited for."""
    now = [5.0]
    began: list[int] = []

    class Moving:
        def wait(self) -> None:
            now[0] += 0.3

    def start(turn: int) -> Any:
        began.append(turn)
        return Moving()

    monkeypatch.setattr(bandwidth.time, "monotonic", lambda: now[0])
    assert bandwidth._rate(start, 90, 0.5) == pytest.approx(3 * 90 / 0.9)
    assert began == [0, 1, 2]


def test_what_a_step_needs_is_compared() -> None:
    found = Bandwidth(read=1.1e9, write=2e9, direct=True)
    assert found.shortfall(6.8e9) == "this disk reads 1.1 GB/s; the step needs 6.8 GB/s to hide it"
    assert found.shortfall(1e9) is None
    assert found.shortfall(2.5e9, "write") == "this disk writes 2.0 GB/s; the step needs 2.5 GB/s to hide it"
