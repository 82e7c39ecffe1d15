"""Playing a scene: a run through the command line, the fault, and what became of every process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from accelbridge.checkpoint.manifest import complete
from tests import cli
from tests.faults.scenes import ENDED, LIMIT_S, UNHARMED, Scene

SITE = Path(__file__).parent / "site"
ROOT = Path(__file__).parents[2]
STEPS = 30
START_S = 120.0


@dataclass
class Outcome:
    """What became of one run."""

    seconds: float = 0.0
    """From the fault until every process had ended."""
    code: int | None = None
    said: str = ""
    """What the launcher printed."""
    logs: dict[int, str] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    """Ranks that were still there when time was up."""
    events: list[str] = field(default_factory=list)


def _obey_permissions() -> None:
    """In the child: root gives up writing where permissions forbid it (PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)."""
    assert ctypes.CDLL(None).prctl(24, 1, 0, 0, 0) == 0


class Run:
    """One run of a scene while it lasts."""

    def __init__(self, scene: Scene, folder: Path, store: Path) -> None:
        self.scene, self.folder, self.output = scene, folder, folder / "run"
        folder.mkdir(parents=True)
        self.fault_at = folder / "fault_at"
        sections: dict[str, Any] = {name: dict(values) for name, values in scene.sections.items()}
        limits = {"timeout": LIMIT_S, "heartbeat_timeout": LIMIT_S}
        sections["parallel"] = limits | sections.get("parallel", {})
        sections["train"] = {"steps": STEPS} | sections.get("train", {})
        sections["output"] = {"dir": str(self.output)}
        sections["metrics"] = {"interval": 2} | sections.get("metrics", {})
        if "eval_interval" in sections["train"]:
            sections["data"] = {"validation": str(store / "validation")}
        self.sections = sections
        self.recipe = cli.write_recipe(folder / "recipe.yaml", store, **sections)
        self.command = [*cli.ACCELBRIDGE, "train", str(self.recipe)]
        self.launcher_options = ["--nproc", str(scene.size)]
        self.obeys_permissions = False
        self.env = cli.environment(
            PYTHONPATH=f"{SITE}{os.pathsep}{ROOT}",
            FAULTS=json.dumps(list(scene.faults)),
            FAULT_AT=str(self.fault_at),
        )
        self.ranks: dict[int, psutil.Process] = {}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.begin([*self.command, *self.launcher_options], self.env)

    def begin(self, command: list[str], env: dict[str, str]) -> None:
        with (self.folder / "said.txt").open("ab") as said:
            process = subprocess.Popen(
                command,
                stdout=said,
                stderr=said,
                env=env,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=_obey_permissions if self.obeys_permissions else None,
            )
        self.processes.append(process)

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        return self.processes[0]

    def look(self) -> None:
        """Learn of ranks that have started."""
        with contextlib.suppress(psutil.Error):
            found = [p for each in self.processes for p in psutil.Process(each.pid).children(recursive=True)]
            found += [psutil.Process(each.pid) for each in self.processes]
            for process in found:
                with contextlib.suppress(psutil.Error, KeyError, ValueError):
                    self.ranks.setdefault(int(process.environ()["RANK"]), process)

    def mark(self) -> None:
        """The fault comes from outside, now."""
        self.fault_at.write_text(str(time.time()))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            self.look()
            assert self.launcher.poll() is None, f"the run ended before {what}:\n{self.said()}"
            assert time.monotonic() < deadline, f"{what} did not come within {START_S} s"
            time.sleep(0.02)

    def until_step(self, step: int = 4) -> None:
        metrics = self.output / "metrics.jsonl"
        self.until(lambda: metrics.exists() and any(s >= step for s in cli.steps_of(self.output)), f"step {step}")
        self.look()

    def said(self) -> str:
        return (self.folder / "said.txt").read_text(errors="replace")

    def finish(self) -> Outcome:
        """Wait until every process has ended, or the scene's time is up."""
        deadline = time.monotonic() + START_S
        outcome, ended = Outcome(), 0.0
        while time.monotonic() < deadline:
            self.look()
            if self.fault_at.exists() and self.scene.outcome != UNHARMED:
                deadline = min(deadline, time.monotonic() + self.scene.within + 5 - (time.time() - self._fault()))
            if all(p.poll() is not None for p in self.processes) and not self._alive():
                break
            time.sleep(0.02)
        ended = time.time()
        outcome.left = self._alive()
        outcome.code = self.launcher.poll()
        outcome.seconds = round(ended - self._fault(), 1) if self.fault_at.exists() else 0.0
        outcome.said = self.said()
        logs = self.output / "logs"
        for rank in range(self.scene.size):
            path = logs / f"rank_{rank}.log"
            outcome.logs[rank] = path.read_text(errors="replace") if path.exists() else ""
        if (self.output / "metrics.jsonl").exists():
            outcome.events = [line["event"] for line in cli.lines_of(self.output) if "event" in line]
        return outcome

    def _fault(self) -> float:
        with contextlib.suppress(ValueError, OSError):
            return float(self.fault_at.read_text())
        return time.time()

    def _alive(self) -> list[int]:
        return [rank for rank, p in self.ranks.items() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        """Leave no process behind."""
        for process in [*self.ranks.values()]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in self.processes:
            if process.poll() is None:
                cli.kill_tree(process)  # pyright: ignore[reportArgumentType]
            process.wait()


# ----------------------------------------------------------------------------------------- done from outside


def _kill_launcher(run: Run) -> None:
    run.start()
    run.until_step()
    run.mark()
    run.launcher.kill()


def _send(number: signal.Signals) -> Callable[[Run], None]:
    def send(run: Run) -> None:
        run.start()
        run.until_step()
        run.mark()
        run.launcher.send_signal(number)

    return send


def _sigterm_after(run: Run) -> None:
    run.start()
    run.until(run.fault_at.exists, "the fault")
    run.launcher.send_signal(signal.SIGTERM)


def _continue(run: Run) -> None:
    """A stopped rank goes on after half of the limit."""
    run.start()
    run.until(run.fault_at.exists, "the fault")
    time.sleep(LIMIT_S / 2)
    run.look()
    run.ranks[run.scene.faults[0][1] or 0].send_signal(signal.SIGCONT)


def _own_store(run: Run) -> None:
    """Ranks as a scheduler starts them, with a store in a process of its own."""
    port = cli.free_port()
    host = (
        "import time, torch.distributed as d\n"
        f"s = d.TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False)\ntime.sleep(600)"
    )
    store = subprocess.Popen([sys.executable, "-c", host], start_new_session=True)
    for rank in range(run.scene.size):
        env = run.env | {"RANK": str(rank), "WORLD_SIZE": str(run.scene.size), "MASTER_ADDR": "127.0.0.1"}
        env |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(run.scene.size), "MASTER_PORT": str(port)}
        run.begin(run.command, env | {"TORCHELASTIC_USE_AGENT_STORE": "True", "STORE_HOST": str(store.pid)})
    try:
        while any(p.poll() is None for p in run.processes) and store.poll() is None:
            run.look()
            time.sleep(0.02)
    finally:
        store.kill()
        store.wait()


