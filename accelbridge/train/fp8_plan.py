"""What ``precision.compute: fp8`` adds to a run's plan: its products, what fills them in, and which layers take part.
Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelbridge.backend import Implementation, Request, Support
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.models.shapes import decoder_linears
from accelbridge.parallel.layout import Layout
from accelbridge.plan import OpChoice, Rejected
from accelbridge.precision.config import Fp8Config
from accelbridge.precision.filters import Filtered, Shapes, choose
from accelbridge.precision.recipe import Fp8Recipe, check_sizes, resolve

if TYPE_CHECKING:
    from accelbridge.train.config import TrainConfig
    from accelbridge.train.prepare import Target
    from accelbridge.train.run_plan import Provided


@dataclass(frozen=True)
class Fp8Run:
    """fp8 in one run, resolved."""

    recipe: Fp8Recipe
    filtered: Filtered
    rows: tuple[OpChoice, ...]
    notes: tuple[str, ...]

    @property
    def contract(self) -> dict[str, Any]:
        """What all ranks must share, and what a checkpoint keeps to say what its amax histories mean."""
        recipe = self.recipe
        return {
            "scaling": recipe.config.scaling,
            "forward": recipe.forward,
            "backward": recipe.backward,
            "scales": [recipe.moving, recipe.weight],
            "history": recipe.config.history if recipe.delayed else 0,
            "layers": list(self.filtered.chosen),
        }


def plan_fp8(config: TrainConfig, target: Target, layout: Layout, tokens: int, provided: Provided) -> Fp8Run | None:
    """fp8 as this chip does it; None where the recipe does not ask for it. ``tokens``: of a microbatch.

    Raises Unsupported where the chip has no such products, or only an emulation and no leave to use it; ConfigError
    for filters that leave nothing, and sizes that would have to be padded.
    """
    if config.precision.compute != "fp8":
        return None
    backend, capabilities = target.backend.name, target.capabilities
    recipe = resolve(config.precision.fp8 or Fp8Config(), capabilities, backend)
    emulated = recipe.support.level == "emulated"
    if emulated and config.backend.on_unsupported != "fallback":
        raise Unsupported(
            f'precision "fp8" asked; backend "{backend}" on {capabilities.chip.name} has no fp8 matmul, only an '
            f'emulation, for scaling "{recipe.config.scaling}": {recipe.support.reason}; set backend.on_unsupported: '
            "fallback to run that, another precision.fp8.scaling where the chip has one, or precision.compute: bfloat16"
        )
    linears = decoder_linears(config.model) if config.model is not None else provided.linears
    if not linears:
        raise ConfigError(
            'precision "fp8" asked; the model has no module that is a torch.nn.Linear; set precision.compute: bfloat16'
        )
    if recipe.config.gather:
        _check_gather(config, target, layout)
    filtered = choose(linears, recipe.config)
    check_sizes(recipe, _local(linears, filtered, layout), tokens)
    notes = [filtered.note]
    if emulated:
        notes.append(f"FALLBACK: fp8 asked; every product of it is emulated: {recipe.support.reason}")
    if recipe.multiple > 1:
        notes.append(f"fp8: sizes of products are padded with zeros to multiples of {recipe.multiple}")
    if recipe.config.gather:
        notes.append(f"fp8: weights are gathered as {recipe.forward}, one byte an element")
    return Fp8Run(recipe, filtered, tuple(_rows(recipe, target)), tuple(notes))


def _check_gather(config: TrainConfig, target: Target, layout: Layout) -> None:
    """Raise where weights could not travel as codes, or do not travel at all."""
    if target.backend.execution.model != "eager":
        raise Unsupported(
            f'precision.fp8.gather asked; backend "{target.backend.name}" shards by annotation, where the compiler '
            "gathers; set gather: false"
        )
    if layout.dp_shard == 1:
        raise ConfigError(
            "precision.fp8.gather asked; parallel.dp_shard is 1, so no weight is gathered; set gather: false"
        )
    if config.train.compile:
        raise Unsupported(
            "precision.fp8.gather asked; train.compile is true, and torch.compile traces no weights that are codes; "
            "set gather: false, or train.compile: false"
        )


def _local(linears: Shapes, filtered: Filtered, layout: Layout) -> dict[str, tuple[int, int]]:
    """Sizes on one device. A layer is split along either dimension over tp, so both are asked for."""
    return {name: (linears[name][0] // layout.tp or 1, linears[name][1] // layout.tp or 1) for name in filtered.chosen}


def _rows(recipe: Fp8Recipe, target: Target) -> list[OpChoice]:
    products = [
        _row(f"fp8_linear, {product}", Request("scaled_mm", formats, variant=scalings), recipe.delayed, target)
        for product, formats, scalings in recipe.products
    ]
    return [*products, *_quantizing(recipe, target)]


def _quantizing(recipe: Fp8Recipe, target: Target) -> list[OpChoice]:
    """Who makes the operands; nothing where there is but the portable implementation."""
    request = Request("quantize", recipe.forward, variant=recipe.moving)
    objections = {each.name: each.supports(request) for each in _candidates(request.op, target)}
    if not objections:
        return []
    chosen = next((name for name, support in objections.items() if support), _PORTABLE)
    first = f"{chosen} comes first and serves this run"
    rejected = [
        Rejected(name, first if found else found.reason) for name, found in objections.items() if name != chosen
    ]
    rejected += [Rejected(_PORTABLE, first)] if chosen != _PORTABLE else []
    cell = target.capabilities.support(request.op, request.dtype, request.variant)
    dtypes = {"operands": request.dtype, "scales": request.variant}
    return [OpChoice("fp8_linear, quantize", chosen, dtypes, cell.level, "claimed", tuple(rejected), cell.reason)]


def _candidates(op: str, target: Target) -> list[Implementation]:
    return [each for each in target.backend.implementations() if each.op == op]


def _row(op: str, request: Request, delayed: bool, target: Target) -> OpChoice:
    """One product: the first of the backend's candidates where the chip has it, else the emulation."""
    cell = target.capabilities.support(request.op, request.dtype, request.variant)
    candidates = _candidates(request.op, target)
    objections = {each.name: _objection(each, request, cell) for each in candidates}
    if cell.level == "full":
        chosen = next((name for name, why in objections.items() if not why), f"{target.backend.name} scaled_mm")
        objections |= {_EMULATED: ""} if candidates else {}
    else:
        chosen = _EMULATED
    first = f"{chosen} comes first and serves this run"
    rejected = [Rejected(name, why or first) for name, why in objections.items() if name != chosen]
    return OpChoice(
        op,
        chosen,
        {
            "operands": request.dtype,
            "scales": f"{request.variant}, delayed" if delayed else request.variant,
        },
        cell.level,
        "claimed",
        tuple(rejected),
        cell.reason,
    )


