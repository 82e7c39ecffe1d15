"""CKP: checkpoints, as the trainer writes and reads them, and the functions of accelbridge.checkpoint on tensors of the
device."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from accelbridge import Trainer
from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.load import load, verify
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.metadata import read_metadata
from accelbridge.checkpoint.save import Checkpointer
from accelbridge.conformance.bench import Bench, NotSupported
from accelbridge.conformance.oracle import training as oracle
from accelbridge.conformance.registry import case
from accelbridge.conformance.suite.trainer_support import (
    BATCH,
    RATE,
    Given,
    Inner,
    Linear,
    Rows,
    Squares,
    equal_all,
    everyone,
    launched,
    layouts,
    mean_loss,
    on_host,
    recipe,
    rows_with_mean,
    state,
    step,
    trainer,
    weights,
)
from accelbridge.errors import AccelbridgeError, CheckpointError

_UNEVEN = {"table": (5, 3), "row": (1, 4), "vector": (3,), "matrix": (7, 2), "pair": (2, 1)}
"""No number of ranks divides all of them, some are smaller than it, and some shards are empty."""


def _folder(t: Bench, run: str, step: int) -> Path:
    return t.folder / run / "checkpoints" / f"step_{step}"


def _parameters(t: Bench) -> dict[str, Tensor]:
    return {name: t.normal(*shape, name=name) for name, shape in _UNEVEN.items()}


def _gradients(t: Bench) -> Rows:
    count = sum(p.numel() for p in _parameters(t).values())
    return Rows(x=rows_with_mean(t.normal(count, name="g1"), t.normal(count, name="g2")))


def _zeros() -> Given:
    return Given(**{name: torch.zeros(shape) for name, shape in _UNEVEN.items()})


def _check_file(t: Bench, path: Path, want: Mapping[str, Tensor], label: str) -> None:
    """The checkpoint holds tensors only, of their own shapes, and each element once: no padding."""
    entries = read_metadata(path, manifests.read(path)).state_dict_metadata
    others = [name for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)]
    t.same(others, [], f"entries that are no tensors, {label}", code="CONTENT")
    for name, tensor in want.items():
        entry = entries.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            t.fail("CONTENT", f"{label}: {name} is absent")
            continue
        t.same(tuple(entry.size), tuple(tensor.shape), f"stored shape of {name}, {label}", code="PADDING")
        elements = sum(chunk.sizes.numel() for chunk in entry.chunks)
        t.same(elements, tensor.numel(), f"stored elements of {name}, {label}", code="PADDING")


# ------------------------------------------------------------------------------------------------------- resuming


def _dropping(t: Bench) -> tuple[nn.Module, Rows]:
    """A network with torch's own dropout, which draws from the generator of the device."""
    model = nn.Sequential(Linear(t.normal(9, 6, name="1")), nn.Dropout(0.3), Linear(t.normal(3, 9, name="2") / 3))
    return model, Rows(x=t.normal(6 * BATCH, 6, name="x"), y=t.normal(6 * BATCH, 3, name="y"))


def _generators(t: Bench) -> str:
    """A digest of the generators of this rank."""
    digest = hashlib.sha256()
    for name, value in sorted(t.backend.device.rng_state().items()):
        digest.update(name.encode() + value.cpu().numpy().tobytes())
    return digest.hexdigest()


def _steps(t: Bench, run: Trainer, count: int) -> list[float]:
    return [mean_loss(t, run, step(t, run)) for _ in range(count)]


_HALF, _ALL = 3, 6
_RESUMABLE: dict[str, Any] = {
    "train": {"steps": _ALL},
    "data": {"shuffle": True},
    "optimizer": {"lr": 2.0**-5, "weight_decay": 0.1},
}