def _port_taken(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run.launcher_options += ["--port", str(taken.getsockname()[1])]
        run.mark()
        run.start()
        run.launcher.wait(START_S)


def _read_only(run: Run) -> None:
    """The run of a user who may not write there."""
    run.output.mkdir()
    run.output.chmod(0o555)
    run.obeys_permissions = os.geteuid() == 0
    run.mark()
    run.start()


def _damaged(damage: Callable[[Path], None]) -> Callable[[Run], None]:
    def resume(run: Run) -> None:
        run.start()
        assert run.launcher.wait(START_S) == 0, run.said()
        damage(max(complete(run.output / "checkpoints"), key=lambda p: p.stat().st_mtime))
        run.processes.clear()
        run.ranks.clear()
        (run.folder / "said.txt").unlink()
        run.launcher_options += ["--resume", "auto", "--set", f"train.steps={STEPS + 10}"]
        run.mark()
        run.start()

    return resume


def _flip(checkpoint: Path) -> None:
    shard = max(checkpoint.glob("__*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def _remove(checkpoint: Path) -> None:
    max(checkpoint.glob("__*")).unlink()


def _other_recipe(run: Run) -> None:
    """Each rank is started by hand, and one has a recipe of its own."""
    port = cli.free_port()
    run.mark()
    for rank in range(run.scene.size):
        env = run.env | {"RANK": str(rank), "WORLD_SIZE": str(run.scene.size), "MASTER_ADDR": "127.0.0.1"}
        env |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(run.scene.size), "MASTER_PORT": str(port)}
        run.begin([*run.command, *(["--set", "optimizer.lr=0.001"] if rank else [])], env)


OUTER: dict[str, Callable[[Run], None]] = {
    "": Run.start,
    "kill launcher": _kill_launcher,
    "SIGTERM": _send(signal.SIGTERM),
    "SIGINT": _send(signal.SIGINT),
    "SIGTERM after the fault": _sigterm_after,
    "continue": _continue,
    "own store": _own_store,
    "port taken": _port_taken,
    "read-only output": _read_only,
    "flipped byte": _damaged(_flip),
    "missing shard": _damaged(_remove),
    "other recipe": _other_recipe,
}

# ---------------------------------------------------------------------------------------------------- verdicts


def play(scene: Scene, folder: Path, store: Path) -> Outcome:
    """Play one scene in the new folder ``folder``, on the token stores of ``store``."""
    run = Run(scene, folder, store)
    try:
        OUTER[scene.outer](run)
        return run.finish()
    finally:
        run.end()


def faults_of(scene: Scene, outcome: Outcome) -> list[str]:
    """How the outcome differs from what the scene demands; empty where it does not."""
    return list(_faults_of(scene, outcome))


def _faults_of(scene: Scene, outcome: Outcome) -> Iterator[str]:
    if outcome.left:
        yield f"ranks {outcome.left} were still there {outcome.seconds} s after the fault"
    if outcome.code != scene.exit_code:
        yield f"exit code {outcome.code} and not {scene.exit_code}"
    if scene.says and not re.search(scene.says, outcome.said):
        yield f"nothing like {scene.says!r} was said"
    for rank, text in scene.logs.items():
        if not re.search(text, outcome.logs[rank]):
            yield f"nothing like {text!r} is in the log of rank {rank}"
    if scene.outcome == UNHARMED and outcome.events[-1:] != ["finished"]:
        yield f"the run did not finish; its events are {outcome.events}"
    if scene.outcome != UNHARMED and outcome.seconds > scene.within:
        yield f"{outcome.seconds} s and not {scene.within} s"
    if scene.outcome in (UNHARMED, ENDED) and "Traceback" in outcome.said:
        yield "a traceback was printed"
