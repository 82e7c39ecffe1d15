"""From a checked recipe to its execution plan: what the run asks of every op, what travels on the wire, what is
recomputed, and what every rank has to share. Imports torch only where a budget must be measured."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from accelbridge.agreement import flatten
from accelbridge.backend import Capabilities, Request, World
from accelbridge.data.store import TokenStore
from accelbridge.errors import ConfigError
from accelbridge.memory import choice
from accelbridge.memory.choice import Recompute
from accelbridge.memory.config import Selective
from accelbridge.models.requests import decoder_requests, loss_request
from accelbridge.models.shapes import decoder_shapes
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import ShardingSpec
from accelbridge.plan import ExecutionPlan, PlanInputs, resolve
from accelbridge.precision.filters import Shapes
from accelbridge.train.config import LossScaleChoice, LossScaleConfig, TrainConfig
from accelbridge.train.fp8_plan import Fp8Run, plan_fp8
from accelbridge.train.groups import group_notes, rules
from accelbridge.train.network import resolve_network, with_network

if TYPE_CHECKING:
    from accelbridge.train.prepare import Target
    from accelbridge.train.resume import Resume

PER_PROCESS = ("output", "metrics")
"""Sections in which ranks may differ; everything else of a recipe is part of the contract."""


@dataclass(frozen=True)
class Provided:
    """What a script brings itself instead of naming it in the recipe."""

    model: bool = False
    data: Mapping[str, str] = field(default_factory=dict)
    """"train" and "validation" as far as the script brings them, each described for the other ranks to compare."""
    loss: bool = False
    dropout: bool = False
    """Whether the model holds a dropout of ours."""
    random: Sequence[str] = ()
    """Classes of its modules that draw from torch's generators."""
    vocab_head: bool = True
    """Whether the model leaves logits split along the vocabulary where tp is above 1."""
    notes: Sequence[str] = ()
    parameters: Mapping[str, Sequence[int]] | None = None
    """Full name and shape of the parameters of its own model."""
    linears: Shapes = field(default_factory=dict)
    """Full name and (out, in) of its linear layers."""
    units: int = 0
    """Shard units of the script's own model."""
    spec: ShardingSpec = field(default_factory=ShardingSpec)
    """How the script's own model may be split."""


def plan_run(
    config: TrainConfig,
    world: World,
    target: Target,
    layout: Layout,
    microbatch: int,
    stores: Mapping[str, TokenStore | None],
    resume: Resume | None,
    provided: Provided,
) -> tuple[ExecutionPlan, Recompute, Fp8Run | None]:
    """The plan of a run, what it recomputes, and what it does in fp8. Raises what :func:`accelbridge.plan.resolve` and
    :func:`accelbridge.train.fp8_plan.plan_fp8` raise, and ConfigError for a recomputation that cannot be had."""
    recompute = _listed_recompute(config, provided)  # before a plan is made: it may name an op that isn't there
    # The environment of an assumed host is not known; that of this one says nothing of it.
    environment = None if target.devices is None else {}
    backend = target.backend
    network = resolve_network(config.backend.profile, backend.name, backend.collectives, environment)
    fp8 = plan_fp8(config, target, layout, microbatch * config.train.seq_len, provided)
    if fp8 is not None and config.memory.chunked_loss and config.model and "head" in fp8.filtered.chosen:
        raise ConfigError(
            'memory.chunked_loss asked with an output projection in fp8, of which it can make no part; add "head" to '
            "precision.fp8.exclude, or leave chunked_loss out"
        )
    plan = _with_fp8(_resolve(config, world, target, layout, stores, resume, provided), fp8)
    plan = with_network(plan, network)
    recompute = recompute or _within_budget(config, layout, microbatch, plan)
    pinned = bool(target.capabilities.pinned_host_memory)
    return _with_units(plan, recompute, config, pinned), recompute, fp8


def _with_fp8(plan: ExecutionPlan, fp8: Fp8Run | None) -> ExecutionPlan:
    if fp8 is None:
        return plan
    contract = {**plan.contract, "fp8": fp8.contract}
    return replace(plan, ops=(*plan.ops, *fp8.rows), notes=(*plan.notes, *fp8.notes), contract=contract)