@case("CKP-001", "train", phases=2)
def fresh_process(t: Bench) -> None:
    """A run that new processes resume from a checkpoint goes on with the bits of the run that wrote it and never
    stopped: losses, parameters, moments, generators, place in the data.

    Step 3 of 6, AdamW with decay, shuffled data, dropout from the device's generator.
    """
    model, rows = _dropping(t)
    told = t.folder / "straight"
    if t.phase == 0:
        with trainer(t, "first", model, rows, loss=Squares(), **_RESUMABLE) as run:
            _steps(t, run, _HALF)
            t.run(run.save)
            losses = _steps(t, run, _ALL - _HALF)
            told.write_bytes(pickle.dumps((losses, on_host(state(t, run)), _generators(t), run.position)))
        return
    losses, want, generators, position = pickle.loads(told.read_bytes())
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    path = _folder(t, "first", _HALF)
    with trainer(t, "second", model, rows, loss=Squares(), resume=path, **_RESUMABLE) as run:
        t.same(run.step, _HALF, "step", code="STEPS")
        t.same(_steps(t, run, _ALL - _HALF), losses, "losses", code="LOSS")
        equal_all(t, state(t, run), want)
        t.same(_generators(t), generators, "generators", code="RNG")
        t.same(run.position, position, "place in the data", code="STEPS")


@case("CKP-002", "train", worlds=(2, 4), group=False)
def own_generators(t: Bench) -> None:
    """Every rank gets its own generators back: with dropout, whose masks differ from rank to rank, a resumed run has
    the bits of the one that went on."""
    model, rows = _dropping(t)
    with trainer(t, "first", model, rows, loss=Squares(), **_RESUMABLE) as run:
        _steps(t, run, _HALF)
        t.run(run.save)
        saved = _generators(t)
        losses = _steps(t, run, _ALL - _HALF)
        want = on_host(state(t, run))
    of_ranks = everyone(t, "saved", saved)
    t.same(len(set(of_ranks)), t.world.size, "different generators", code="SAME")
    t.backend.device.seed(12345)
    model, _ = _dropping(t)
    with trainer(t, "second", model, rows, loss=Squares(), resume=_folder(t, "first", _HALF), **_RESUMABLE) as run:
        t.same(everyone(t, "loaded", _generators(t)), of_ranks, "generators of all ranks", code="RNG")
        t.same(_steps(t, run, _ALL - _HALF), losses, "losses", code="LOSS")
        equal_all(t, state(t, run), want)


@case("CKP-003", "train", worlds=(2, 4), group=False)
def uneven_shards(t: Bench) -> None:
    """Parameters whose shards are unequal, or empty, and their moments come back exactly, and the file holds their
    elements once each and nothing else."""
    for name, parallel in layouts(t, stages=(1, 3)).items():
        sections: dict[str, Any] = {"parallel": parallel, "optimizer": {"weight_decay": 0.1}}
        with trainer(t, name, Given(**_parameters(t)), _gradients(t), loss=Inner(), **sections) as run:
            step(t, run)
            t.run(run.save)
            want = on_host(state(t, run))
        path = _folder(t, name, 1)
        _check_file(t, path, want, name)
        with trainer(t, f"{name}, again", _zeros(), _gradients(t), loss=Inner(), resume=path, **sections) as run:
            equal_all(t, state(t, run), want, name)


def _between_layouts(t: Bench) -> None:
    """What all devices wrote in one layout they read in the next, and the last one's in the first: whole parameters and
    moments have equal bits. Shards are unequal, some are empty."""
    kinds = list(layouts(t, stages=(1, 3)).items())
    for (before, first), (after, second) in zip(kinds, [*kinds[1:], kinds[0]], strict=True):
        label = f"{before} to {after}"
        with trainer(t, before, Given(**_parameters(t)), _gradients(t), loss=Inner(), parallel=first) as run:
            step(t, run)
            t.run(run.save)
            want = on_host(state(t, run))
        path = _folder(t, before, 1)
        _check_file(t, path, want, label)
        with trainer(t, label, _zeros(), _gradients(t), loss=Inner(), resume=path, parallel=second) as run:
            equal_all(t, state(t, run), want, label)


