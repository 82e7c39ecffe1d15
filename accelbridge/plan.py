"""The execution plan: which implementation every op gets, and why each other candidate was rejected.

Resolved once from (backend, chip, recipe, model); printed before step 0, stored with every checkpoint, and agreed
on by all ranks (``accelbridge.agreement``) before the first collective.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from accelbridge import __version__
from accelbridge.backend import (
    API_VERSION,
    FULL,
    Backend,
    Capabilities,
    Implementation,
    Lowering,
    Request,
    Support,
    unsupported,
)
from accelbridge.errors import ConfigError, Unsupported, did_you_mean
from accelbridge.plugins import Candidate, Selection


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not chosen, and why."""

    implementation: str
    reason: str


@dataclass(frozen=True)
class OpChoice:
    """One row of the plan."""

    op: str
    implementation: str
    dtypes: Mapping[str, str]
    support: str
    evidence: str
    rejected: tuple[Rejected, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class ExecutionPlan:
    """The resolved plan. ``contract`` must be equal on all ranks; ``facts`` are reported and may differ."""

    backend: str
    selected_by: str
    ops: tuple[OpChoice, ...]
    lowerings: tuple[Lowering, ...]
    contract: Mapping[str, Any]
    facts: Mapping[str, Any]
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    loaders: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict, compare=False, repr=False)
    """How to import the chosen vendor implementations; ops that run the portable reference are absent."""

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the contract's canonical JSON."""
        text = json.dumps(self.contract, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def bind(self) -> None:
        """Make ``accelbridge.ops`` call what the plan chose."""
        from accelbridge import ops

        ops.reset()
        ops.bind({op: load() for op, load in self.loaders.items() if op in ops.NAMES})

    def load(self, op: str) -> Callable[..., Any] | None:
        """The implementation of an op that the trainer calls itself ("adamw"); None: the portable reference."""
        loader = self.loaders.get(op)
        return loader() if loader else None

    def as_dict(self) -> dict[str, Any]:
        """What ``accelbridge explain --json`` prints and ``OUTPUT/plan.json`` holds."""
        return {
            "backend": self.backend,
            "selected_by": self.selected_by,
            "digest": self.digest,
            "contract": dict(self.contract),
            "facts": dict(self.facts),
            "ops": [asdict(choice) for choice in self.ops],
            "lowerings": [asdict(lowering) for lowering in self.lowerings],
            "candidates": [
                {"name": c.name, "available": c.available, "reason": c.probe.reason} for c in self.candidates
            ],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class PlanInputs:
    """What a run brings to its plan, besides the backend."""

    requests: Sequence[Request]
    layout: Mapping[str, Any]
    wire: Sequence[tuple[str, str, str]]
    """Collectives of the layout: (op, dtype, reduce op or "")."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Flattened settings that every rank must share."""
    data: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    chosen_ops: Mapping[str, str] = field(default_factory=dict)
    fallback: bool = False
    deterministic: bool = False
    """Whether only candidates will do whose results are the same bits every time."""
    notes: Sequence[str] = ()


def resolve(selection: Selection, backend: Backend, capabilities: Capabilities, inputs: PlanInputs) -> ExecutionPlan:
    """Resolve the plan. Raises ConfigError or Unsupported where an explicit choice cannot be honoured."""
    table = _by_op(backend.implementations())
    _known_choices(inputs, table)
    notes = list(inputs.notes)
    ops: list[OpChoice] = []
    loaders: dict[str, Callable[[], Callable[..., Any]]] = {}
    for request in inputs.requests:
        chosen, choice = _choose(request, table.get(request.op, []), capabilities, inputs, notes)
        ops.append(choice)
        if chosen is not None:
            loaders[request.op] = chosen.load
            if not chosen.deterministic:
                notes.append(f"{request.op} ({chosen.name}) is not deterministic")
    wire = [_wire(op, dtype, variant, backend, capabilities) for op, dtype, variant in inputs.wire]
    probe = selection.probe
    lowerings = tuple(backend.collectives.lowerings()) if inputs.wire else ()
    contract = {
        "accelbridge": __version__,
        "interface": ".".join(map(str, API_VERSION)),
        "backend": backend.name,
        "plugin": f"{selection.candidate.distribution} {selection.candidate.version}",
        "chip": capabilities.chip.name,
        "software": dict(probe.software),
        "execution": backend.execution.model,
        "world_size": inputs.world_size,
        "layout": dict(inputs.layout),
        "ops": {choice.op: choice.implementation for choice in ops},
        "wire": {op: ", ".join(c.dtypes["wire"] for c in wire if c.op == op) for op in {c.op: None for c in wire}},
        "lowerings": [lowering.name for lowering in lowerings],
        "data": dict(inputs.data),
        "recipe": dict(inputs.recipe),
    }
    return ExecutionPlan(
        backend=backend.name,
        selected_by=selection.selected_by,
        ops=(*ops, *wire),
        lowerings=lowerings,
        contract=contract,
        facts=dict(probe.facts),
        candidates=selection.candidates,
        notes=tuple(notes),
        loaders=loaders,
    )


def _by_op(implementations: Sequence[Implementation]) -> dict[str, list[Implementation]]:
    table: dict[str, list[Implementation]] = {}
    for implementation in implementations:
        table.setdefault(implementation.op, []).append(implementation)
    return table


def _known_choices(inputs: PlanInputs, table: Mapping[str, Sequence[Implementation]]) -> None:
    """An explicit choice of an op or implementation that does not exist is an error, not a no-op."""
    known = {request.op: [i.name for i in table.get(request.op, [])] + ["reference"] for request in inputs.requests}
    for op, name in inputs.chosen_ops.items():
        if op not in known:
            raise ConfigError(
                f'backend.ops names "{op}"; this run has no such op{did_you_mean(op, list(known))}; '
                f"known: {', '.join(known)}"
            )
        if name not in known[op]:
            raise ConfigError(
                f'backend.ops.{op} "{name}" asked; candidates are {", ".join(known[op])}; choose one of them'
            )


def _choose(
    request: Request,
    candidates: Sequence[Implementation],
    capabilities: Capabilities,
    inputs: PlanInputs,
    notes: list[str],
) -> tuple[Implementation | None, OpChoice]:
    """The first candidate that serves the request, the explicit one before all; None is the portable reference."""
    wrong = capabilities.wrong_reference(request.op, request.dtype)
    right = FULL if not wrong else unsupported(f"it is wrong here: {wrong}")
    portable = Implementation(request.op, "reference", lambda _: right, lambda: _never_loaded)
    order = [*candidates, portable]
    explicit = inputs.chosen_ops.get(request.op)
    if explicit is not None:
        order.sort(key=lambda c: c.name != explicit)  # stable: the rest keeps its order
    rejected: list[Rejected] = []
    for candidate in order:
        support = _support(candidate, request, capabilities, inputs.deterministic)
        if support:
            why = "was asked for" if candidate.name == explicit else "comes first and serves this run"
            for later in order[order.index(candidate) + 1 :]:
                own = _support(later, request, capabilities, inputs.deterministic)
                rejected.append(Rejected(later.name, f"{candidate.name} {why}" if own else own.reason))
            choice = OpChoice(
                request.op,
                candidate.name,
                {"compute": request.dtype},
                support.level,
                candidate.evidence,
                tuple(rejected),
                support.reason,
            )
            return (None if candidate is portable else candidate), choice
        rejected.append(Rejected(candidate.name, support.reason))
        if explicit is not None and candidate.name == explicit:
            _refuse_or_note(request, explicit, support, inputs.fallback, notes)
    reasons = "; ".join(f"{r.implementation}: {r.reason}" for r in rejected)
    raise Unsupported(f"{request.op} in {request.dtype} asked; no candidate serves it ({reasons}); change the recipe")


def _never_loaded(*_: Any) -> Any:
    raise AssertionError("the portable reference is what ops call when nothing is bound")


def _support(candidate: Implementation, request: Request, capabilities: Capabilities, deterministic: bool) -> Support:
    """A candidate serves where the chip's table and its own predicate both say so."""
    on_chip = capabilities.support(request.op, request.dtype, request.variant, request.shape)
    found = candidate.supports(request) if on_chip else on_chip
    if found and deterministic and not candidate.deterministic:
        return unsupported("it is not deterministic, and train.deterministic is true")
    return found


def _refuse_or_note(request: Request, name: str, support: Support, fallback: bool, notes: list[str]) -> None:
    if not fallback:
        raise Unsupported(
            f"backend.ops.{request.op} {name} asked; it cannot serve this run: {support.reason}; choose another, "
            "or set backend.on_unsupported: fallback"
        )
    notes.append(f"FALLBACK: {request.op} asked for {name}, which cannot serve this run: {support.reason}")


def _wire(op: str, dtype: str, variant: str, backend: Backend, capabilities: Capabilities) -> OpChoice:
    """A collective's row: the vendor's library, the dtype on the wire, and the lowering it takes."""
    support = capabilities.support(op, dtype, variant)
    if not support:
        raise Unsupported(
            f"{op} {variant} over {dtype} is needed by this layout; {support.reason}; change precision.reduce"
        )
    note = f"through lowering {support.lowering}" if support.lowering else ""
    return OpChoice(
        op,
        backend.collectives.library,
        {"wire": f"{dtype} {variant}".strip()},
        support.level,
        "claimed",
        (),
        note,
    )
