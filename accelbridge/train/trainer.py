"""The trainer. It names no vendor and no process group: it speaks layout and sharding spec, and calls Execution.

    Trainer(TrainConfig.load("recipe.yaml")).fit()
    Trainer(config, model=MyModule(), data=my_dataset).fit()

``fit`` is the training loop of a textbook; everything else is a named collaborator that also works alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelbridge import agreement, ops
from accelbridge.backend import Execution, Precision
from accelbridge.checkpoint.load import load, verify
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.save import Checkpointer, sweep
from accelbridge.data.loader import (
    Loader,
    PackedSamples,
    Prefetcher,
    Samples,
    check_samples,
    describe_samples,
    evaluation_batches,
)
from accelbridge.errors import ConfigError, DataError
from accelbridge.memory import recompute
from accelbridge.models.dropout import Dropout, name_sites
from accelbridge.parallel.layout import Layout
from accelbridge.train.build import build_model, check_equal, initialiser, sharding_spec
from accelbridge.train.config import TrainConfig
from accelbridge.train.lock import OutputLock
from accelbridge.train.logs import RankLog, log
from accelbridge.train.loss import Loss, NextTokenLoss, check_loss, evaluate_batch, gather_split, unpack_logits
from accelbridge.train.loss_scale import PREFIX, LossScale
from accelbridge.train.metrics import FINISHED_EVENT, STOPPED_EVENT, Metrics, RunFacts
from accelbridge.train.optim import build_optimizer, freeze, learning_rate, materialise_state, set_learning_rate
from accelbridge.train.prepare import CHECKPOINTS, Prepared, check_unchanged, prepare
from accelbridge.train.progress import make_progress
from accelbridge.train.run_plan import Provided
from accelbridge.train.stop import StopOnSignal
from accelbridge.train.uncovered import check_savable, coverage_notes
from accelbridge.train.watch import Watch
from accelbridge.train.world import apply_environment, connect, world_from_environment

Batch = Mapping[str, Tensor]

_DROPOUT_KEYS = "accelbridge.dropout_keys"
"""Where a batch carries the row keys of dropout until it is placed."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    step: int
    """Optimizer updates done."""
    loss: float | None
    """Mean loss per target of the last step, in nats; None if no step was run."""
    validation_loss: float | None
    """The same over ``data.validation`` at the end; None without one."""
    stopped: bool
    """Whether SIGTERM ended it early, after a checkpoint."""
    output: Path


