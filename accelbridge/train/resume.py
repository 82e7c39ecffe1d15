"""Where a run goes on: the newest intact checkpoint, or the one that was named. Free of torch.

What can be seen without reading the shards is seen here, by the launcher and every rank; their bytes are verified
later, on all ranks together (:mod:`accelbridge.train.resuming`), which may lead to an older checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.manifest import ForeignFormat, Manifest
from accelbridge.errors import AccelbridgeError, CheckpointError, ConfigError
from accelbridge.train.metrics import METRICS_FILE

if TYPE_CHECKING:
    from accelbridge.train.config import TrainConfig
    from accelbridge.train.prepare import Prepared

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class PassedOver:
    """A newer checkpoint that cannot be used."""

    path: Path
    fault: str
    foreign: bool = False
    """Of another format, and perhaps in order."""

    @property
    def suffix(self) -> str:
        """What its name gets when it is set aside."""
        return "foreign" if self.foreign else "damaged"


@dataclass(frozen=True)
class Resume:
    """The checkpoint from which a run goes on."""

    path: Path
    manifest: Manifest
    passed_over: tuple[PassedOver, ...] = ()
    """Newer ones in the same folder, newest first."""
    automatic: bool = False
    """Chosen by ``--resume auto``, which goes on from an older one where this turns out to be damaged."""


def checkpoints_of(config: TrainConfig) -> Path:
    """Where a run of ``config`` keeps its checkpoints."""
    return Path(config.output.dir).expanduser() / CHECKPOINTS


def resume_point(config: TrainConfig, resume: str | Path) -> Resume | None:
    """The checkpoint to go on from. Raises CheckpointError or ConfigError."""
    if str(resume) == "none":
        return None
    root = checkpoints_of(config)
    if str(resume) == "auto":
        with path_of(f'output.dir "{config.output.dir}"'):
            return newest_intact(config, root)
    path = Path(resume).expanduser()
    with path_of(f"--resume {path}"):
        _is_checkpoint(path, manifests.complete(root))
        found = Resume(path, _usable(path, named=False))
        _fits(found, config)
        _refuse_newer(found, root)
    return found


def newest_intact(config: TrainConfig, root: Path, passed: tuple[PassedOver, ...] = ()) -> Resume | None:
    """The newest checkpoint in ``root`` but for those of ``passed`` in which no damage shows; None in an empty folder.

    Raises CheckpointError where there are checkpoints and none is usable: starting anew is for the user to decide.
    """
    known = [path for path in manifests.published(root) if path not in {p.path for p in passed}]
    for path in reversed(known):
        try:
            manifest = _usable(path, named=True)
        except CheckpointError as error:
            passed = (*passed, PassedOver(path, str(error), isinstance(error, ForeignFormat)))
            continue
        found = Resume(path, manifest, passed, automatic=True)
        _fits(found, config)
        return found
    if not passed:
        return None
    raise CheckpointError(
        f"--resume auto asked; none of the {len(passed)} checkpoints in {root} can be used: "
        f"{'; '.join(p.fault for p in passed)}; restore one of them, or start anew in another output.dir"
    )


def _usable(path: Path, named: bool) -> Manifest:
    """The manifest at ``path`` if no damage shows without reading the shards. ``named``: its folder states the step."""
    manifest = manifests.read(path)
    if named and manifests.step_of(path) != manifest.step:
        raise CheckpointError(
            f"{path / manifests.NAME} is of step {manifest.step}: a copy of another checkpoint; choose another"
        )
    if found := manifests.quick_faults(path, manifest):
        raise CheckpointError(f"{'; '.join(found)}; the checkpoint {path.name} is damaged")
    return manifest


def _fits(resume: Resume, config: TrainConfig) -> None:
    _same_model(resume, config)
    if resume.manifest.step > config.train.steps:
        raise CheckpointError(
            f"--resume {resume.path} asked; it is at step {resume.manifest.step}, and train.steps is "
            f"{config.train.steps}; raise train.steps"
        )


def _refuse_newer(resume: Resume, root: Path) -> None:
    newer = [p.name for p in manifests.published(root) if (manifests.step_of(p) or 0) > resume.manifest.step]
    newer += [p.name for p in manifests.published(root) if not (p / manifests.NAME).is_file() and p.name not in newer]
    if newer:
        raise CheckpointError(
            f"--resume {resume.path} asked; {root} also holds {', '.join(sorted(newer))}, which going on would have to "
            "replace; move away what is newer or damaged, use --resume auto, or set another output.dir"
        )


def _is_checkpoint(path: Path, known: Sequence[Path]) -> None:
    """Refuse what is no checkpoint, with the ones that may have been meant."""
    if (path / manifests.NAME).is_file():
        return
    meant = manifests.complete(path) or manifests.complete(path / CHECKPOINTS) or known
    what = "it is no complete checkpoint" if path.exists() else "there is no such folder"
    way_out = f"use {meant[-1]}" if meant else 'use a folder OUTPUT/checkpoints/step_N, "auto" or "none"'
    raise CheckpointError(f"--resume {path} asked; {what} (it has no {manifests.NAME}); {way_out}")


def _same_model(resume: Resume, config: TrainConfig) -> None:
    if config.model is None or resume.manifest.model is None:
        return
    fields = type(config.model).model_fields.items()
    ours = config.model.model_dump()
    # A setting that the checkpoint's version did not know yet: its default is what that version did.
    theirs = {name: field.default for name, field in fields if not field.is_required()} | resume.manifest.model
    if ours == theirs:
        return
    differ = [k for k in sorted(ours.keys() | theirs.keys()) if ours.get(k) != theirs.get(k)]
    details = ", ".join(f"model.{k} is {theirs.get(k)} there, {ours.get(k)} here" for k in differ)
    raise CheckpointError(
        f"--resume {resume.path} asked; it is a checkpoint of another model: {details}; resume with its own recipe"
    )


_ORDER = ("train.seed", "train.global_batch_size", "train.seq_len", "data.shuffle", "data.document_mask")
"""Settings that decide which samples a step sees: with others, the step number stands for another position."""


def check_same_order(config: TrainConfig, resume: Resume, contract: Mapping[str, Any]) -> None:
    """Refuse to go on where the step of the checkpoint would mean other samples. Raises CheckpointError."""
    then = resume.manifest
    pairs = {name: (then.setting("recipe", name), contract["recipe"].get(name)) for name in _ORDER}
    pairs["the training data"] = (then.setting("data", "train"), contract["data"].get("train"))
    changed = [f"{name} was {old}, is {new}" for name, (old, new) in pairs.items() if then.plan and old != new]
    if changed and not config.checkpoint.allow_other_data:
        raise CheckpointError(
            f"--resume {resume.path} asked; it saw its data in another order: {'; '.join(changed)}; samples would be "
            "repeated or left out; set these back, or set checkpoint.allow_other_data: true"
        )


def check_unchanged(prepared: Prepared) -> None:
    """Look once more, now that ``output.dir`` is locked: another run may have ended there in the meantime."""
    resume = prepared.resume
    if resume is None and not prepared.continues:
        refuse_other_run(prepared.output)
        return
    # One that was killed before its first checkpoint goes on from the start.
    known = {resume.path, *(p.path for p in resume.passed_over)} if resume is not None else set()
    for path in reversed(manifests.published(prepared.output / CHECKPOINTS)):
        if path not in known and (manifests.step_of(path) or 0) > prepared.start_step:
            raise CheckpointError(
                f"{path} was written by another run while this one was waiting; start again with --resume auto"
            )


def refuse_other_run(output: Path) -> None:
    """A fresh run never goes where another one has written. Raises ConfigError."""
    holds = [*manifests.published(output / CHECKPOINTS), *output.glob(METRICS_FILE)]
    if holds:
        raise ConfigError(
            f'output.dir "{output}" asked; it already holds a run ({holds[-1].name}); '
            "continue it with --resume auto, or set another output.dir"
        )


@contextmanager
def path_of(setting: str) -> Iterator[None]:
    """What the file system says of a path that cannot be one, as an error of the ``setting`` that names it."""
    try:
        yield
    except AccelbridgeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{setting} asked; it cannot be used: {why}; set another path") from error
