"""F8 and TRN of training in fp8: scales that come from earlier steps, and a run beside the same one in bfloat16."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from accelbridge.conformance.bench import Bench, NotSupported
from accelbridge.conformance.oracle.formats import E4M3, TABLES
from accelbridge.conformance.registry import case
from accelbridge.conformance.suite._fp8 import canonical, declared, policies
from accelbridge.conformance.suite.trainer import learnable
from accelbridge.conformance.suite.trainer_support import Rows, everyone, layouts, step, trainer
from accelbridge.errors import AccelbridgeError
from accelbridge.precision.config import Fp8Config
from accelbridge.precision.convert import convert
from accelbridge.precision.recipe import ROLES, Fp8Recipe, resolve

_STEPS, _WINDOW = 20, 4
_TOKENS, _INPUTS, _OUTPUTS = 32, 64, 48
_LONG, _LAST = 50, 10
_MARGIN = 0.02
"""Of the mean loss of the last steps, over that of bfloat16. A proposal."""


def _recipe(t: Bench, config: Fp8Config) -> Fp8Recipe:
    try:
        return resolve(config, t.capabilities, t.backend.name)
    except AccelbridgeError as error:
        raise NotSupported(str(error)) from error


@case("F8-009", "fp8")
def delayed_scaling(t: Bench) -> None:
    """Over 20 steps the scale of each operand of a linear layer is that of the largest magnitude in a window of 4 steps
    before, and quantizing with a scale that is given gives the codes of the oracle.

    Magnitudes go up and down by factors of up to 64, so that what is forgotten too late, or never, or read from the
    tensor of the step before the last shows. The weight changes as well.
    """
    recipe = _recipe(t, Fp8Config(scaling="delayed", history=_WINDOW))
    model = nn.Linear(_INPUTS, _OUTPUTS, bias=False).to(torch.bfloat16)
    state = convert(model, recipe, t.backend.matmul)
    weight = nn.Parameter(t.put(torch.zeros(_OUTPUTS, _INPUTS, dtype=torch.bfloat16)))
    model.weight = weight
    state.start(weight.device)
    seen: list[list[float]] = []
    for number in range(_STEPS):
        shapes = ((_TOKENS, _INPUTS), (_OUTPUTS, _INPUTS), (_TOKENS, _OUTPUTS))
        powers = t.integers(3, low=-3, high=3, name=f"powers{number}").tolist()
        parts = [
            (t.normal(*shape, name=f"{role}{number}") * 2.0**power).bfloat16()
            for role, shape, power in zip(ROLES, shapes, powers, strict=True)
        ]
        if seen:
            window = torch.tensor(seen[-_WINDOW:], dtype=torch.float64).amax(0)
            want = window / torch.tensor([_largest(recipe, role) for role in ROLES], dtype=torch.float64)
            t.within(state.scale.flatten(), want, want * 2.0**-21, name=f"scales of step {number + 1}")
        x = t.put(parts[0]).requires_grad_()
        with torch.no_grad():
            weight.copy_(t.put(parts[1]))
        t.run(t.run(model, x).backward, t.put(parts[2]))
        t.run(state.update)
        seen.append([float(part.abs().max()) for part in parts])
        t.same(state.history[0, :, 0].tolist(), seen[-1], f"magnitudes of step {number + 1}", code="AMAX")
    _given_scales(t)


def _largest(recipe: Fp8Recipe, role: Any) -> float:
    return TABLES[recipe.format_of(role)].format.max


def _given_scales(t: Bench) -> None:
    """Smaller than the tensor's own (elements overflow), larger, and the same for all."""
    for table in declared(t, E4M3):
        x = t.normal(40, 24, name=f"given {table.name}").bfloat16()
        own = float(x.abs().max()) / table.format.max
        for factor in (1 / 8, 1.0, 64.0):
            scale = torch.full((1, 1), 2.0 ** math.ceil(math.log2(own * factor)))
            nonfinite = policies(t)[0]
            format = table.overflowing(nonfinite)
            q = t.run(t.backend.matmul.quantize, t.put(x), format, "tensor", t.put(scale))
            t.equal(q.scale, scale, name=f"{table.name} scale, {factor}")
            want = table.encode(x.double() / scale.double(), nonfinite)
            t.equal(canonical(t, q, table), want, name=f"{table.name} codes, {factor}")


@case("TRN-018", "fp8", worlds=(2, 4), group=False, timeout_s=300)
def fp8_beside_bfloat16(t: Bench) -> None:
    """Fifty steps of a transformer in fp8 with delayed scaling end within 2 % of the loss of the same run in bfloat16,
    and after every step all ranks hold the same scales and amax histories.

    The mean of the last ten losses is compared. On several axes of the layout, so that activations differ between
    ranks.
    """
    _recipe(t, Fp8Config(scaling="delayed"))
    ends = {}
    for compute in ("bfloat16", "fp8"):
        losses = _losses(t, compute)
        ends[compute] = sum(losses[-_LAST:]) / _LAST
        t.at_most(ends[compute] / losses[0], 0.9, f"{compute}: last losses over the first")
    t.at_most(abs(ends["fp8"] / ends["bfloat16"] - 1), _MARGIN, "loss in fp8 off that in bfloat16")


def _losses(t: Bench, compute: str) -> list[float]:
    model, tokens, targets = learnable(t.seed)
    sections: dict[str, Any] = {
        "precision": {"compute": compute, **({"fp8": {"scaling": "delayed"}} if compute == "fp8" else {})},
        "backend": {"name": t.backend.name, "options": t.options, "on_unsupported": "fallback"},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": _LONG, "seq_len": tokens.shape[-1]},
    }
    name, parallel = list(layouts(t, stages=(3,)).items())[-1]
    rows = Rows(tokens=tokens.flatten(0, 1), targets=targets.flatten(0, 1))
    with trainer(t, f"{compute} {name}", model, rows, parallel=parallel, **sections) as run:
        shares: list[Tensor] = []
        for number in range(_LONG):
            shares.append(step(t, run)["loss"])
            if run.fp8 is not None:
                held = torch.cat([run.fp8.scale.flatten(), run.fp8.history.flatten()]).tolist()
                ranks = everyone(t, f"scales/{number}", held)
                t.same(all(other == ranks[0] for other in ranks), True, f"same on all ranks, {number}", code="RANKS")
        return t.run(run.execution.read_sums, shares)