class Trainer:
    """Trains ``model`` on ``data`` as ``config`` says, on whatever backend is chosen.

    Args:
        config: a TrainConfig, a mapping shaped like one, or the path of a recipe.
        model: any ``nn.Module``; default: the decoder of ``config.model``. It may define
            ``sharding_spec() -> ShardingSpec``; on the meta device it is initialised layer by layer, otherwise
            it keeps its values, which must be equal on all ranks.
        data: a map-style dataset of dicts of tensors; default: the token store ``config.data.train``.
        validation: the same for evaluation; default: ``config.data.validation``.
        loss: see :class:`accelbridge.train.loss.Loss`; default: next-token cross-entropy.
        backend: name of a backend; wins over ``ACCELBRIDGE_BACKEND`` and the recipe.
        resume: "none", "auto" (newest complete checkpoint of ``output.dir``, if any) or a checkpoint's path.

    Raises an AccelbridgeError at once for anything that cannot work; nothing has been started then. :meth:`fit`
    closes the trainer; to call :meth:`evaluate` alone, use it as a context manager.
    """

    def __init__(
        self,
        config: TrainConfig | Mapping[str, Any] | str | Path,
        *,
        model: nn.Module | None = None,
        data: Samples | None = None,
        validation: Samples | None = None,
        loss: Loss | None = None,
        backend: str | None = None,
        resume: str | Path = "none",
    ) -> None:
        self.config = TrainConfig.of(config)
        if data is not None:
            check_samples(data)
        if validation is not None:
            check_samples(validation, "validation")
        if loss is not None:
            check_loss(loss)
        self.prepared = prepare(
            self.config,
            world_from_environment(),
            backend=backend,
            resume=resume,
            provided=_provided(self.config, model, {"train": data, "validation": validation}, loss),
        )
        self.plan = self.prepared.plan
        self.step = self.prepared.start_step
        self._model = model
        self._loss = loss
        self._train = data if data is not None else _packed(self.prepared, "train")
        self._validation = validation if validation is not None else _packed(self.prepared, "validation")
        self._loss_scale: LossScale | None = None
        """With compute float16 only."""
        self._resources = ExitStack()
        parallel = self.config.parallel
        logs = self.prepared.output / "logs"
        self._watch = Watch(self.prepared.world, parallel.timeout, parallel.heartbeat_timeout, logs)
        self._ready = self._closed = False
        self.failed_at: float | None = None
        """Unix time of the error that ended the run: before closing, which makes the other ranks fail as well."""

    # ------------------------------------------------------------------------------------------------ the loop

    def fit(self) -> Result:
        """Train up to ``config.train.steps`` updates, or until SIGTERM; leave a checkpoint behind, and close."""
        # The signal last: an agent that ends the other ranks of a failed one must not keep them from saying why.
        with StopOnSignal() as stop, self:
            self.setup()
            steps = Prefetcher(self.loader, self.step, self.config.train.steps)
            self._resources.callback(steps.close)
            line: dict[str, Any] = {}
            validation_loss = None
            stopped = False
            self._watch.begin(self.step + 1)
            began = time.perf_counter()
            for _, microbatches in steps:
                values = self.train_step(microbatches)
                self.step += 1
                seconds = time.perf_counter() - began
                self.metrics.record(self.step, **values, step_time=seconds)
                self._watch.step_done(seconds)
                if self._due():
                    line = self._read_metrics()
                    stopped = self.execution.any(stop.requested)
                    self._save_if_due(stopped)
                    validation_loss = self._evaluate_if_due(stopped)
                    self._name_slow_ranks()
                if stopped:
                    break
                began = time.perf_counter()
            self.checkpointer.wait()
            self.metrics.event(STOPPED_EVENT if stopped else FINISHED_EVENT, step=self.step)
        return Result(self.step, line.get("loss"), validation_loss, stopped, self.prepared.output)

    def train_step(self, microbatches: list[dict[str, Tensor]]) -> dict[str, Any]:
        """One optimizer update. Returns device scalars; nothing here waits for the device.

        ``loss`` is this replica's share of the step's mean loss; the metrics add the shares up when they are read.
        """
        execution, model, scale = self.execution, self.model, self._loss_scale
        batches = [execution.place(self._with_dropout_keys(batch)) for batch in microbatches]
        dropout_keys = [batch.pop(_DROPOUT_KEYS, None) for batch in batches]
        targets = execution.sum(torch.stack([self.loss.count(batch).float() for batch in batches]).sum())
        total = torch.zeros_like(targets)
        divisor = targets.clamp(min=1)  # a step without a single target has loss 0, not NaN
        for index, batch in enumerate(batches):
            # Open in the backward pass as well, where recomputation must draw the same masks.
            with execution.microbatch(model, index, len(batches)), ops.dropout_stream(dropout_keys[index]):
                loss = self.loss(model, batch) / divisor
                (loss if scale is None else loss * scale.scale).backward()
            total += loss.detach()
        rate = learning_rate(self.config.optimizer, self.step, self.config.train.steps)
        set_learning_rate(self.optimizer, rate, execution.scalar)
        values = self._update(rate)
        return execution.end_step({"loss": total, "tokens": targets, **values})

    def _update(self, rate: float) -> dict[str, Any]:
        """Clip the gradients, update and clear them; what the metrics say of it."""
        clip, scale = self.config.optimizer.clip_norm, self._loss_scale
        values: dict[str, Any] = {"lr": rate}
        if scale is None:
            values["grad_norm"] = self.execution.clip_grad_norm(self.model, clip)
            self.optimizer.step()
        else:
            scale.unscale_(self.model.parameters())
            values["grad_norm"] = norm = self.execution.clip_grad_norm(self.model, clip)
            values["loss_scale"] = scale.scale.clone()  # that of this step: the update may change it
            scale.step(self.optimizer, norm)
            values["skipped_updates"] = scale.skipped
        self.optimizer.zero_grad()
        return values

    def _with_dropout_keys(self, batch: Batch) -> Batch:
        """The batch, and what its dropout masks are drawn by where the model has any: placed as its rows are."""
        if not self._draws_dropout:
            return batch
        keys = ops.dropout_keys(self.config.train.seed, self.step, batch["sample_ids"])
        return {**batch, _DROPOUT_KEYS: keys}

    def evaluate(self) -> float | None:
        """Mean loss per target over the validation data, in nats; None where there is none."""
        if self._validation is None:
            return None
        self.setup()
        batches = evaluation_batches(
            self._validation,
            self.prepared.microbatch_size,
            self.execution.data_coordinates,
            self.prepared.layout.data_parallel,
        )
        totals: list[Tensor] = []
        with self.execution.evaluation(self.model):
            for batch in batches:
                placed = self.execution.place(batch)
                totals.append(evaluate_batch(self.loss, self.model, placed))
                self.execution.end_step()
        # One reduction over a tree of float32 sums: not every device has float64.
        loss, count = self.execution.sum(torch.stack(totals).sum(0)).tolist()
        if not count:
            raise DataError("the validation data has no targets; give data in which some are not -100")
        return loss / count

    def close(self) -> None:
        """Finish the pending checkpoint, close the files and leave the groups. Safe to call again."""
        self._closed = True
        self._resources.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
            return
        self.failed_at = time.time()
        verdict = self._watch.explain(error)
        try:
            self.close()
        except Exception as later:  # of groups or files that the first error has left unusable
            log.warning("closing after an error: %s", later)
        if verdict is not None:
            raise verdict from error

    # --------------------------------------------------------------------------------------------------- set-up

    def setup(self) -> None:
        """Agree, start, build, shard, resume: everything before the first step. Safe to call again."""
        if self._closed:
            raise ConfigError("this Trainer has been closed, as fit() does at its end; make a new one")
        if self._ready:
            return
        prepared, config, world = self.prepared, self.config, self.prepared.world
        if world.rank == 0:
            self._resources.callback(OutputLock(prepared.output).release)
            check_unchanged(prepared)
        self._resources.callback(RankLog(prepared.output, world.rank).close)
        self._agree_and_start()
        self._show_plan()
        self._build()
        self.optimizer = build_optimizer(self.model, config.optimizer, self.plan.load("adamw"))
        if config.precision.compute == "float16":
            self._loss_scale = LossScale(config.precision.loss_scale, self.execution.device)
        self._open_checkpoints()
        coordinates = self.execution.data_coordinates
        assert self._train is not None, "prepare() saw that there is training data"
        self.loader = Loader(
            self._train,
            global_batch_size=config.train.global_batch_size,
            microbatch_size=prepared.microbatch_size,
            coordinates=coordinates,
            data_parallel=prepared.layout.data_parallel,
            seed=config.train.seed,
            shuffle=config.data.shuffle,
        )
        self._open_metrics()
        self._ready = True

    def _agree_and_start(self) -> None:
        prepared, parallel = self.prepared, self.config.parallel
        target, world = prepared.target, prepared.world
        self.execution: Execution = target.backend.execution
        apply_environment(target.backend.collectives, world)
        store = connect(world, parallel.agreement_timeout)
        agreement.agree(store, world, self.plan.contract, parallel.agreement_timeout)
        self._resources.callback(self._watch.close)
        self._watch.start(store)
        self._resources.callback(self.execution.close)
        self.execution.start(store, world, prepared.layout, parallel.timeout, parallel.check_collectives)
        target.backend.device.seed(self.config.train.seed + world.rank)
        if self.config.train.deterministic:
            self._resources.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            torch.use_deterministic_algorithms(True)

    def _show_plan(self) -> None:
        from accelbridge.render import plan_text, write_plan

        text = plan_text(self.plan)
        log.info("%s", text)
        if self.prepared.world.rank == 0:
            write_plan(self.plan, self.prepared.output)
            print(text, flush=True)

    def _build(self) -> None:
        config = self.config
        self.plan.bind()
        recompute.bind(self.prepared.recompute, config.train.compile)
        model = self._model if self._model is not None else build_model(config)
        self._draws_dropout = bool(name_sites(model))
        if self._loss is None:
            model.register_forward_hook(unpack_logits)
        elif self.prepared.layout.tp > 1:
            model.register_forward_hook(gather_split)
        self.loss: Loss = self._loss or NextTokenLoss(model)
        materialised = not any(p.is_meta for p in model.parameters())
        if materialised:
            check_equal(model, self.execution.control_group)
        freeze(model, config.optimizer)
        spec = sharding_spec(model, self.prepared.layout)
        initialise = initialiser(model, config.train.seed)
        precision = Precision(config.precision.compute, config.precision.reduce, config.precision.params)
        self.parameters = sum(p.numel() for p in model.parameters())
        finish = recompute.finisher(self.prepared.recompute, self.execution.compile if config.train.compile else None)
        self.model = self.execution.realise(model, spec, precision, initialise, finish)

    def _open_checkpoints(self) -> None:
        prepared, config, world = self.prepared, self.config, self.prepared.world
        root = prepared.output / CHECKPOINTS
        group = self.execution.control_group
        materialise_state(self.optimizer)
        self.execution.end_step()  # else this work would be in the first step's graph
        if prepared.resume is not None:
            verify(prepared.resume.path, prepared.resume.manifest, group)
            state = self._state()
            left_out = _absent(prepared.resume.manifest, world.size, self.plan.backend)
            state = {name: t for name, t in state.items() if not name.startswith(left_out)}
            load(prepared.resume.path, state, group)
            self._restore(state)
            log.info("resumed from %s at step %d", prepared.resume.path, self.step)
        if world.rank == 0:
            sweep(root)
        self.checkpointer = Checkpointer(
            root,
            group=group,
            rank=world.rank,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
        )
        self._resources.callback(self.checkpointer.close)

    def _open_metrics(self) -> None:
        prepared, config, world = self.prepared, self.config, self.prepared.world
        peak = prepared.target.capabilities.chip.peak_flops.get(config.precision.compute)
        facts = RunFacts(
            parameters=self.parameters,
            flops_per_token=config.model.flops_per_token(config.train.seq_len) if config.model else None,
            peak_flops=peak * prepared.layout.size if peak is not None else None,
            total_steps=config.train.steps,
            tokens_per_step=config.train.global_batch_size * config.train.seq_len,
        )
        self.metrics = Metrics(prepared.output, config.metrics, facts, rank=world.rank, start_step=self.step)
        self._resources.callback(self.metrics.close)
        self.progress = make_progress(config.train.steps, self.step, rank=world.rank)
        self._resources.callback(self.progress.close)
        if prepared.resume is not None:
            self.progress.print(f"resumed from {prepared.resume.path} at step {self.step}")

    # ------------------------------------------------------------------------------------------ between the steps

    def _due(self) -> bool:
        """Whether anything after this step needs the device's values: metrics, evaluation or a checkpoint."""
        return self.metrics.due(self.step) or self._evaluation_due() or self._checkpoint_due()

    def _evaluation_due(self) -> bool:
        interval = self.config.train.eval_interval
        return self._validation is not None and (self._last() or bool(interval and self.step % interval == 0))

    def _checkpoint_due(self) -> bool:
        interval = self.config.checkpoint.interval
        return self._last() or bool(interval and self.step % interval == 0)

    def _last(self) -> bool:
        return self.step >= self.config.train.steps

    def _read_metrics(self) -> dict[str, Any]:
        """Read the pending values, and notice a background save that has failed."""
        self.checkpointer.poll()
        lines = self.metrics.flush(self.execution.sum)
        self.progress.update(lines[-1])
        return lines[-1]

    def _name_slow_ranks(self) -> None:
        for slow in self._watch.interval_done():
            self.metrics.event("slow_rank", **slow)
            self.progress.print(
                f"slow rank at step {slow['step']}: rank {slow['rank']} takes {slow['seconds']} s for its part of a "
                f"step, {slow['ratio']} times the median"
            )

    def _evaluate_if_due(self, stopped: bool) -> float | None:
        if stopped or not self._evaluation_due():
            return None
        loss = self.evaluate()
        assert loss is not None, "due only where there is validation data"
        self.metrics.event("evaluation", step=self.step, loss=loss)
        self.progress.print(f"evaluation at step {self.step}: loss {loss:.4f}")
        return loss

    def _save_if_due(self, stopped: bool) -> None:
        if not (stopped or self._checkpoint_due()):
            return
        prepared, config = self.prepared, self.config
        manifest = Manifest(
            step=self.step,
            world_size=prepared.world.size,
            model=config.model.model_dump() if config.model else None,
            layout=prepared.layout.as_dict(),
            plan=dict(self.plan.contract),
        )
        began = time.perf_counter()
        self.checkpointer.save(self._state(), manifest)
        self.metrics.event("checkpoint", step=self.step, stall=round(time.perf_counter() - began, 4))
        if stopped:
            self.progress.print(f"SIGTERM: checkpoint at step {self.step}, stopping")

    def _state(self) -> dict[str, Any]:
        """Model, optimizer, loss scale and this rank's generators, all as tensors. The data position is the step."""
        state = self.execution.state(self.model, self.optimizer)
        if self._loss_scale is not None:
            state |= self._loss_scale.state()  # live tensors: loading fills them in place
        rank = self.prepared.world.rank
        for name, value in self.prepared.target.backend.device.rng_state().items():
            state[f"rng.{rank}.{name}"] = value
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        self.execution.load_state(self.model, self.optimizer, state)
        prefix = f"rng.{self.prepared.world.rank}."
        rng = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
        if rng:
            self.prepared.target.backend.device.set_rng_state(rng)


