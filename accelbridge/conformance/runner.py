"""Runs tests in processes of their own and keeps a line about each: what was started, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelbridge.conformance import falsify
from accelbridge.conformance.pool import Outcome, Pool, Target
from accelbridge.conformance.registry import Case
from accelbridge.conformance.status import Status, worst
from accelbridge.errors import BackendError

LOGS = "logs"
"""Folder of a report in which each rank's output lies."""

PUBLIC_SEED = 20261130


class Runner:
    """Runs tests against ``target``; events and logs go to ``out``."""

    def __init__(self, target: Target, out: Path, devices: int = 1, seeds: tuple[int, ...] = (PUBLIC_SEED,)) -> None:
        self.target, self.out, self.devices, self.seeds = target, out, devices, seeds
        self._pools: dict[int, Pool] = {}
        self._stack = ExitStack()
        self._broken = ""
        self.spmd = False
        """Whether one process drives all devices; known once :meth:`introduce` was called."""

    def __enter__(self) -> Runner:
        self.out.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _pool(self, world: int) -> Pool:
        if world not in self._pools:
            pool = Pool(self.target, world, self.out / LOGS)
            self._stack.callback(pool.close)
            self._pools[world] = pool
        return self._pools[world]

    def introduce(self) -> dict[str, Any]:
        """What a first rank says about the backend; its devices are what may be used from here on. Raises BackendError
        where it cannot start; every test then ends as a CRASH with that reason."""
        pool = self._pool(1)
        if why := pool.start():
            self._broken = why
            raise BackendError(f'backend "{self.target.backend}" asked to be tested; its first process says: {why}')
        self.devices = pool.introduction["device_count"]
        self.spmd = pool.introduction["backend"]["execution"] == "spmd"
        self._event("introduction", **pool.introduction)
        return pool.introduction

    def _event(self, kind: str, **fields: object) -> None:
        with (self.out / "events.jsonl").open("a") as file:
            file.write(json.dumps({"event": kind, **fields}, default=str) + "\n")

    def run(self, case: Case, falsified: bool = False) -> Iterator[tuple[Outcome, bool | None]]:
        """Run ``case`` at each of its world sizes with every seed; yields what became of it at each world size and,
        if asked, whether falsified outputs turned it red (None where it did not pass)."""
        for world in self._worlds(case):
            self._event("start", id=case.id, world=world)
            outcome = self._at(case, world)
            red = self._falsified(case, world) if falsified and outcome.status == Status.PASS else None
            if red is False:
                outcome.status, outcome.code = Status.MISTRUSTED, "UNFALSIFIED"
                outcome.message = "it stayed green when every output was corrupted"
            self._event("end", **asdict(outcome), falsified=red)
            yield outcome, red

    def _worlds(self, case: Case) -> tuple[int, ...]:
        """Numbers of ranks; under spmd one process drives all devices."""
        return (1,) if self.spmd else case.worlds

    def _at(self, case: Case, world: int) -> Outcome:
        if self._broken:
            return Outcome(case.id, world, Status.CRASH, "START", self._broken)
        if self.spmd and isinstance(case.spmd, str):
            return Outcome(case.id, world, Status.NOT_SUPPORTED, "SPMD", case.spmd)
        needed = min(case.worlds) if self.spmd else world
        if needed > self.devices:
            text = f"{needed} devices needed, {self.devices} found"
            return Outcome(case.id, world, Status.RESOURCE_ERROR, "DEVICES", text)
        # What a fault does hangs on no number: once is enough, and each costs new processes.
        seeds = self.seeds[:1] if case.fresh else self.seeds
        runs = [self._once(case, world, seed) for seed in seeds]
        gravest = worst(run.status for run in runs)
        chosen = next(run for run in runs if run.status == gravest)
        chosen.duration_s = sum(run.duration_s for run in runs)
        return chosen

    def _once(self, case: Case, world: int, seed: int, falsification: str = "") -> Outcome:
        return self._pool(world).run(
            case.id, seed, case.timeout_s, fresh=case.fresh, exits=case.exits, phases=case.phases,
            falsification=falsification,
        )  # fmt: skip

    def _falsified(self, case: Case, world: int) -> bool:
        return any(self._once(case, world, self.seeds[0], mode).status == Status.FAIL for mode in falsify.MODES)


def run_cases(
    target: Target, chosen: Iterable[Case], out: Path, devices: int, report: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run ``chosen`` once each: for development and for mutants."""
    outcomes: list[Outcome] = []
    with Runner(target, out, devices) as runner:
        for case in sorted(chosen, key=lambda case: (case.fresh, case.worlds)):
            for outcome, _ in runner.run(case):
                report(outcome)
                outcomes.append(outcome)
    return outcomes
