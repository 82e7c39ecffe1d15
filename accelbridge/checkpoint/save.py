"""Saving: stage on the host, write in the background, publish by one rename, keep what the rules hold."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.retention import Retention
from accelbridge.checkpoint.stage import Stage
from accelbridge.checkpoint.together import describe, together
from accelbridge.checkpoint.write import cannot_write, write_shards
from accelbridge.errors import CheckpointError

_log = logging.getLogger(__name__)


class Checkpointer:
    """Writes checkpoints of one run. Every method is called by all ranks, at the same step.

    ``group`` is used from the background thread only, so that its traffic never meets a step's; None: one process.
    A write that fails on any rank fails on all: the folder is removed, and :meth:`save` or :meth:`wait` raises the same
    CheckpointError everywhere. ``pinned``: stage what lies on an accelerator in page-locked memory.

    Host memory: one copy of this rank's part of the state, from the first save on.
    """

    def __init__(
        self,
        root: Path,
        *,
        group: dist.ProcessGroup | None,
        rank: int,
        retention: Retention | None = None,
        asynchronous: bool = True,
        pinned: bool = False,
    ) -> None:
        self._root = root
        self._group = group
        self._rank = rank
        self._retention = retention or Retention()
        self._asynchronous = asynchronous
        self._stage = Stage(pinned)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="accelbridge-checkpoint")
        self._pending: Future[None] | None = None
        self.last_step: int | None = None
        """Step of the newest checkpoint that was started."""

    def save(self, state: Mapping[str, Tensor], manifest: Manifest) -> None:
        """Save ``state``; returns once it is staged (asynchronous) or published."""
        self.wait()  # its buffers are in use until then
        # In this thread: the only time that a step waits for a checkpoint.
        staged = self._stage.copy(state)
        self.last_step = manifest.step
        self._pending = self._thread.submit(self._write, staged, manifest)
        if not self._asynchronous:
            self.wait()

    def wait(self, seconds: float | None = None) -> None:
        """Block until the pending checkpoint is published. Raises CheckpointError if it failed, and TimeoutError after
        ``seconds``."""
        pending = self._pending
        if pending is None:
            return
        error = pending.exception(seconds)
        self._pending = None
        if error is None:
            return
        if not isinstance(error, (CheckpointError, OSError, RuntimeError)):
            raise error
        raise CheckpointError(
            f"saving to {self._root} failed: {describe(error)}; earlier checkpoints are intact"
        ) from error

    @property
    def failed(self) -> bool:
        """Whether a pending checkpoint has failed; never blocks. Other ranks may learn it a moment later, so they agree
        on it before all of them call :meth:`wait`, which raises."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def close(self) -> None:
        """Finish the pending checkpoint and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    # ---- in the background thread

    def _write(self, state: dict[str, Any], manifest: Manifest) -> None:
        path = manifests.partial(self._root, manifest.step)
        try:
            together(self._group, lambda: self._make(path))
            parts = together(self._group, lambda: write_shards(path, state, self._group))
            files = {name: entry for part in parts for name, entry in part.items()}
            together(self._group, lambda: self._publish(path, replace(manifest, files=files)))
        except CheckpointError:
            # All ranks are here or on their way, none of them writes any more, and none leaves before it is gone. A
            # rank that was lost meanwhile is not what went wrong with this save.
            with contextlib.suppress(RuntimeError):
                together(self._group, lambda: self._discard(path))
            raise
        if self._rank == 0:
            self._retire()

    def _make(self, path: Path) -> None:
        if self._rank != 0:
            return
        try:
            if path.exists():
                shutil.rmtree(path)
            path.mkdir(parents=True)
        except OSError as error:
            raise cannot_write(path, error) from error

    def _discard(self, path: Path) -> None:
        if self._rank == 0:
            shutil.rmtree(path, ignore_errors=True)

    def _publish(self, path: Path, manifest: Manifest) -> None:
        if self._rank != 0:
            return
        final = manifests.folder(self._root, manifest.step)
        try:
            manifests.write(path, manifest)
            manifests.sync_folder(path)
            os.rename(path, final)  # fails where ``final`` exists and is not empty: nothing is ever overwritten
            manifests.sync_folder(self._root)
        except OSError as error:
            raise cannot_write(final if path.exists() else path, error) from error

    def _retire(self) -> None:
        """Delete what no rule holds; renamed first, so that a kill leaves no half-deleted step_N."""
        for old in self._retention.doomed(manifests.complete(self._root)):
            doomed = old.with_name(f".{old.name}.deleted")
            try:
                os.rename(old, doomed)
                shutil.rmtree(doomed)
            except OSError as error:  # the new one is safe: no reason to end the run
                _log.warning("%s could not be deleted: %s", old, describe(error))


def sweep(root: Path) -> None:
    """Remove what killed processes left: partial and half-deleted checkpoints. Only while no run writes here."""
    if root.is_dir():
        for left in (*root.glob(".step_*.partial"), *root.glob(".step_*.deleted")):
            shutil.rmtree(left)