@case("CKP-004", "train", worlds=(4,), group=False, spmd=_between_layouts)
def resharded(t: Bench) -> None:
    """What 2 ranks wrote 4 read, what 4 wrote 2 read, and 1: whole parameters and moments have equal bits.

    Real worlds of each size, made of the first ranks of four. Shards are unequal, some are empty.
    """
    for before, after in ((2, 4), (4, 2), (4, 1)):
        label = f"{before} to {after}"
        told, path = t.folder / label, _folder(t, f"{label}, first", 1)
        if t.world.rank < before:
            parameters = Given(**_parameters(t))
            with trainer(t, f"{label}, first", parameters, _gradients(t), loss=Inner(), size=before) as run:
                step(t, run)
                t.run(run.save)
                want = on_host(state(t, run))
            if t.world.rank == 0:
                told.write_bytes(pickle.dumps(want))
        everyone(t, f"{label}, written", 0)
        if t.world.rank < after:
            want = pickle.loads(told.read_bytes())
            _check_file(t, path, want, label)
            second = f"{label}, second"
            with trainer(t, second, _zeros(), _gradients(t), loss=Inner(), resume=path, size=after) as run:
                equal_all(t, state(t, run), want, label)
        everyone(t, f"{label}, read", 0)


@case("CKP-010", "train", worlds=(2,), group=False)
def asynchronous_save(t: Bench) -> None:
    """A checkpoint that is written in the background holds the step at which it was asked for, whatever happens to
    parameters and moments after the call has returned."""
    start = _parameters(t) | {"large": t.normal(2**18, name="large")}
    count = sum(p.numel() for p in start.values())
    rows = Rows(x=rows_with_mean(t.normal(count, name="g")))
    sections: dict[str, Any] = {"checkpoint": {"asynchronous": True}}
    with trainer(t, "first", Given(**start), rows, loss=Inner(), **sections) as run:
        step(t, run)
        want = on_host(state(t, run))
        t.run(run.save)
        with torch.no_grad():
            moments = [value for of_one in run.optimizer.state.values() for value in of_one.values()]
            for tensor in [*run.model.parameters(), *moments]:
                tensor.add_(1)
        t.run(run.checkpointer.wait)
    zeros = Given(**{name: torch.zeros_like(p) for name, p in start.items()})
    with trainer(t, "second", zeros, rows, loss=Inner(), resume=_folder(t, "first", 1)) as run:
        equal_all(t, state(t, run), want)


@case("CKP-011", "train", worlds=(2,), group=False)
def other_backend(t: Bench) -> None:
    """A checkpoint that this backend wrote holds tensors and nothing else, and the reference backend reads it with
    equal values."""
    if t.backend.collectives.before_device:
        raise NotSupported("its group lasts as long as the process, in which no other backend can follow")
    with trainer(t, "first", Given(**_parameters(t)), _gradients(t), loss=Inner()) as run:
        step(t, run)
        t.run(run.save)
        want = on_host(state(t, run))
    path = _folder(t, "first", 1)
    _check_file(t, path, want, "file")
    reference = {"name": "cpu", "options": {}}
    with trainer(t, "second", _zeros(), _gradients(t), loss=Inner(), resume=path, backend=reference) as run:
        equal_all(t, {name: t.put(tensor) for name, tensor in state(t, run).items()}, want)


# -------------------------------------------------------------------------------------------------- faults, damage


def _names(root: Path) -> list[str]:
    return [path.name for path in manifests.complete(root)]


def _die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _left_by_a_kill(t: Bench) -> None:
    """What lies on the disk while the process makes a checkpoint durable, which is what it leaves if it is killed then,
    is no checkpoint and is refused, and the one before still loads exactly. There is no other rank to be told.

    The folder is copied as it is in fsync of the shard.
    """
    root, moment = t.folder / "first" / "checkpoints", t.folder / "killed"
    with trainer(t, "first", Given(**_parameters(t)), _gradients(t), loss=Inner()) as run:
        step(t, run)
        t.run(run.save)
        want = on_host(state(t, run))
        step(t, run)
        with mock.patch.object(os, "fsync", side_effect=lambda _: moment.exists() or shutil.copytree(root, moment)):
            t.run(run.save)
    t.same(_names(moment), ["step_1"], "complete checkpoints", code="STATE")
    partial = [path for path in moment.iterdir() if path.name != "step_1"]
    t.at_least(len(partial), 1, "folders that were being written", code="STATE")
    _refused(t, partial)
    with trainer(t, "second", _zeros(), _gradients(t), loss=Inner(), resume=moment / "step_1") as run:
        equal_all(t, state(t, run), want)


def _refused(t: Bench, folders: list[Path]) -> None:
    """No run starts from ``folders``."""
    for left in folders:
        with launched(t, left.name, 1):
            asked = recipe(t, "refused", {})
            t.raises(CheckpointError, Trainer, asked, model=_zeros(), data=_gradients(t), loss=Inner(), resume=left)


