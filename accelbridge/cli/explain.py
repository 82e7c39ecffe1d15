"""``accelbridge explain``: the plan that a run would have, without running it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

from accelbridge.assume import Assumption
from accelbridge.backend import World
from accelbridge.render import devices_text, plan_text
from accelbridge.train.config import ParallelConfig, TrainConfig
from accelbridge.train.prepare import Target, choose_target, prepare
from accelbridge.train.run_plan import Provided


def explain_text(
    recipe: Path | None,
    overrides: Sequence[str],
    nproc: int | None,
    backend: str | None,
    as_json: bool,
    assumed: Sequence[str] = (),
) -> str:
    """The plan of ``recipe`` on ``nproc`` devices (default: as many as train would take) and all candidates; on this
    host, or on the one that is ``assumed``."""
    host = Assumption.parse(assumed)
    config = TrainConfig.load(recipe, overrides) if recipe else TrainConfig()
    # Without a recipe there is no model: the plan holds the backend, its facts and its lowerings.
    provided = None if config.model is not None else Provided(model=True, loss=True)
    target = choose_target(config, backend, everything=True, assumed=host)
    world = World(size=nproc or devices_of(config.parallel, target) // target.devices_per_process() or 1)
    plan = prepare(config, world, target=target, provided=provided, writes=False).plan
    if as_json:
        return json.dumps(plan.as_dict(), indent=1)
    text = plan_text(plan, details=True)
    return f"{text}\n\n{devices_text(plan.candidates)}" if plan.candidates else text


def devices_of(parallel: ParallelConfig, target: Target) -> int:
    """The product of the degrees; ``auto`` takes all devices that train would, or as few as the others need."""
    others = prod((parallel.dp_replicate, parallel.tp, parallel.cp, parallel.pp))
    if parallel.dp_shard != "auto":
        return others * parallel.dp_shard
    return max(others, target.processes())