def _listed_recompute(config: TrainConfig, provided: Provided) -> Recompute | None:
    """The recomputation that the recipe names; None where it gives a budget to choose by."""
    setting = config.memory.recompute
    if provided.model:
        asked = ["memory.recompute"] * (setting != "none") + ["train.compile"] * config.train.compile
        asked += ["memory.activations host"] * (config.memory.activations == "host")
        if asked and not provided.units:
            raise choice.needs_units(asked[0])
        from accelbridge.ops import NAMES  # who brings a module has torch loaded

        return choice.listed_for_any(setting, NAMES)
    if isinstance(setting, Selective) and setting.budget is not None:
        return None
    return choice.listed(setting, _decoder_requests(config))


def _within_budget(config: TrainConfig, layout: Layout, microbatch: int, plan: ExecutionPlan) -> Recompute:
    """The cheapest recomputation within ``memory.recompute.budget``. Loads torch, but opens no device."""
    from accelbridge.memory.budget import choose, measure

    setting = config.memory.recompute
    assert config.model is not None
    assert isinstance(setting, Selective)
    assert setting.budget is not None
    shape = (microbatch, config.train.seq_len)
    activations = measure(
        config.model, layout, shape, config.precision.arithmetic, plan.loaders,
        segments=config.data.document_mask, chunked_loss=config.memory.chunked_loss,
    )  # fmt: skip
    return choose(activations, config.model.layers, setting.budget)


def _with_units(plan: ExecutionPlan, recompute: Recompute, config: TrainConfig, pinned: bool) -> ExecutionPlan:
    """The plan, which also says what is done to shard units and to the passes as a whole."""
    notes = [recompute.note] if recompute.note else []
    notes += [_WAITING.format(where="pinned" if pinned else "pageable")] if config.memory.activations == "host" else []
    notes += [_ON_HOST] if config.memory.parameters == "host" else []
    notes += ["compile: each shard unit is one graph of torch.compile"] if config.train.compile else []
    notes += [_CAPTURED] if config.train.capture else []
    places = {what: getattr(config.memory, what) for what in ("activations", "optimizer", "parameters")}
    contract = {**plan.contract, "recompute": recompute.as_dict(), "memory": places}
    return replace(plan, notes=(*plan.notes, *notes), contract=contract)


_WAITING = (
    "activations: what a shard unit saves waits in {where} host memory; that of two units is on the device at a time"
)
_ON_HOST = "parameters, gradients and moments lie on the host; updates are computed there, units gathered from there"
_CAPTURED = (
    "capture: the passes of a microbatch are one graph of the device: the first microbatch of the run is run as "
    "always, the second is recorded, and from then on none of the model's Python runs in a step"
)


def _decoder_requests(config: TrainConfig) -> list[Request]:
    assert config.model is not None, "prepare() checked it"
    dtype, train = config.precision.arithmetic, config.train
    return decoder_requests(config.model, dtype, train.seq_len, config.data.document_mask, train.compile)


def _resolve(
    config: TrainConfig,
    world: World,
    target: Target,
    layout: Layout,
    stores: Mapping[str, TokenStore | None],
    resume: Resume | None,
    provided: Provided,
) -> ExecutionPlan:
    dtype = config.precision.arithmetic
    model = [] if config.model is None else _decoder_requests(config)
    own = _own_requests(provided, dtype, target.capabilities)
    # Only modules that see local shapes meet a part of the vocabulary.
    split = layout.tp > 1 and provided.vocab_head and target.backend.execution.model == "eager"
    loss = [] if provided.loss else [loss_request(dtype, split, config.memory.chunked_loss)]
    shapes = provided.parameters if config.model is None else decoder_shapes(config.model)
    notes = [*([target.note] if target.note else []), *provided.notes]
    if shapes is not None:
        rules(shapes, config.optimizer)
        notes += group_notes(shapes, config.optimizer)
    data = dict(provided.data)
    data |= {name: store.fingerprint for name, store in stores.items() if store}
    inputs = PlanInputs(
        requests=[*model, *own, *loss, _update(config)],
        layout=layout.as_dict(),
        wire=_wire(config, layout, split, provided.loss and provided.vocab_head, target.backend.execution.gathers_in),
        recipe=_shared_settings(config) | {"resume": resume.manifest.step if resume else None},
        data=data,
        world_size=world.size,
        chosen_ops=config.backend.ops,
        fallback=config.backend.on_unsupported == "fallback",
        deterministic=config.train.deterministic,
        notes=notes,
    )
    plan = resolve(target.selection, target.backend, target.capabilities, inputs)
    if "adamw" not in plan.loaders:
        plan = replace(plan, notes=(*plan.notes, _HOST_WAITS))
    if config.precision.compute == "float16":
        plan = replace(plan, notes=(*plan.notes, *_loss_scale_notes(config.precision.loss_scale)))
    if target.devices is not None:  # an assumed host has no process
        return plan
    return replace(plan, facts={**plan.facts, "pid": os.getpid()})