@case("CKP-005", "train", worlds=(2,), group=False, fresh=True, exits=True, spmd=_left_by_a_kill)
def killed_while_saving(t: Bench) -> None:
    """A rank that is killed while it makes its part of a checkpoint durable: the others get an error, what was written
    of it is no checkpoint and is refused, and the one before still loads exactly.

    The last rank dies in fsync of its shard.
    """
    root, want = t.folder / "first" / "checkpoints", {}
    with suppress(AccelbridgeError), trainer(t, "first", Given(**_parameters(t)), _gradients(t), loss=Inner()) as run:
        step(t, run)
        t.run(run.save)
        want = on_host(state(t, run))
        step(t, run)
        if t.world.rank == t.world.size - 1:
            os.fsync = _die
        error = t.raises(CheckpointError, run.save)
        if error is not None:
            raise error  # as it would end a run
    t.same(_names(root), ["step_1"], "complete checkpoints", code="STATE")
    _refused(t, [path for path in root.iterdir() if path.name != "step_1"])
    with trainer(t, "second", _zeros(), _gradients(t), loss=Inner(), resume=root / "step_1", size=1) as run:
        equal_all(t, state(t, run), want)


@contextmanager
def _failing(name: str, error: int) -> Iterator[None]:
    """Calls of ``os.<name>`` fail, as the system would say it."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error))

    with mock.patch.object(os, name, fail):
        yield


@case("CKP-012", "train", worlds=(2,), group=False)
def unwritable_target(t: Bench) -> None:
    """A disk that is full on one rank, or a folder that cannot be renamed: every rank raises the same CheckpointError,
    nothing is left behind, earlier checkpoints stay, and training and saving go on exactly."""
    steps = 4
    weight, x = t.integers(3, 6, low=-1, high=1, name="w"), t.integers(BATCH * steps, 6, low=-1, high=1, name="x")
    y = t.integers(BATCH * steps, 3, low=-1, high=1, name="y")
    exact = oracle.linear_descent(weight, x, y, RATE, oracle.in_order(len(x), BATCH, steps))
    root = t.folder / "run" / "checkpoints"
    with trainer(t, "run", Linear(weight), Rows(x=x, y=y), loss=Squares(), sgd=RATE) as run:
        step(t, run)
        t.run(run.save)
        faults = (("fsync", errno.ENOSPC, t.world.size - 1), ("rename", errno.EROFS, 0))
        for name, number, rank in faults:
            step(t, run)
            with _failing(name, number) if t.world.rank == rank else nullcontext():
                error = t.raises(CheckpointError, run.save, says=os.strerror(number))
            said = everyone(t, name, str(error))
            t.same(said, [said[0]] * t.world.size, f"errors of all ranks, {name}", code="RANKS")
            left = sorted(path.name for path in root.iterdir())
            t.same(left, ["step_1"], f"what is left, {name}", code="STATE")
            everyone(t, f"{name}, seen", 0)  # before the next save writes there
        step(t, run)
        t.equal(weights(t, run)["weight"], exact.weights[-1].float())
        t.run(run.save)
    t.same(_names(root), ["step_1", "step_4"], "complete checkpoints", code="STATE")


def _saved(t: Bench, root: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint of ``tensors`` as the device holds them."""
    saver = Checkpointer(root, group=None, rank=0, asynchronous=False)
    t.run(saver.save, {name: t.put(tensor) for name, tensor in tensors.items()}, Manifest(step=1, world_size=1))
    saver.close()
    return root / "step_1"


def _verify(path: Path) -> None:
    verify(path, manifests.read(path), None)


