"""What the disk does while a checkpoint is saved is said on every rank, and costs no earlier checkpoint."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from accelbridge import Trainer
from accelbridge.checkpoint import save, write
from accelbridge.checkpoint.manifest import complete
from accelbridge.errors import CheckpointError
from tests import cli
from tests.ranks import Rank, run_ranks


def recipe(folder: Path, store: Path, **sections: Any) -> dict[str, Any]:
    made = cli.recipe(folder, store, checkpoint={"interval": 2, "keep": 9}, **sections)
    made["train"]["steps"] = 6
    return made


@contextmanager
def disk_full(ctx: Rank) -> Iterator[None]:
    """After the first thousand bytes of its shard of step 4, rank 1's disk is full."""
    real = write._Hashing.write

    def full(self: Any, data: Any) -> int:
        if ctx.rank == 1 and "step_4" in self._stream.name and self.written > 1000 and self._error is None:
            self._error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write._Hashing, "write", full)
        yield


@contextmanager
def file_too_large(ctx: Rank) -> Iterator[None]:
    """The kernel lets rank 0 write no file of more than 20,000 bytes once step 3 has begun."""
    real = Trainer.train_step

    def limited(self: Trainer, microbatches: Any) -> Any:
        if ctx.rank == 0 and self.step == 2:
            self.checkpointer.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return real(self, microbatches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", limited)
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextmanager
def cannot_publish(ctx: Rank) -> Iterator[None]:
    """When step 4 is to get its name, rank 0 finds the folder read-only."""
    real = os.rename

    def refuse(source: Any, target: Any) -> None:
        if str(target).endswith("step_4"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(source))
        real(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save.os, "rename", refuse)
        yield


@contextmanager
def io_error(ctx: Rank) -> Iterator[None]:
    """Making rank 1's shard of step 4 durable fails."""
    real = os.fsync

    def broken(descriptor: int) -> None:
        if ctx.rank == 1 and "step_4" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        yield


FAULTS: dict[str, tuple[Any, list[str]]] = {
    "disk full": (disk_full, ["__1_0.distcp", "No space left on device", "this rank's part takes", "make room"]),
    "file too large": (file_too_large, ["__0_0.distcp", "File too large", "bytes are free"]),
    "read-only": (cannot_publish, ["step_4", "Read-only file system", "make the folder writable"]),
    "I/O error": (io_error, ["__1_0.distcp", "Input/output error", "look at the disk"]),
}


def failing(ctx: Rank, folder: Path, store: Path) -> dict[str, list[str]]:
    """One rank of all runs of FAULTS: what each ended with, and what its second start ended with."""
    ctx.launched()
    said = {}
    for name, (fault, _) in FAULTS.items():
        asked = recipe(folder / name, store, metrics={"interval": 1})
        os.environ["TORCHELASTIC_RUN_ID"] = name
        with fault(ctx), pytest.raises(CheckpointError) as error:
            Trainer(asked).fit()
        os.environ["TORCHELASTIC_RUN_ID"] = name + ", again"
        held = sorted(p.name for p in (folder / name / "checkpoints").iterdir())
        said[name] = [str(error.value), *held]
        Trainer(asked, resume="auto").fit()
    return said


def test_what_the_disk_does_while_saving_is_said_on_every_rank(tmp_path: Path, store: Path) -> None:
    first, second = run_ranks(failing, 2, tmp_path, store, timeout=200)
    assert first == second
    for name, (_, parts) in FAULTS.items():
        message, *held = first[name]
        assert [part for part in [*parts, "earlier checkpoints are intact"] if part not in message] == [], message
        assert held == ["step_2"], "what was half-written is gone, what was there before is not"
        assert [p.name for p in complete(tmp_path / name / "checkpoints")] == ["step_2", "step_4", "step_6"]


def test_a_file_where_the_folder_should_be(tmp_path: Path, store: Path) -> None:
    tmp_path.joinpath("checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"step_2\.partial cannot be written: (Not a directory|File exists)"):
        Trainer(recipe(tmp_path, store)).fit()
