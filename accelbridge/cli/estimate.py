"""``accelbridge estimate``: what a run would need, without running it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from accelbridge.assume import Assumption
from accelbridge.backend import World
from accelbridge.cli.explain import devices_of
from accelbridge.errors import ConfigError
from accelbridge.estimate.ahead import Ahead, compile_step
from accelbridge.estimate.arithmetic import estimate
from accelbridge.estimate.targets import AbsentMachine
from accelbridge.estimate.text import as_dict, as_text
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import Prepared, choose_target, prepare

MODES = ("auto", "whole", "few")


def estimate_text(
    recipe: Path,
    overrides: Sequence[str],
    nproc: int | None,
    backend: str | None,
    assumed: Sequence[str],
    compile_for: str | None,
    seconds: float,
    layers: str,
    as_json: bool,
) -> str:
    """The estimate of ``recipe``: by arithmetic for this host, an ``assumed`` one or the machine of ``compile_for``,
    and for the last also by its compiler, within ``seconds``."""
    if layers not in MODES:
        raise ConfigError(f"--layers {layers} asked; write one of {', '.join(MODES)}")
    if not 0 < seconds < math.inf:  # not a number is neither
        raise ConfigError(f"--seconds {seconds} asked; give a number above 0")
    config = TrainConfig.load(recipe, overrides)
    if compile_for is None:
        prepared, target = _prepared(config, nproc, backend, Assumption.parse(assumed)), ""
    else:
        if nproc is not None or backend is not None or assumed:
            raise ConfigError(
                f"--compile-for {compile_for} asked with --nproc, --backend or --assume; the target names the whole "
                "machine; leave the others out"
            )
        machine = AbsentMachine.parse(compile_for)
        prepared, target = machine.prepare(config), str(machine)
    found = estimate(prepared)
    compiled: Ahead | None = compile_step(prepared, target, seconds, layers) if target else None
    if as_json:
        return json.dumps(as_dict(prepared, found, compiled, target), indent=1)
    return as_text(prepared, found, compiled, target)


def _prepared(config: TrainConfig, nproc: int | None, backend: str | None, host: Assumption | None) -> Prepared:
    target = choose_target(config, backend, assumed=host)
    size = nproc or devices_of(config.parallel, target) // target.devices_per_process() or 1
    return prepare(config, World(size=size), target=target, writes=False)
