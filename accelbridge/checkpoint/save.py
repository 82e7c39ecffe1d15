"""Saving: stage on the host, write in the background, publish by one rename, keep the newest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.errors import CheckpointError


def _on_host(tensor: Tensor) -> Tensor:
    """A copy of this rank's part. torch's stager would copy the mesh of every DTensor as well, and warn about the
    groups of other ranks."""
    if isinstance(tensor, DTensor):
        return DTensor(_on_host(tensor.to_local()), tensor._spec, requires_grad=False)
    return tensor.detach().to("cpu", copy=True)


class Checkpointer:
    """Writes checkpoints of one run. Every method is called by all ranks, at the same step.

    ``group`` is used from the background thread only, so that its traffic never meets a step's; None: one process.
    A failed write is raised by the next call of :meth:`save` or :meth:`wait`, on every rank.
    """

    def __init__(
        self, root: Path, *, group: dist.ProcessGroup | None, rank: int, keep: int, asynchronous: bool
    ) -> None:
        self._root = root
        self._group = group
        self._rank = rank
        self._keep = keep
        self._asynchronous = asynchronous
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="accelbridge-checkpoint")
        self._pending: Future[None] | None = None
        self.last_step: int | None = None
        """Step of the newest checkpoint that was started."""

    def save(self, state: Mapping[str, Tensor], manifest: Manifest) -> None:
        """Save ``state``; returns once it is staged (asynchronous) or published."""
        self.wait()
        # In this thread: the only time that a step waits for a checkpoint.
        staged = {name: _on_host(tensor) for name, tensor in state.items()}
        self.last_step = manifest.step
        self._pending = self._thread.submit(self._write, staged, manifest)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Block until the pending checkpoint is published. Raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        # DCP's CheckpointException derives from BaseException; a failed save is an ordinary error here.
        error = pending.exception()
        if error is not None:
            raise CheckpointError(f"saving to {self._root} failed: {error}; earlier checkpoints are intact") from error

    def poll(self) -> None:
        """Raise the error of a pending checkpoint that has failed; never blocks."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Finish the pending checkpoint and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    # ---- in the background thread

    def _write(self, state: dict[str, Any], manifest: Manifest) -> None:
        path = manifests.partial(self._root, manifest.step)
        if self._rank == 0:
            if path.exists():
                shutil.rmtree(path)
            path.mkdir(parents=True)
        self._barrier()
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(path, overwrite=False),
            process_group=self._group,
            no_dist=self._group is None,
        )
        files = self._fingerprints(path)
        if self._rank == 0:
            manifests.write(path, replace(manifest, files=files))
            self._publish(path, manifests.folder(self._root, manifest.step))
            self._retire()
        self._barrier()

    def _fingerprints(self, path: Path) -> dict[str, dict[str, Any]]:
        """Checksums of all files; each rank reads its own. Complete on rank 0 only."""
        mine = list(path.glob(f"__{self._rank}_*"))
        if self._rank == 0:
            mine.append(path / ".metadata")
        found = {file.name: manifests.fingerprint(file) for file in mine}
        if self._group is None:
            return found
        size = dist.get_world_size(self._group)
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, found, group=self._group)
        return {name: entry for part in gathered for name, entry in part.items()}

    def _publish(self, path: Path, final: Path) -> None:
        manifests.sync_folder(path)
        os.rename(path, final)  # fails where ``final`` exists and is not empty: nothing is ever overwritten
        manifests.sync_folder(self._root)

    def _retire(self) -> None:
        """Delete all but the newest ``keep``; renamed first, so that a kill leaves no half-deleted step_N."""
        for old in manifests.complete(self._root)[: -self._keep]:
            doomed = old.with_name(f".{old.name}.deleted")
            os.rename(old, doomed)
            shutil.rmtree(doomed)

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(self._group)


def sweep(root: Path) -> None:
    """Remove what killed processes left: partial and half-deleted checkpoints. Only while no run writes here."""
    if root.is_dir():
        for left in (*root.glob(".step_*.partial"), *root.glob(".step_*.deleted")):
            shutil.rmtree(left)