def _absent(manifest: Manifest, world_size: int, backend: str) -> tuple[str, ...]:
    """Prefixes of entries that a checkpoint has not, or has for other ranks or another kind of device; they stay as
    they start."""
    same_ranks = manifest.world_size == world_size and manifest.plan.get("backend") == backend
    unscaled = manifest.plan.get("recipe", {}).get("precision.compute") != "float16"
    return (*(() if same_ranks else ("rng.",)), *((PREFIX,) if unscaled else ()))


def _packed(prepared: Prepared, split: str) -> Samples | None:
    store = getattr(prepared, split)
    config = prepared.config
    return PackedSamples(store, config.train.seq_len, config.data.document_mask) if store is not None else None


def _provided(
    config: TrainConfig, model: nn.Module | None, own: Mapping[str, Samples | None], loss: Loss | None
) -> Provided:
    """What the plan must know of a script's own data and model: what they are, the ops it is known to call, and
    what is not covered."""
    data = {name: describe_samples(samples) for name, samples in own.items() if samples is not None}
    if model is None:
        return Provided(data=data, loss=loss is not None)
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if config.model is not None:
        raise ConfigError("model asked both in the recipe and as an argument; give one of the two")
    check_savable(model)
    parallel = config.parallel
    spec = sharding_spec(model, Layout(tp=parallel.tp, sequence_parallel=parallel.sequence_parallel))
    notes = coverage_notes(model)
    if loss is not None and parallel.tp > 1:
        notes.append("the loss is your own: what the model returns split over tp is gathered for it")
    if loss is None and (note := NextTokenLoss(model).note):
        notes.append(note)
    vocab_head = "vocab_head" in spec.tensor_parallel.values()
    dropout = any(isinstance(module, Dropout) and module.p > 0 for module in model.modules())
    return Provided(
        model=True,
        data=data,
        loss=loss is not None,
        dropout=dropout,
        vocab_head=vocab_head,
        parameters=parameters,
        units=sum(bool(name) and spec.is_unit(name) for name, _ in model.named_modules()),
        spec=spec,
        notes=notes,
    )
