"""``accelbridge explain``: the plan that a run would have, without running it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from accelbridge.backend import World
from accelbridge.render import devices_text, plan_text
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import Provided, prepare


def explain_text(
    recipe: Path | None, overrides: Sequence[str], nproc: int | None, backend: str | None, as_json: bool
) -> str:
    """The plan of ``recipe`` on ``nproc`` devices (default: the product of its degrees) and all candidates."""
    config = TrainConfig.load(recipe, overrides) if recipe else TrainConfig()
    # Without a recipe there is no model: the plan holds the backend, its facts and its lowerings.
    provided = None if config.model is not None else Provided(model=True, data=True, requests=[])
    plan = prepare(
        config,
        World(size=nproc or _devices(config)),
        backend=backend,
        provided=provided,
        everything=True,
        writes=False,
    ).plan
    if as_json:
        return json.dumps(plan.as_dict(), indent=1)
    return f"{plan_text(plan)}\n\n{devices_text(plan.candidates)}"


def _devices(config: TrainConfig) -> int:
    parallel = config.parallel
    shard = 1 if parallel.dp_shard == "auto" else parallel.dp_shard
    return parallel.dp_replicate * shard * parallel.tp * parallel.cp * parallel.pp
