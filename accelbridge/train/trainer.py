"""The trainer. It names no vendor and no process group: it speaks layout and sharding spec, and calls Execution.

    Trainer(TrainConfig.load("recipe.yaml")).fit()
    Trainer(config, model=MyModule(), data=my_dataset).fit()

``fit`` is the training loop of a textbook; everything else is a named collaborator that also works alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelbridge import agreement, ops
from accelbridge.backend import Execution, Precision
from accelbridge.checkpoint.load import load
from accelbridge.checkpoint.manifest import Manifest, skipped_data
from accelbridge.checkpoint.retention import Retention
from accelbridge.checkpoint.save import Checkpointer
from accelbridge.data.lengths import Lengths
from accelbridge.data.loader import (
    Loader,
    Prefetcher,
    Samples,
    check_samples,
    evaluation_batches,
)
from accelbridge.errors import ConfigError, DataError
from accelbridge.guards.fp8 import Fp8Guard
from accelbridge.guards.guards import Guards
from accelbridge.guards.masked_update import masked_step
from accelbridge.guards.rollback import roll_back
from accelbridge.guards.spikes import Spike
from accelbridge.memory import activations, recompute
from accelbridge.memory.activations import ActivationOffload
from accelbridge.memory.advice import explained_out_of_memory
from accelbridge.memory.host_pool import HostPool
from accelbridge.memory.use import MemoryUse
from accelbridge.models.dropout import name_sites
from accelbridge.precision.convert import convert
from accelbridge.train.build import build_model, check_equal, initialiser, sharding_spec
from accelbridge.train.config import TrainConfig
from accelbridge.train.emergency import open_ballot, save_last_step
from accelbridge.train.fp8_plan import carried
from accelbridge.train.lock import OutputLock
from accelbridge.train.logs import RankLog, log
from accelbridge.train.loss import Loss, NextTokenLoss, check_loss, evaluate_batch, gather_split, unpack_logits
from accelbridge.train.loss_scale import LossScale
from accelbridge.train.metrics import FINISHED_EVENT, PASSED_OVER_EVENT, STOPPED_EVENT, Metrics, RunFacts
from accelbridge.train.optim import build_optimizer, freeze, learning_rate, materialise_state, set_learning_rate
from accelbridge.train.prepare import Prepared, prepare
from accelbridge.train.profile import StepProfiler
from accelbridge.train.progress import make_progress
from accelbridge.train.provided import packed, provided
from accelbridge.train.restart import EVENT as RESTART_EVENT
from accelbridge.train.restart import restart_of
from accelbridge.train.resume import CHECKPOINTS, Resume, check_unchanged
from accelbridge.train.resuming import absent_entries, clear_the_way, settle, tell
from accelbridge.train.rounds import meet
from accelbridge.train.run_plan import Provided
from accelbridge.train.step_times import StepTimes
from accelbridge.train.stop import Asked, Requests, seconds_left
from accelbridge.train.world import apply_environment, connect, world_from_environment
from accelbridge.watch.watch import Watch

Batch = Mapping[str, Tensor]

_DROPOUT_KEYS = "accelbridge.dropout_keys"
"""Where a batch carries the row keys of dropout until it is placed, and to the passes of a microbatch."""
_DIVISOR = "accelbridge.divisor"
"""Where it carries what those divide their sum of losses by."""


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
    """Whether SIGTERM or a time limit ended it early, after a checkpoint."""
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
        resume: "none", "auto" (newest intact checkpoint of ``output.dir``, if any) or a checkpoint's path.

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
        self.prepared = self._prepare(
            backend, resume, provided(self.config, model, {"train": data, "validation": validation}, loss)
        )
        self.plan = self.prepared.plan
        self.step = self.prepared.start_step
        self.skipped_data = _skipped_before(self.prepared.resume)
        """Global batches that were skipped before this step, by rollbacks after loss spikes."""
        self.times = StepTimes()
        self._model = model
        self._loss = loss
        self._train = data if data is not None else packed(self.prepared, "train")
        self._validation = validation if validation is not None else packed(self.prepared, "validation")
        self.memory_use = MemoryUse()
        self.host_pool: HostPool | None = None
        """Where activations wait, with memory.activations: host."""
        self._loss_scale: LossScale | None = None
        """With compute float16 only."""
        self._captured: Callable[[Batch], Tensor] | None = None
        """With train.capture only."""
        self._resources = ExitStack()
        parallel = self.config.parallel
        logs = self.prepared.output / "logs"
        self._watch = Watch(self.prepared.world, parallel.timeout, parallel.heartbeat_timeout, logs)
        self._ready = self._closed = False
        self.updating = False
        """Whether parameters are being changed: from an update's beginning until its step is counted."""
        self.failed_at: float | None = None
        """Unix time of the error that ended the run: before closing, which makes the other ranks fail as well."""

    def _prepare(self, backend: str | None, resume: str | Path, provided: Provided) -> Prepared:
        return prepare(self.config, world_from_environment(), backend=backend, resume=resume, provided=provided)

    # ------------------------------------------------------------------------------------------------ the loop

    def fit(self) -> Result:
        """Train up to ``config.train.steps`` updates, or until SIGTERM or a time limit; leave a checkpoint behind, and
        close."""
        # The signals outermost: an agent that ends the other ranks of a failed one must not keep them from saying why.
        with Requests(seconds_left(self.config)) as requests, self, explained_out_of_memory(self):
            self.setup()
            steps = Prefetcher(self.loader, self.position, self.position + self.config.train.steps - self.step)
            self._resources.callback(steps.close)
            line: dict[str, Any] = {}
            validation_loss = None
            asked = Asked()
            self._watch.begin(self.step + 1)
            self.times.begin()
            for _, microbatches in steps:
                self.times.lap("data")
                if self.fp8 is not None:
                    self.fp8.count(self.metrics.due(self.step + 1))
                values = self.train_step(microbatches)
                self.step += 1
                self.updating = False
                times = self.times.end()
                waited = self._watch.step_done(times["step_time"])
                self.metrics.record(self.step, **values, **times, time_collectives=round(waited, 6))
                if self._due():
                    line, spike = self._read_metrics()
                    if spike is not None:
                        roll_back(self, spike)
                        steps.restart(self.position, self.position + self.config.train.steps - self.step)
                        self._watch.begin(self.step + 1)
                        continue
                    asked = self._agree_on(requests)
                    validation_loss = self._evaluate_if_due(asked)
                    self._save_if_due(asked, line, validation_loss)
                    self._name_slow_ranks()
                if asked.stop:
                    break
                self._profiler.after(self.step)
                self.times.begin()
            self.checkpointer.wait()
            reason = {"reason": asked.stop} if asked.stop else {}
            self.metrics.event(STOPPED_EVENT if asked.stop else FINISHED_EVENT, step=self.step, **reason)
        return Result(self.step, line.get("loss"), validation_loss, bool(asked.stop), self.prepared.output)

    def train_step(self, microbatches: list[dict[str, Tensor]]) -> dict[str, Any]:
        """One optimizer update. Returns device scalars; nothing here waits for the device.

        ``loss`` is this replica's share of the step's mean loss; the metrics add the shares up when they are read.
        """
        total, targets = self.accumulate(microbatches)
        rate = learning_rate(self.config.optimizer, self.step, self.config.train.steps)
        set_learning_rate(self.optimizer, rate, self.execution.scalar)
        values = {"loss": total, "tokens": targets, **self._update(rate, total)}
        gradients = self.execution.gradients
        assert gradients is not None, "clip_grad_norm() leaves them behind"
        values = self.execution.end_step(values | self.guards.values(gradients))
        self.times.lap("optimizer")
        return self.guards.keep(self.step + 1, gradients, values)

    def accumulate(self, microbatches: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Forward and backward passes of a step, which add gradients up. Returns this replica's share of the mean loss
        and the number of targets of the whole step, both on the device."""
        execution, model = self.execution, self.model
        passes = self._captured or self._passes
        batches = [execution.place(self._with_dropout_keys(self._few_lengths(batch))) for batch in microbatches]
        dropout_keys = [batch.pop(_DROPOUT_KEYS, None) for batch in batches]
        targets = execution.sum(torch.stack([self.loss.count(batch).float() for batch in batches]).sum())
        total = torch.zeros_like(targets)
        divisor = targets.clamp(min=1)  # a step without a single target has loss 0, not NaN
        for index, (batch, keys) in enumerate(zip(batches, dropout_keys, strict=True)):
            inputs = {**batch, _DIVISOR: divisor} | ({} if keys is None else {_DROPOUT_KEYS: keys})
            with execution.microbatch(model, index, len(batches)):
                total += passes(inputs)
            self.times.lap("backward")
        return total, targets

    def _passes(self, inputs: Batch) -> Tensor:
        """Forward and backward pass of one microbatch; its share of the step's mean loss. Whatever changes from one to
        the next comes with ``inputs``: these passes may be a graph."""
        batch, scale = dict(inputs), self._loss_scale
        keys, divisor = batch.pop(_DROPOUT_KEYS, None), batch.pop(_DIVISOR)
        # Open in the backward pass as well, where recomputation must draw the same masks.
        with ops.dropout_stream(keys):
            loss = self.loss(self.model, batch) / divisor
            self.times.lap("forward")
            (loss if scale is None else loss * scale.scale).backward()
        return loss.detach()

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Passes run op by op inside, whatever ``train.capture`` says: in a graph no hook of a module runs."""
        captured, self._captured = self._captured, None
        try:
            yield
        finally:
            self._captured = captured

    def _update(self, rate: float, loss: Tensor) -> dict[str, Any]:
        """Clip the gradients, update and clear them, unless a guard masks the update; what the metrics say of it."""
        clip, scale = self.config.optimizer.clip_norm, self._loss_scale
        if scale is not None:
            scale.unscale_(self.model.parameters())
        norm = self.execution.clip_grad_norm(self.model, clip, loss)
        assert self.execution.gradients is not None, "clip_grad_norm() leaves them behind"
        mask = self.guards.mask(self.execution.gradients)
        values: dict[str, Any] = {"lr": rate, "grad_norm": norm}
        if scale is None:
            masked_step(self.optimizer, mask)
        else:
            values["loss_scale"] = scale.scale.clone()  # that of this step: the update may change it
            scale.step(self.optimizer, norm, mask)
            values["skipped_updates"] = scale.skipped
        self.optimizer.zero_grad()
        if self.fp8 is not None:
            self.fp8.update(self.execution.largest)
        return values

    @property
    def position(self) -> int:
        """The position in the data: global batches taken or skipped before the next step."""
        return self.step + self.skipped_data

    def _few_lengths(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch if self._lengths is None else self._lengths.pad(batch)

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
                placed = self.execution.place(self._few_lengths(batch))
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
        if verdict is None and self._ready and (outcome := save_last_step(self, self._ballot, error)):
            log.warning("%s", outcome)
            self.progress.print(outcome)
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
        if world.restart:
            log.info(
                "started again by the launcher (restart %d): newest checkpoint, whatever --resume said", world.restart
            )
        self._agree_and_start()
        self._show_plan()
        self._assemble()
        self._fp8_guard = Fp8Guard(self.fp8) if self.fp8 is not None else None
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

    def _assemble(self) -> None:
        """Everything that a step works with: model, loss, optimizer, guards."""
        config = self.config
        self._build()
        self.optimizer = build_optimizer(self.model, config.optimizer, self.plan.load("adamw"))
        if config.precision.compute == "float16":
            self._loss_scale = LossScale(config.precision.loss_scale, self.execution.device)
        if config.train.capture:
            self._captured = self.execution.capture(self.model, self._passes)
        self.guards = Guards(
            config.guards,
            self.execution.device,
            scaled=self._loss_scale is not None,
            interval=config.metrics.interval,
        )

    def _agree_and_start(self) -> None:
        prepared, parallel = self.prepared, self.config.parallel
        target, world = prepared.target, prepared.world
        self.execution: Execution = target.backend.execution
        apply_environment(target.backend.collectives, world, self.config.backend.profile)
        deadline = time.monotonic() + parallel.agreement_timeout
        whole_store = connect(world, parallel.agreement_timeout)
        store, world = meet(whole_store, world, parallel.agreement_timeout)
        agreement.agree(store, world, self.plan.contract, max(deadline - time.monotonic(), 0.1))
        self._ballot = open_ballot(store, world)
        self._resources.callback(self._watch.close)
        self._watch.start(whole_store, world, target.backend.collectives.trace)
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
        self.loss: Loss = self._loss or NextTokenLoss(model, config.memory.chunked_loss)
        self._lengths = Lengths(config.train.seq_len) if self._loss is None and self.execution.compiles_shapes else None
        materialised = not any(p.is_meta for p in model.parameters())
        if materialised:
            check_equal(model, self.execution.control_group)
        freeze(model, config.optimizer)
        spec = sharding_spec(model, self.prepared.layout)
        initialise = initialiser(model, config.train.seed)
        precision = Precision(config.precision.arithmetic, config.precision.reduce, config.precision.params)
        self.parameters = sum(p.numel() for p in model.parameters())
        finish = recompute.finisher(self.prepared.recompute, self.execution.compile if config.train.compile else None)
        if config.memory.activations == "host":
            finish = self._waiting_on_host(finish)
        fp8, matmul = self.prepared.fp8, self.prepared.target.backend.matmul
        self.fp8 = convert(model, fp8.recipe, matmul, fp8.filtered.chosen) if fp8 is not None else None
        self.model = self.execution.realise(model, spec, precision, initialise, finish, **self._places())
        if self.fp8 is not None:
            self.fp8.start(self.execution.device, self.execution.largest)

    def _places(self) -> dict[str, Any]:
        """What :meth:`Execution.realise` is told of where parameters lie; nothing where they lie on the device."""
        if self.config.memory.parameters == "device":
            return {}
        return {"host": "pinned" if self.prepared.target.capabilities.pinned_host_memory else "pageable"}

    def _waiting_on_host(self, finish: Callable[..., None]) -> Callable[..., None]:
        backend, limit = self.prepared.target.backend, self.config.memory.host_limit
        self.host_pool = HostPool(backend.offload, limit)
        self._resources.callback(self.host_pool.clear)
        return activations.finisher(ActivationOffload(backend.offload, backend.device.type, self.host_pool), finish)

    def _open_checkpoints(self) -> None:
        prepared, config, world = self.prepared, self.config, self.prepared.world
        root = prepared.output / CHECKPOINTS
        group = self.execution.control_group
        materialise_state(self.optimizer)
        self.execution.end_step()  # else this work would be in the first step's graph
        resume = settle(prepared, group)
        self.prepared = prepared = replace(prepared, resume=resume)
        self.step = prepared.start_step
        self.skipped_data = _skipped_before(resume)
        self._passed_over = clear_the_way(root, resume, group)
        self._warnings = tell(self._passed_over, resume)
        if resume is not None:
            self._amax_note = self.restore(resume.path, resume.manifest)
            if self._amax_note:
                log.info("%s", self._amax_note)
            log.info("resumed from %s at step %d", resume.path, self.step)
        self.checkpointer = Checkpointer(
            root,
            group=group,
            rank=world.rank,
            retention=Retention.of(config.checkpoint),
            asynchronous=config.checkpoint.asynchronous,
            pinned=bool(prepared.target.capabilities.pinned_host_memory),
        )
        self.optimizer.register_step_pre_hook(self._note_update)
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
        # Asked before the metrics are opened: they remove the lines of steps that are lost.
        restart = restart_of(prepared.output, self.step, world.restart) if world.rank == 0 else None
        self.metrics = Metrics(prepared.output, config.metrics, facts, rank=world.rank, start_step=self.step)
        self._resources.callback(self.metrics.close)
        self.progress = make_progress(config.train.steps, self.step, rank=world.rank)
        self._resources.callback(self.progress.close)
        for line, entry in zip(self._warnings, self._passed_over, strict=True):
            self.metrics.event(PASSED_OVER_EVENT, step=self.step, **entry)
            self.progress.print(line)
        self._profiler = StepProfiler(self, config.metrics.profiled_steps)
        self._resources.callback(self._profiler.close)
        if prepared.resume is not None:
            self.progress.print(f"resumed from {prepared.resume.path} at step {self.step}")
            if self._amax_note:
                self.progress.print(self._amax_note)
        if restart is not None:
            log.info("%s", restart)
            self.metrics.event(RESTART_EVENT, **asdict(restart))

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

    def _read_metrics(self) -> tuple[dict[str, Any], Spike | None]:
        """Read the pending values. Returns the newest line, and the loss spike because of which to go back to a
        checkpoint, if there is one."""
        lines = self.metrics.flush(self.execution.read_sums)
        self.progress.update(lines[-1])
        if self._fp8_guard is not None:
            self._fp8_guard.look(self)
        spike = self.guards.look(self, lines)
        if (use := self.memory_use.grown(self)) is not None:
            self.metrics.event("memory", step=self.step, **use)
        return lines[-1], spike

    def _agree_on(self, requests: Requests) -> Asked:
        """What any rank is asked to do. A background save that has failed is raised here, on all ranks."""
        flags = (requests.terminated, requests.out_of_time(), requests.save, self.checkpointer.failed)
        terminated, late, save, failed = self.execution.any_of(flags)
        if failed:
            self.checkpointer.wait()
        if save:
            requests.save = False
        return Asked("SIGTERM" if terminated else "time limit" if late else "", save)

    def _name_slow_ranks(self) -> None:
        for slow in self._watch.interval_done():
            self.metrics.event("slow_rank", **slow)
            self.progress.print(
                f"slow rank at step {slow['step']}: rank {slow['rank']} takes {slow['seconds']} s for its part of a "
                f"step, {slow['ratio']} times the median"
            )

    def _evaluate_if_due(self, asked: Asked) -> float | None:
        if asked.stop or not self._evaluation_due():
            return None
        loss = self.evaluate()
        assert loss is not None, "due only where there is validation data"
        self.metrics.event("evaluation", step=self.step, loss=loss)
        self.progress.print(f"evaluation at step {self.step}: loss {loss:.4f}")
        return loss

    def _save_if_due(self, asked: Asked, line: Mapping[str, Any], validation_loss: float | None) -> None:
        reason = asked.stop or ("SIGUSR1" if asked.save else "")
        if reason or self._checkpoint_due():
            self.save(reason, loss=line.get("loss"), validation_loss=validation_loss)
        if reason:
            self.progress.print(f"{reason}: checkpoint at step {self.step}{', stopping' if asked.stop else ''}")

    def save(self, reason: str = "", **metrics: float | None) -> None:
        """Save this step; all ranks call it. ``reason`` is why, where it is not the interval; ``metrics`` are of this
        step, and of them those that are known and finite are kept with it."""
        prepared, config = self.prepared, self.config
        manifest = Manifest(
            step=self.step,
            world_size=prepared.world.size,
            model=config.model.model_dump() if config.model else None,
            layout=prepared.layout.as_dict(),
            plan=dict(self.plan.contract),
            metrics={name: float(v) for name, v in metrics.items() if v is not None and math.isfinite(v)},
            data_position=self.position,
        )
        began = time.perf_counter()
        self.checkpointer.save(self._state(), manifest)
        stall = time.perf_counter() - began
        self.times.add("checkpoint", stall)
        why = {"reason": reason} if reason else {}
        self.metrics.event("checkpoint", step=self.step, stall=round(stall, 4), **why)

    @property
    def saved_step(self) -> int:
        """The newest step of which there is a checkpoint, or one on its way; the start of a fresh run counts."""
        return self.prepared.start_step if self.checkpointer.last_step is None else self.checkpointer.last_step

    def _note_update(self, *_: object) -> None:
        self.updating = True

    def _state(self) -> dict[str, Any]:
        """Model, optimizer, loss scale and this rank's generators, all as tensors; step and data position are in the
        manifest."""
        state = self.execution.state(self.model, self.optimizer)
        if self._loss_scale is not None:
            state |= self._loss_scale.state()  # live tensors: loading fills them in place
        if self.fp8 is not None:
            state |= self.fp8.state()
        rank = self.prepared.world.rank
        for name, value in self.prepared.target.backend.device.rng_state().items():
            state[f"rng.{rank}.{name}"] = value
        return state

    def restore(self, path: Path, manifest: Manifest) -> str:
        """Put a checkpoint, which may be of another layout or precision, into everything that trains; all ranks call
        it. Returns what is to be said of its amax histories."""
        world = self.prepared.world
        amax = carried(self.prepared.fp8, manifest)
        left_out = absent_entries(manifest, world.size, self.plan.backend, amax.histories)
        state = {name: t for name, t in self._state().items() if not name.startswith(left_out)}
        load(path, state, self.execution.control_group)
        self.execution.load_state(self.model, self.optimizer, state)
        prefix = f"rng.{world.rank}."
        rng = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
        if rng:
            self.prepared.target.backend.device.set_rng_state(rng)
        if self.fp8 is not None:
            self.fp8.restored(self.execution.largest, histories=amax.histories, converted=amax.converted)
        return amax.note


def _skipped_before(resume: Resume | None) -> int:
    return skipped_data(resume.manifest) if resume is not None else 0
