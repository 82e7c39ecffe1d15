"""Defects of checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from accelbridge.checkpoint import load, stage
from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.save import Checkpointer
from accelbridge.checkpoint.stage import Stage
from accelbridge.checkpoint.together import gathered
from accelbridge.conformance.mutants import Patch, mutant
from accelbridge.portable.device import TorchDevice
from accelbridge.portable.execution import EagerExecution
from accelbridge.portable.sharded_adamw import local
from accelbridge.train import trainer


@mutant("K1", "the optimizer's state is not saved", {"CKP-001": "LOSS", "TRN-016": "LOSS"})
def without_moments(patch: Patch) -> None:
    def state(inner: Any, self: Any, *args: Any) -> dict[str, Any]:
        return {name: value for name, value in inner(self, *args).items() if not name.startswith("optimizer.")}

    patch(EagerExecution, "state", state)


@mutant("K2", "the generators of rank 0 are saved for all ranks", {"CKP-002": "RNG"})
def first_ranks_generators(patch: Patch) -> None:
    def save(inner: Any, self: Any, state: Mapping[str, Tensor], manifest: Manifest) -> None:
        own = [name for name in state if name.startswith("rng.")]
        first = gathered(self._group, {name.split(".", 2)[2]: state[name] for name in own})[0]
        inner(self, {**state, **{name: first[name.split(".", 2)[2]] for name in own}}, manifest)

    patch(Checkpointer, "save", save)


@mutant("K3", "the padding of uneven shards is saved", {"CKP-003": "PADDING", "CKP-004": "PADDING"})
def with_padding(patch: Patch) -> None:
    def padded(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor) or tensor.dim() == 0 or not tensor.placements[-1].is_shard(0):
            return tensor
        rows = -(-tensor.shape[0] // tensor.device_mesh.shape[-1])
        part = tensor.to_local()
        full = torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
        return DTensor.from_local(full, tensor.device_mesh, [*tensor.placements[:-1], Shard(0)])

    def save(inner: Any, self: Any, state: Mapping[str, Tensor], manifest: Manifest) -> None:
        inner(self, {name: padded(tensor) for name, tensor in state.items()}, manifest)

    patch(Checkpointer, "save", save)


@mutant(
    "K4", "published before it is written, and whatever lies under its manifest is believed",
    {"CKP-005": "STATE", "CKP-006": "ERROR", "CKP-012": "STATE"},
)  # fmt: skip
def early_manifest(patch: Patch) -> None:
    def make(inner: Any, self: Any, path: Path) -> None:
        inner(self, path)
        if self._rank == 0:
            manifests.write(path, Manifest(step=manifests.step_of(path) or 0, world_size=1))

    patch(manifests, "partial", lambda _, root, step: manifests.folder(root, step))
    patch(Checkpointer, "_make", make)
    patch(Checkpointer, "_discard", lambda *_: None)
    patch(manifests, "faults", lambda _, path, manifest, names=None: manifests.quick_faults(path, manifest))


@mutant("K5", "what the checkpoint lacks stays as it was", {"CKP-007": "ERROR"})
def partial_load(patch: Patch) -> None:
    def make(inner: Any, self: Any) -> None:
        inner(self, allow_partial_load=True)

    patch(load, "_check_fits", lambda *_: None)
    patch(load._TensorsOnly, "__init__", make)


def _rounded(tensor: Any) -> Any:
    return tensor.bfloat16().to(tensor.dtype) if tensor.dtype == torch.float32 else tensor


@mutant("K6", "saved with the mantissas of bfloat16", {"CKP-009": "EXACT", "CKP-011": "EXACT"})
def rounded_save(patch: Patch) -> None:
    def copy(inner: Any, self: Any, state: Mapping[str, Tensor]) -> dict[str, Any]:
        staged = inner(self, state)
        for tensor in staged.values():
            local(tensor).copy_(_rounded(local(tensor)))
        return staged

    patch(Stage, "copy", copy)


@mutant("K7", "a save in the background holds a later step", {"CKP-010": "EXACT"})
def late_copy(patch: Patch) -> None:
    def save(inner: Any, self: Any, state: Mapping[str, Tensor], manifest: Manifest) -> None:
        self.late = state
        inner(self, state, manifest)

    def write(inner: Any, self: Any, staged: Any, manifest: Manifest) -> None:
        time.sleep(0.5)
        inner(self, stage.Stage().copy(self.late), manifest)

    patch(Checkpointer, "save", save)
    patch(Checkpointer, "_write", write)


@mutant("K8", "only the sizes of files are verified", {"CKP-008": "ERROR", "CKP-006": "ERROR"})
def sizes_only(patch: Patch) -> None:
    patch(manifests, "faults", lambda _, path, manifest, names=None: manifests.quick_faults(path, manifest))


@mutant("K9", "on another number of ranks, rows come back in other places", {"CKP-004": "EXACT"})
def permuted_rows(patch: Patch) -> None:
    def read(inner: Any, path: Path, state: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
        inner(path, state, group)
        if manifests.read(path).world_size == (dist.get_world_size(group) if group is not None else 1):
            return
        for tensor in map(local, state.values()):
            if tensor.dim():
                tensor.copy_(tensor.roll(1, 0))

    patch(trainer, "load", read)


@mutant("K10", "the file names the device", {"CKP-011": "CONTENT"})
def bound_to_a_device(patch: Patch) -> None:
    def save(inner: Any, state: dict[str, Any], **options: Any) -> Any:
        return inner({**state, "device": torch.device("cpu", 0)}, **options)

    patch(dcp, "save", save)


@mutant("K11", "generators are not restored", {"CKP-001": "LOSS", "CKP-002": "RNG"})
def generators_left(patch: Patch) -> None:
    patch(TorchDevice, "set_rng_state", lambda *_: None)
