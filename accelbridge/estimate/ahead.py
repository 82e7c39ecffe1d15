"""A step compiled for an absent machine: whole, or from few layers where the whole takes too long.

Layers are equal, so what each adds is the difference of two compilations; figures of more layers follow from it and are
labelled "derived". Nothing is derived from a step that does not fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from accelbridge.backend import Compiled, CompileTimeout, Traffic
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.estimate.step import OneStep
from accelbridge.train.prepare import Prepared

EVIDENCE = "compiled for, not run"
FEW = (1, 2)
"""Layers of the two programs from which figures per layer are taken."""

_SCHEDULE = "temporaries of many layers can be half as much again, as the compiler orders more of them otherwise"
"""Measured on Llama 3 8B for 64 chips (docs/evidence/tpu): 12.7 GiB derived, 18.6 GiB compiled."""
_CLOSE = "it fits by less than that: only --layers whole can tell"

Compile = Callable[[int, float], Compiled]
"""A number of layers and a limit in seconds -> what the compiler says; raises CompileTimeout."""


@dataclass(frozen=True)
class Ahead:
    """The answer: ``compiled`` is of ``layers`` layers, and ``derived`` says how, where no compiler saw them all."""

    compiled: Compiled
    layers: int
    derived: str = ""
    parts: Mapping[int, Compiled] | None = None
    """What was compiled, by layers, where figures are derived."""


def compile_step(prepared: Prepared, target: str, seconds: float, mode: str) -> Ahead:
    """Compile the step of a prepared run. ``mode`` is "whole", "few", or "auto": whole within half of ``seconds``, and
    few layers in what is left where that is not enough. Raises Unsupported with the backend's reason."""
    config = prepared.config
    if config.model is None:
        raise ConfigError(f"model is missing from {config.places.source}; a step needs one; add the section")
    recipe = config.model_dump(mode="json", exclude_unset=True)

    def compiled(layers: int, limit: float) -> Compiled:
        found = prepared.target.backend.execution.compile_ahead(target, OneStep(recipe, target, layers), limit)
        if isinstance(found, Compiled):
            return found
        raise Unsupported(f"compiling for {target} asked; {found.reason}")

    return search(compiled, config.model.layers, seconds, mode)


def search(compiled: Compile, layers: int, seconds: float, mode: str) -> Ahead:
    """See :func:`compile_step`."""
    until = time.monotonic() + seconds
    if mode == "whole" or layers <= max(FEW):
        try:
            return Ahead(compiled(layers, seconds), layers)
        except CompileTimeout as error:
            raise Unsupported(f"{error}; {_more(layers)}") from error
    tried = ""
    if mode == "auto":
        try:
            return Ahead(compiled(layers, seconds / 2), layers)
        except CompileTimeout:
            tried = f"all {layers} layers did not compile within {seconds / 2:.0f} s; "
    parts: dict[int, Compiled] = {}
    for few in FEW:
        try:
            parts[few] = compiled(few, max(until - time.monotonic(), 1.0))
        except CompileTimeout as error:
            largest = f"the largest that compiled has {max(parts)} layer" if parts else "none compiled"
            raise Unsupported(f"{tried}{few} of {layers} layers: {error}; {largest}; {_more(layers)}") from error
        if not parts[few].fits:
            return Ahead(parts[few], few, f"{tried}{few} of {layers} layers; even these do not fit", parts)
    why = f"{tried}derived from {' and '.join(map(str, FEW))} of {layers} layers, which differ by one; {_SCHEDULE}"
    return Ahead(extrapolate(parts[FEW[0]], parts[FEW[1]], layers), layers, why, parts)


def _more(layers: int) -> str:
    return f"allow more with --seconds{', or take --layers few' * (layers > max(FEW))}"


def extrapolate(one: Compiled, two: Compiled, layers: int) -> Compiled:
    """Figures of ``layers`` layers on the line through those of one and two."""

    def line(first: float, second: float) -> float:
        return first + (second - first) * (layers - FEW[0]) / (FEW[1] - FEW[0])

    kinds = [kind for kind in dict.fromkeys([*one.memory, *two.memory]) if kind != "total"]
    memory = {kind: max(0, round(line(one.memory.get(kind, 0), two.memory.get(kind, 0)))) for kind in kinds}
    memory["total"] = sum(memory.values())
    first, second = ({each.op: each for each in found.collectives} for found in (one, two))
    collectives: list[Traffic] = []
    for op in dict.fromkeys([*first, *second]):
        a, b = (found.get(op, Traffic(op, 0, 0)) for found in (first, second))
        collectives.append(Traffic(op, max(0, round(line(a.count, b.count))), max(0, round(line(a.bytes, b.bytes)))))
    most = memory["total"] + memory.get("temporaries", 0) // 2
    fits = two.capacity is None or memory["total"] <= two.capacity
    close = [_CLOSE] if fits and two.capacity is not None and most > two.capacity else []
    flops = None if one.flops is None or two.flops is None else line(one.flops, two.flops)
    seconds = {phase: round(one.seconds[phase] + two.seconds.get(phase, 0.0), 1) for phase in one.seconds}
    return replace(
        two,
        fits=fits,
        memory=memory,
        flops=flops,
        collectives=tuple(collectives),
        seconds=seconds,
        host_bytes=max((found.host_bytes for found in (one, two) if found.host_bytes is not None), default=None),
        notes=(*(f"of 1 layer: {note}" for note in one.notes), *(f"of 2 layers: {note}" for note in two.notes), *close),
    )