def _objection(candidate: Implementation, request: Request, cell: Support) -> str:
    """Why ``candidate`` cannot serve ``request``, of which the chip's table says ``cell``; "" where it can."""
    own = candidate.supports(request)
    if not own:
        return own.reason
    return "" if cell.level == "full" else cell.reason


_EMULATED = "emulated"
_PORTABLE = "reference"
"""Quantizing in plain PyTorch, on whatever device."""


@dataclass(frozen=True)
class Carried:
    """What becomes of a checkpoint's amax histories in this run."""

    histories: bool = False
    """Whether they are read."""
    converted: bool = False
    """Whether scales are then made anew from them."""
    note: str = ""


def carried(mine: Fp8Run | None, manifest: Manifest | None) -> Carried:
    """How this run goes on from the histories of ``manifest``. Raises ConfigError where they belong to another variant
    and ``precision.fp8.convert`` is false."""
    if mine is None or manifest is None or not mine.recipe.delayed:
        return Carried()
    own, theirs = mine.contract, manifest.plan.get("fp8")
    if not isinstance(theirs, dict) or theirs.get("scaling") != "delayed":
        return Carried(note="fp8: the checkpoint has no amax histories; they start anew")
    if any(theirs.get(key) != own[key] for key in ("history", "layers")):
        layers = theirs.get("layers")  # the manifest may be anybody's
        count = len(layers) if isinstance(layers, list) else "unknown"
        return Carried(
            note=f"fp8: the checkpoint's amax histories are of {theirs.get('history')} steps and {count} layers, "
            f"this run's of {own['history']} and {len(own['layers'])}, or of others; they start anew"
        )
    formats, former = ([entry.get(key) for key in ("forward", "backward", "scales")] for entry in (own, theirs))
    if formats == former:
        return Carried(histories=True)
    if not mine.recipe.config.convert:
        raise ConfigError(
            f"precision.fp8.convert false asked; the checkpoint's scales are for {former[0]} and {former[1]}, this run "
            f"computes in {formats[0]} and {formats[1]}; set convert: true, or variant and format as they were"
        )
    return Carried(
        True,
        True,
        f"fp8: the checkpoint's scales are for {former[0]} and {former[1]}; made anew from its amax histories for "
        f"{formats[0]} and {formats[1]}",
    )