def _read(t: Bench, path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What ``path`` holds, in tensors of the device."""
    found = {name: torch.zeros_like(t.put(tensor)) for name, tensor in like.items()}
    t.run(_verify, path)
    t.run(load, path, found, None)
    return found


@case("CKP-006", "train")
def stale_manifest(t: Bench) -> None:
    """A manifest above contents that were exchanged later, of the same names and sizes, is refused; untouched, the same
    checkpoint loads."""
    first, second = ({"a": t.normal(64, 33, name=name)} for name in ("first", "second"))
    path, other = _saved(t, t.folder / "first", first), _saved(t, t.folder / "second", second)
    equal_all(t, _read(t, path, first), first)
    shards = [file for file in other.iterdir() if file.suffix == ".distcp"]
    sizes = [(path / file.name).stat().st_size for file in shards]
    t.same([file.stat().st_size for file in shards], sizes, "sizes of shards", code="SETUP")
    for file in shards:
        shutil.copyfile(file, path / file.name)
    t.raises(CheckpointError, _verify, path)


@case("CKP-007", "train")
def another_models_checkpoint(t: Bench) -> None:
    """A tensor that the checkpoint lacks, one that the model lacks, another shape and another dtype each raise
    CheckpointError, and no tensor has changed then."""
    stored = {
        "a": t.normal(3, 4, name="a"),
        "b": t.normal(5, name="b", dtype=torch.bfloat16),
        "c": t.normal(2, name="c"),
    }
    path = _saved(t, t.folder / "run", stored)
    equal_all(t, _read(t, path, stored), stored)
    before = {
        name: torch.arange(tensor.numel()).reshape(tensor.shape).to(tensor.dtype) for name, tensor in stored.items()
    }
    wrong = {
        "missing": before | {"d": torch.arange(4.0)},
        "extra": {name: before[name] for name in ("a", "b")},
        "shape": before | {"a": torch.arange(12.0).reshape(4, 3)},
        "dtype": before | {"b": torch.arange(5.0)},
    }
    for fault, tensors in wrong.items():
        into = {name: t.put(tensor) for name, tensor in tensors.items()}
        t.raises(CheckpointError, load, path, dict(into), None, says=str(path))
        equal_all(t, into, tensors, fault, code="HALF")


@case("CKP-008", "train")
def flipped_bit(t: Bench) -> None:
    """One flipped bit at the beginning, in the middle or at the end of any file of a checkpoint is found when it is
    verified, and the trainer does not resume from it."""
    with trainer(t, "first", Given(**_parameters(t)), _gradients(t), loss=Inner()) as run:
        step(t, run)
        t.run(run.save)
        want = on_host(state(t, run))
    path = _folder(t, "first", 1)
    with trainer(t, "second", _zeros(), _gradients(t), loss=Inner(), resume=path) as run:
        equal_all(t, state(t, run), want)
    for file in sorted(manifests.read(path).files):
        content = (path / file).read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            (path / file).write_bytes(flipped)
            t.raises(CheckpointError, _verify, path, says=file)
        if file.endswith(".distcp"):
            t.raises(CheckpointError, _resume, t, f"third, {file}", path, says=file)
        (path / file).write_bytes(content)


def _resume(t: Bench, name: str, path: Path) -> None:
    with trainer(t, name, _zeros(), _gradients(t), loss=Inner(), resume=path):
        pass


@case("CKP-009", "train")
def dtypes_and_values(t: Bench) -> None:
    """Values come back with their dtype and every bit (any NaN for any NaN): all bfloat16 and float16 codes, float32
    with NaN, infinities, zeros of both signs, subnormals and 24-bit mantissas, integers, booleans, all codes of fp8.

    What a device cannot hold it cannot lose: fp8 only where the backend states any fp8 capability.
    """
    codes = torch.arange(2**16, dtype=torch.int32).sub(2**15).to(torch.int16)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 2.0**-140, 1 + 2.0**-23, 3.4e38])
    stored = {
        "bfloat16": codes.view(torch.bfloat16),
        "float16": codes.view(torch.float16),
        "float32": torch.cat([special, t.wide(200, name="f32")]),
        "int32": t.integers(9, low=-(2**31), high=2**31 - 1, name="i32", dtype=torch.int32),
        "bool": t.integers(9, low=0, high=1, name="bool", dtype=torch.bool),
        "uint8": torch.arange(256).to(torch.uint8),
    }
    for name in ("float8_e4m3fn", "float8_e5m2"):
        if any(dtype == name and support for (_, dtype, _), support in t.capabilities.table.items()):
            stored[name] = torch.arange(256).to(torch.uint8).view(getattr(torch, name))
    equal_all(t, _read(t, _saved(t, t.folder / "run", stored), stored), stored)
