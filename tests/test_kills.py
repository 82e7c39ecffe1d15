"""SIGKILL at any moment of a run that saves often: what is published is whole, and every restart goes on bit for bit.

A run is killed again and again until it ends, then compared with one that nobody killed. Where a kill hit is read off
the folder afterwards: inside publishing (the unfinished checkpoint has its manifest), inside a save, or inside a step.
Most worlds are forked from a server that has torch loaded already; in them the disk is slow, so that saves and
publishing take a time that can be hit. Some are the command line, launcher and ranks.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from accelbridge import Trainer
from accelbridge.checkpoint import manifest as manifests
from accelbridge.train.metrics import PASSED_OVER_EVENT
from tests import cli
from tests.ranks import PRELOAD, Rank, _child
from tests.scenes import same_bits

RANKS = 2
STEPS = 60
INTERVAL = 2
SLOW_S = 0.02
"""What making a file or a folder durable takes on the slow disk."""
MODEL = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 32}
PHASES = ("step", "save", "publish")


def recipe(output: Path, store: Path) -> dict[str, Any]:
    made = cli.recipe(output, store, model=MODEL, checkpoint={"interval": INTERVAL, "keep": 2}, metrics={"interval": 1})
    made["train"] |= {"steps": STEPS, "seq_len": 16, "global_batch_size": 4}
    return made


def rank(ctx: Rank, recipe: dict[str, Any]) -> None:
    """One rank of a run on a slow disk."""
    real = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(SLOW_S)
        real(descriptor)

    os.fsync = slow
    ctx.launched()
    Trainer(recipe, resume="auto").fit()


class Forked:
    """A world of forked ranks."""

    def __init__(self, recipe: dict[str, Any], _path: Path) -> None:
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context: Any = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        self._processes = []
        for number in range(RANKS):
            ours, theirs = context.Pipe(duplex=False)
            ctx = Rank(number, RANKS, self._server.port, 120)
            process = context.Process(
                target=_child, args=(rank, ctx, (recipe,), dict(cli.environment()), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append((process, ours))

    def running(self) -> bool:
        return any(process.is_alive() for process, _ in self._processes)

    def kill(self) -> None:
        """SIGKILL to the ranks in any order, with a moment between them."""
        for process, _ in random.sample(self._processes, RANKS):
            process.kill()
            time.sleep(random.uniform(0, 0.01))
        for process, pipe in self._processes:
            process.join()
            pipe.close()


class CommandLine:
    """A launcher and its ranks."""

    def __init__(self, _recipe: dict[str, Any], path: Path) -> None:
        self._log = path.with_suffix(".log").open("a")
        self._process = cli.start("train", str(path), "--nproc", str(RANKS), "--resume", "auto", output=self._log)

    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        cli.kill_tree(self._process)
        self._log.close()


World = Forked | CommandLine


@contextmanager
def world(kind: Callable[[dict[str, Any], Path], World], recipe: dict[str, Any], path: Path) -> Iterator[World]:
    made = kind(recipe, path)
    try:
        yield made
    finally:
        made.kill()


def newest(checkpoints: Path) -> int:
    return max((manifests.step_of(path) or 0 for path in manifests.published(checkpoints)), default=0)


def saving(checkpoints: Path) -> Path | None:
    return next(iter(checkpoints.glob(".step_*.partial")), None) if checkpoints.is_dir() else None


def wait_for_moment(aim: str, output: Path, running: World) -> bool:
    """Return at a moment of the kind that ``aim`` says, True; or when the run has ended, False."""
    checkpoints = output / "checkpoints"
    begin = newest(checkpoints)
    after = random.randint(1, 3) * INTERVAL  # some checkpoints later, so that every start gets on
    while running.running():
        if newest(checkpoints) >= begin + after or (after == INTERVAL and aim != "step"):
            partial = saving(checkpoints)
            if aim == "step" and partial is None:
                time.sleep(random.uniform(0, 0.05))
                return True
            if aim == "save" and partial is not None:
                time.sleep(random.uniform(0, SLOW_S))
                return True
            if aim == "publish" and partial is not None and (partial / manifests.NAME).exists():
                return True
        time.sleep(0.0005)
    return False


def phase(checkpoints: Path) -> str:
    """What the run was doing when it was killed."""
    partial = saving(checkpoints)
    if partial is None:
        return "step"
    return "publish" if (partial / manifests.NAME).exists() else "save"


def check_published(checkpoints: Path) -> None:
    """Nothing that is named as a checkpoint is torn."""
    for path in manifests.published(checkpoints):
        manifest = manifests.read(path)
        assert manifest.step == manifests.step_of(path)
        assert manifests.METADATA in manifest.files
        assert manifests.faults(path, manifest) == []


def run_killed(folder: Path, store: Path, aims: Iterator[tuple[str, Callable[..., World]]]) -> list[str]:
    """One run, killed at the moments that ``aims`` has until it ends; the phases that were hit."""
    output = folder / "run-killed"
    made = recipe(output, store)
    path = folder / "killed.yaml"
    path.write_text(json.dumps(made))
    checkpoints = output / "checkpoints"
    hit: list[str] = []
    starts: list[int] = []
    while newest(checkpoints) < STEPS:
        starts.append(newest(checkpoints))
        aim, kind = next(aims, ("", Forked))
        with world(kind, made, path) as running:
            killed = wait_for_moment(aim, output, running)
        if killed and newest(checkpoints) < STEPS:
            hit.append(phase(checkpoints))
        check_published(checkpoints)
        assert killed or newest(checkpoints) == STEPS, "the run ended by itself before its end"
    lines = cli.lines_of(output)
    began = [line["step"] for line in lines if line.get("event") == "start"]
    # One that is killed before it has written its start leaves none.
    assert set(began) <= set(starts), "every start goes on from the newest that was published"
    assert began[-1] == starts[-1]
    assert [line for line in lines if line.get("event") == PASSED_OVER_EVENT] == []
    return hit


def compare(folder: Path, straight: Path) -> None:
    ours, theirs = (
        {step: (line["loss"], line["grad_norm"]) for step, line in cli.steps_of(run).items()}
        for run in (folder / "run-killed", straight)
    )
    assert ours == theirs
    last = Path("checkpoints") / f"step_{STEPS}"
    same_bits(folder / "run-killed" / last, straight / last)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """The run that nobody kills."""
    output = tmp_path_factory.mktemp("straight") / "run"
    running = Forked(recipe(output, store), output)
    cli.wait_for(lambda: not running.running(), 120, "the end of the run")
    running.kill()
    assert newest(output / "checkpoints") == STEPS
    return output


def test_a_few_kills(tmp_path: Path, store: Path, straight: Path) -> None:
    aims: list[tuple[str, Callable[..., World]]] = [("save", Forked), ("publish", Forked), ("step", Forked)]
    hit = run_killed(tmp_path, store, iter([*aims, ("save", CommandLine)]))
    assert len(hit) == 4, hit
    assert {"save", "publish"} <= set(hit)
    compare(tmp_path, straight)


@pytest.mark.full
def test_fifty_kills(tmp_path: Path, store: Path, straight: Path) -> None:
    """Prints how many hit what: ``pytest -s``."""
    random.seed(time.time_ns())
    hit: Counter[str] = Counter()
    command_line, runs, began = 0, 0, time.monotonic()
    while sum(hit.values()) < 50 or hit["save"] < 15 or hit["publish"] < 5:
        folder = tmp_path / str(runs)
        folder.mkdir()
        aims: list[tuple[str, Callable[..., World]]] = [
            (aim, Forked) for aim in random.choices(PHASES, weights=(3, 4, 3), k=9)
        ]
        aims.insert(random.randrange(9), (random.choice(("step", "save")), CommandLine))
        found = run_killed(folder, store, iter(aims))
        command_line += 1
        hit.update(found)
        compare(folder, straight)
        runs += 1
        assert runs < 20, f"too few kills in 20 runs: {hit}"
    seconds = time.monotonic() - began
    kills = f"{sum(hit.values())} kills in {runs} runs, {command_line} of launcher and ranks"
    print(f"\n{kills}, {seconds:.0f} s: {dict(hit)}")
