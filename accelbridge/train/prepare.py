"""From a recipe to a resolved run: backend, layout, data, resume point and plan, with nothing started.

The launcher, ``accelbridge explain`` and every rank do the same preparation, so that bad input ends here, before
a device is bound, a process group exists or a file of the run is written. Imports no torch.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelbridge import assume
from accelbridge.assume import Assumption
from accelbridge.backend import Backend, Capabilities, World
from accelbridge.data.store import TokenStore
from accelbridge.errors import ConfigError, DataError
from accelbridge.memory.choice import Recompute
from accelbridge.models.shapes import DECODER_SPEC, decoder_shapes
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import check_data_parallel
from accelbridge.plan import ExecutionPlan
from accelbridge.plugins import Selection, choose, instantiate
from accelbridge.train.check import (
    accumulation_steps,
    check_capture,
    check_processes,
    check_settings,
    check_tensor_parallel,
    resolve_layout,
)
from accelbridge.train.config import TrainConfig
from accelbridge.train.fp8_plan import Fp8Run, carried
from accelbridge.train.restart import resume_after_restart
from accelbridge.train.resume import CHECKPOINTS, Resume, check_same_order, path_of, refuse_other_run, resume_point
from accelbridge.train.run_plan import Provided, plan_run
from accelbridge.train.stop import SLURM_END

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Target:
    """The backend of a run and what it can do here."""

    selection: Selection
    backend: Backend
    capabilities: Capabilities
    devices: int | None = None
    """Devices of an assumed host; None: those of this one."""
    note: str = ""
    """What the backend says of the chip that the plan is for."""

    def offered(self) -> int:
        """Devices of the host."""
        return self.backend.device.count() if self.devices is None else self.devices

    def devices_per_process(self) -> int:
        """Devices of this host that one process drives; more than one only under spmd execution."""
        return self.backend.execution.devices_per_process(self.offered())

    def processes(self, asked: int | None = None) -> int:
        """Processes to start on this host: ``asked``, else one per accelerator. Raises ConfigError for too many."""
        offered = self.offered()
        most = offered // self.devices_per_process()
        if asked is not None and asked > most:
            raise ConfigError(
                f"--nproc {asked} asked; backend {self.backend.name} offers {offered} device{'s' * (offered != 1)} "
                f"here, for {most} process{'es' * (most != 1)}; set --nproc {most} or less"
            )
        return asked or (most if self.backend.accelerator else 1)


@dataclass(frozen=True)
class Prepared:
    """Everything that is known of a run before it starts."""

    config: TrainConfig
    world: World
    target: Target
    layout: Layout
    microbatch_size: int
    microbatches: int
    train: TokenStore | None
    validation: TokenStore | None
    resume: Resume | None
    plan: ExecutionPlan
    recompute: Recompute = field(default_factory=Recompute)
    fp8: Fp8Run | None = None
    continues: bool = False
    """Whether it may go on with what ``output.dir`` holds, from a checkpoint or, where there is none, from step 0."""

    @property
    def output(self) -> Path:
        return Path(self.config.output.dir).expanduser()

    @property
    def start_step(self) -> int:
        return self.resume.manifest.step if self.resume else 0


def choose_target(
    config: TrainConfig, argument: str | None = None, *, everything: bool = False, assumed: Assumption | None = None
) -> Target:
    """Choose and instantiate the backend of ``config``, and ask what it can do here, or on an ``assumed`` host."""
    with config.places.pointing():
        if assumed is None:
            selection = choose(argument, config.backend.name, everything=everything)
        else:
            selection = assume.select(assumed, argument, config.backend.name)
        backend = instantiate(selection, config.backend.options)
    probe = selection.probe
    chip, note = backend.chip(probe)
    count = None if assumed is None else len(probe.devices)
    return Target(selection, backend, backend.capabilities(chip, probe.software), count, note)


def prepare(
    config: TrainConfig,
    world: World,
    *,
    backend: str | None = None,
    resume: str | Path = "none",
    provided: Provided | None = None,
    target: Target | None = None,
    writes: bool = True,
) -> Prepared:
    """Check everything and resolve the plan. Raises the matching AccelbridgeError for the first problem.

    ``resume`` is "none", "auto" (the newest complete checkpoint of ``output.dir``, if any) or a path.
    ``target`` is what :func:`choose_target` returned before, if it was asked. ``writes`` False is for explain:
    it leaves ``output.dir`` alone, and data that isn't there yet is only noted.
    """
    with config.places.pointing():
        return _prepare(config, world, target or choose_target(config, backend), resume, provided or Provided(), writes)


def _prepare(
    config: TrainConfig, world: World, target: Target, resume: str | Path, provided: Provided, writes: bool
) -> Prepared:
    check_settings(config, target.capabilities)
    check_processes(world.size, target.capabilities)
    layout = resolve_layout(config.parallel, world.size * target.devices_per_process(), target.capabilities)
    check_tensor_parallel(layout, config.model, config.train.seq_len)
    check_capture(config, target.capabilities, layout, provided.random)
    size, count = accumulation_steps(config.train, layout)
    if config.model is None and not provided.model:
        raise ConfigError(
            f"model is missing from {config.places.source}; add the section, or pass Trainer(config, model=...)"
        )
    _check_split(config, layout, target, provided)
    if writes:
        _check_can_happen(config, provided)
    if writes and config.data.train is None and "train" not in provided.data:
        raise ConfigError(
            f"data.train is missing from {config.places.source}; give the path of a token store "
            "('accelbridge data build')"
        )
    if not writes:
        config, provided = _without_absent_data(config, provided)
    train, validation = (open_store(config, split) for split in SPLITS)
    output = Path(config.output.dir).expanduser()
    if writes:
        with path_of(f'output.dir "{output}"'):
            resume = resume_after_restart(resume, world.restart, output / CHECKPOINTS)
            if str(resume) == "none":
                refuse_other_run(output)
    resumed = resume_point(config, resume) if writes else None
    stores = {"train": train, "validation": validation}
    plan, recompute, fp8 = plan_run(config, world, target, layout, size, stores, resumed, provided)
    if resumed is not None:
        check_same_order(config, resumed, plan.contract)
        carried(fp8, resumed.manifest)
    if writes:
        _make_writable(output)  # last: whatever else is wrong leaves no folder behind
    continues = str(resume) != "none"
    return Prepared(
        config, world, target, layout, size, count, train, validation, resumed, plan, recompute, fp8, continues
    )


def _check_split(config: TrainConfig, layout: Layout, target: Target, provided: Provided) -> None:
    if target.backend.execution.model != "eager":  # where sharding is annotation, any length goes
        return
    if config.model is not None:
        check_data_parallel(layout, DECODER_SPEC, decoder_shapes(config.model))
    elif provided.parameters is not None:
        check_data_parallel(layout, provided.spec, provided.parameters)


def _check_can_happen(config: TrainConfig, provided: Provided) -> None:
    """Whether what the checkpoints wait for can come at all; the recipe alone does not say it."""
    checkpoint = config.checkpoint
    validation = config.data.validation is not None or "validation" in provided.data
    if checkpoint.best is not None and checkpoint.best.metric == "validation_loss" and not validation:
        raise ConfigError(
            "checkpoint.best with metric validation_loss asked; there is no validation data; set data.validation, or "
            "metric: loss"
        )
    if checkpoint.before_seconds is not None and config.train.max_seconds is None and SLURM_END not in os.environ:
        raise ConfigError(
            f"checkpoint.before_seconds {checkpoint.before_seconds:g} asked; no time limit is known (train.max_seconds "
            f"is not set, nor is {SLURM_END}); set train.max_seconds"
        )


def _without_absent_data(config: TrainConfig, provided: Provided) -> tuple[TrainConfig, Provided]:
    """A plan can be explained before its data is built; its digest then is not yet the run's."""
    paths = {split: getattr(config.data, split) for split in SPLITS}
    absent = {split: path for split, path in paths.items() if path is not None and not os.path.lexists(path)}
    if not absent:
        return config, provided
    notes = [f"data.{split} {path} is not there yet: the digest is without it" for split, path in absent.items()]
    data = config.data.model_copy(update=dict.fromkeys(absent))
    return config.model_copy(update={"data": data}), replace(provided, notes=[*provided.notes, *notes])


def open_store(config: TrainConfig, split: str) -> TokenStore | None:
    """The token store of ``split``, checked against the model. Raises DataError."""
    path = getattr(config.data, split)
    if path is None:
        return None
    try:
        store = TokenStore(path, verify=config.data.verify)
    except (DataError, ValueError) as error:  # ValueError: a NUL in the path
        raise DataError(f'data.{split} "{path}" asked; {error}') from error
    if config.model is not None and store.vocab_size > config.model.vocab_size:
        raise DataError(
            f"data.{split} {path} has a vocabulary of {store.vocab_size}; the model's is "
            f"{config.model.vocab_size}; set model.vocab_size to {store.vocab_size} or more"
        )
    if store.tokens <= config.train.seq_len:
        raise DataError(
            f"train.seq_len {config.train.seq_len} asked; data.{split} {path} has {store.tokens} tokens, and one "
            f"sample takes train.seq_len + 1; use a shorter train.seq_len or more data"
        )
    return store


def _make_writable(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except FileExistsError:
        raise ConfigError(f'output.dir "{output}" asked; it is a file; set another output.dir') from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f'output.dir "{output}" asked; it cannot be written: {why}; set another output.dir'
        ) from error