def _own_requests(provided: Provided, dtype: str, capabilities: Capabilities) -> list[Request]:
    """Ops of a script's own model: those that it is known to call, and those that it may call and whose reference, to
    which they would be bound, is wrong here."""
    known = {"dropout"} if provided.dropout else set()
    named = {key.split()[0] for key in capabilities.wrong_references} if provided.model else set()
    return [
        Request(op, dtype) for op in sorted(known | {op for op in named if capabilities.wrong_reference(op, dtype)})
    ]


_HOST_WAITS = (
    "adamw (reference) cannot mask an update on the device: the host waits once a step to see an overflow or a value "
    "that is not finite"
)


def _loss_scale_notes(scale: LossScaleChoice) -> list[str]:
    """What float16 adds to a step."""
    skipped = "updates whose gradients overflow are skipped on all ranks"
    if isinstance(scale, float | int):
        notes = [f"loss scale: {scale:g} throughout; {skipped}"]
    else:
        tuned = scale if isinstance(scale, LossScaleConfig) else LossScaleConfig()
        notes = [
            f"loss scale: from {tuned.initial:g}, x {tuned.growth:g} after {tuned.growth_interval} updates without "
            f"overflow, x {tuned.backoff:g} after one; {skipped}"
        ]
    return notes


def _update(config: TrainConfig) -> Request:
    """The optimizer's request; with float16 an implementation has to mask updates that overflow."""
    needs = frozenset({"found_inf"} if config.precision.compute == "float16" else ())
    return Request("adamw", config.precision.params, needs=needs)


def _wire(
    config: TrainConfig, layout: Layout, split: bool, gathers: bool, gathers_in: str
) -> list[tuple[str, str, str]]:
    """Collectives that the layout issues, with what travels on the wire. ``split``: the loss is that of a split
    vocabulary; ``gathers``: it is the script's own, for which logits are gathered; ``gathers_in``: see
    :attr:`accelbridge.backend.Execution.gathers_in`."""
    compute, reduce = config.precision.arithmetic, config.precision.reduce
    wire: dict[tuple[str, str, str], None] = {}
    if layout.dp_shard > 1:
        gathered = compute if gathers_in == "compute" else config.precision.params
        wire["all_gather", gathered, ""] = None
        wire["reduce_scatter", reduce, "sum"] = None
    if layout.dp_replicate > 1:
        wire["all_reduce", reduce, "sum"] = None
    if layout.tp > 1:
        wire["all_reduce", compute, "sum"] = None
    if split and not gathers:
        wire["all_reduce", "float32", "max"] = None
    if layout.tp > 1 and gathers:
        wire["all_gather", compute, ""] = None
    if layout.sequence_parallel:
        wire["all_gather", compute, ""] = None
        wire["reduce_scatter", compute, "sum"] = None
    if layout.size > 1:
        wire["all_reduce", "float32", "sum"] = None  # loss, count and norm
    if layout.size > 1 and config.precision.compute == "fp8":
        wire["all_reduce", "float32", "max"] = None  # largest magnitudes, and what counters found
    if config.precision.fp8 is not None and config.precision.fp8.gather:
        wire["all_gather", "uint8", ""] = None
    return list(wire)


def _shared_settings(config: TrainConfig) -> dict[str, Any]:
    tree = {name: value for name, value in config.model_dump().items() if name not in PER_PROCESS}
    # Paths may differ by host; the contract carries the content's fingerprint.
    tree["data"] = {name: tree["data"][name] for name in ("shuffle", "document_mask")}
    return flatten({name: value for name, value in tree.items() if value is not None})
