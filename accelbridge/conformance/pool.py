"""The ranks of one world size as processes: hand them a test, hear what became of it on every rank.

Any rank's failure fails the test, a rank that dies or says nothing is an outcome, and every exit code is read. Ranks
are kept from test to test while all is well; tests of faults get new ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelbridge.conformance.status import Status, merge_ranks

START_S = 180.0
"""How long ranks may take to import, bind and meet, which a busy machine can make long."""
GRACE_S = 10.0
"""How long the other ranks may go on after one has failed or died."""


@dataclass(frozen=True)
class Target:
    """What is tested."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    mutant: str = ""
    """Id of a seeded defect; only for the proof that the suite can fail."""


@dataclass
class Outcome:
    """What became of one test at one world size."""

    id: str
    world: int
    status: Status
    code: str = ""
    message: str = ""
    duration_s: float = 0.0
    comparisons: int = 0
    metrics: list[dict[str, Any]] = field(default_factory=list)
    on_device: str = "unproven"
    emulated: bool = False
    cells: list[tuple[str, str, str]] = field(default_factory=list)
    """[op, dtype, variant] of what it exercised."""
    notes: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
    """Where the ranks of this test wrote."""


def nearest_to_limits(metrics: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the metrics of each name the one that used most of what is allowed."""
    worst: dict[str, dict[str, Any]] = {}
    for metric in metrics:
        kept = worst.get(metric["name"])
        if kept is None or metric["margin"] > kept["margin"]:
            worst[metric["name"]] = metric
    return list(worst.values())


class Pool:
    """``world`` processes of ``target``. Start is lazy; :meth:`close` ends them."""

    def __init__(self, target: Target, world: int, logs: Path) -> None:
        self.target, self.world, self.logs = target, world, logs
        self._processes: list[subprocess.Popen[str]] = []
        self._pipes: list[int] = []
        self._buffers: list[bytes] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._name = ""
        self.introduction: dict[str, Any] = {}
        """What rank 0 said about its backend when it was ready."""
        self._broken = ""
        """Why these ranks cannot start at all; asked once, or a plugin that hangs would cost every test its time."""

    # ------------------------------------------------------------------------------------------- processes

    def _start(self) -> str:
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="accelbridge-conform-", ignore_cleanup_errors=True)
        self._name = f"world{self.world}-{uuid.uuid4().hex[:8]}"
        self.logs.mkdir(parents=True, exist_ok=True)
        for rank in range(self.world):
            self._spawn(rank, self._folder.name)
        waiting, deadline = set(range(self.world)), time.monotonic() + START_S
        while waiting:
            heard = self._hear(waiting, deadline)
            if not heard:
                return f"ranks {sorted(waiting)} were not ready within {START_S:g} s"
            for rank, message in heard.items():
                if message is None:
                    return f"rank {rank} ended with {self._ended(rank)} before it was ready; see {self._log(rank).name}"
                if not message["ready"]:
                    return str(message["error"])
                waiting.discard(rank)
                if rank == 0:
                    self.introduction = message
        return ""

    def start(self) -> str:
        """Start the ranks now, where they are not running; returns why they can't be used, or nothing."""
        if not self._broken and not self._processes:
            self._broken = self._start()
        return self._broken

    def _spawn(self, rank: int, folder: str) -> None:
        receive, send = os.pipe()
        settings = {
            "backend": self.target.backend,
            "options": dict(self.target.options),
            "mutant": self.target.mutant,
            "world": self.world,
            "rank": rank,
            "run_id": self._name,
            "replies": send,
            "folder": folder,
            "port_file": f"{folder}/port",
        }
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
        }
        command = [sys.executable, "-P", "-m", "accelbridge.conformance.worker", json.dumps(settings)]
        with self._log(rank).open("a") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(send,), env=environment, text=True,
                start_new_session=True,
            )  # fmt: skip
        os.close(send)
        self._processes.append(process)
        self._pipes.append(receive)
        self._buffers.append(b"")

    def _log(self, rank: int) -> Path:
        return self.logs / f"{self._name}-rank{rank}.log"

    def _ended(self, rank: int) -> str:
        code = self._processes[rank].wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the ranks, at once."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # gone, and its children with it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin:
                with contextlib.suppress(BrokenPipeError):  # it died with something unread
                    process.stdin.close()
        for pipe in self._pipes:
            os.close(pipe)
        self._processes, self._pipes, self._buffers = [], [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    # ---------------------------------------------------------------------------------------------- a test

    def run(
        self,
        id: str,
        seed: int,
        timeout_s: float,
        *,
        fresh: bool,
        exits: bool,
        phases: int = 1,
        falsification: str = "",
    ) -> Outcome:
        """Run one test on all ranks, ``phases`` times in new processes that share a folder."""
        token = f"{id}-{uuid.uuid4().hex[:8]}"
        request = {"id": id, "seed": seed, "token": token, "falsification": falsification, "phase": 0, "kept": ""}
        if phases == 1:
            return self._once(request, timeout_s, fresh, exits)
        with tempfile.TemporaryDirectory(prefix="accelbridge-conform-", ignore_cleanup_errors=True) as kept:
            outcome = self._once(request | {"kept": kept}, timeout_s, True, exits)
            for phase in range(1, phases):
                if outcome.status == Status.PASS:
                    seconds = outcome.duration_s
                    outcome = self._once(request | {"kept": kept, "phase": phase}, timeout_s, True, exits)
                    outcome.duration_s += seconds
        return outcome

    def _once(self, request: Mapping[str, Any], timeout_s: float, fresh: bool, exits: bool) -> Outcome:
        id = request["id"]
        why = self._broken
        if not why and (fresh or not self._processes):
            why = self._start()
        if why:
            self.close()
            # Ranks that have started once may have been slow; those that never did would cost every test its time.
            self._broken = "" if self.introduction else why
            return Outcome(id, self.world, Status.CRASH, "START", why, log=self._name)
        start = time.monotonic()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died since the last test: heard of below
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
        answers, late = self._collect(request["token"], start + timeout_s, exits)
        outcome = self._merge(id, answers, late, exits, timeout_s)
        outcome.duration_s, outcome.log = time.monotonic() - start, self._name
        if self._folder is not None and not request["kept"]:  # now that every rank has seen it
            shutil.rmtree(Path(self._folder.name) / request["token"], ignore_errors=True)
        if fresh or late or outcome.status not in (Status.PASS, Status.NOT_SUPPORTED, Status.MISTRUSTED):
            self.close()
        return outcome

    def _collect(self, token: str, deadline: float, exits: bool) -> tuple[dict[int, dict[str, Any] | None], set[int]]:
        """What each rank answered (None: it died), and who had to be ended because it said nothing."""
        answers: dict[int, dict[str, Any] | None] = {}
        interim: dict[int, dict[str, Any]] = {}
        waiting = set(range(self.world))
        while waiting:
            heard = self._hear(waiting, deadline)
            if not heard:
                self._abort(waiting)
                return answers, waiting
            for rank, message in heard.items():
                if message is not None and message.get("token") != token:
                    continue  # nobody asked for this
                if message is not None and message.get("ends_by"):
                    interim[rank] = message
                    continue
                if message is None and rank in interim:
                    code = self._processes[rank].wait()
                    if code == -interim[rank]["ends_by"]:  # as the backend declares, or the test wants it
                        message = {**interim[rank], "exit_code": code}
                answers[rank] = message
                waiting.discard(rank)
                failed = message is None if not exits else False
                if failed or (message is not None and message["status"] in (Status.FAIL, Status.INTERNAL_ERROR)):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers, set()

    def _abort(self, ranks: set[int]) -> None:
        """End silent ranks so that faulthandler writes down where they were."""
        for rank in ranks:
            self._processes[rank].send_signal(signal.SIGABRT)
        for rank in ranks:
            try:
                self._processes[rank].wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._processes[rank].kill()

    def _hear(self, ranks: set[int], deadline: float) -> dict[int, dict[str, Any] | None]:
        """The next message of at least one of ``ranks``, None for one that ended; nothing when time is up."""
        heard: dict[int, dict[str, Any] | None] = {}
        for rank in ranks:
            if message := self._message(rank):
                heard[rank] = message
        if heard:
            return heard
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self._pipes[rank], selectors.EVENT_READ, rank)
            while not heard:
                left = deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    return {}
                for key, _ in ready:
                    chunk = os.read(key.fd, 1 << 16)
                    self._buffers[key.data] += chunk
                    if message := self._message(key.data):
                        heard[key.data] = message
                    elif not chunk:
                        heard[key.data] = None
        return heard

    def _message(self, rank: int) -> dict[str, Any] | None:
        """The next whole message of ``rank`` that has been read already; several may have come at once. What is no
        message was written there by somebody else, and is dropped."""
        while True:
            line, newline, rest = self._buffers[rank].partition(b"\n")
            if not newline:
                return None
            self._buffers[rank] = rest
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                return message

    def _merge(
        self, id: str, answers: Mapping[int, dict[str, Any] | None], late: set[int], exits: bool, timeout_s: float
    ) -> Outcome:
        rows = [self._row(rank, answers.get(rank), rank in late, exits, timeout_s) for rank in range(self.world)]
        failed = [row for row in rows if row["status"] == Status.FAIL]
        # A rank that failed leaves the others waiting for it: theirs is a consequence.
        status = Status.FAIL if failed else merge_ranks(Status(row["status"]) for row in rows)
        first = next((row for row in rows if row["status"] == status), rows[0])
        told = [answer for answer in answers.values() if answer is not None]
        message = (
            first["message"] if self.world == 1 or not first["message"] else f"rank {first['rank']}: {first['message']}"
        )
        proven = bool(told) and all(answer["on_device"] == "proven" for answer in told)
        return Outcome(
            id, self.world, status, first["code"], message,
            comparisons=sum(answer["comparisons"] for answer in told),
            metrics=nearest_to_limits(metric for answer in told for metric in answer["metrics"]),
            on_device="proven" if proven else "unproven",
            emulated=any(answer["emulated"] for answer in told),
            cells=sorted({tuple(cell) for answer in told for cell in answer["cells"]}),
            notes={k: v for answer in told for k, v in answer["notes"].items()},
            ranks=[{key: row[key] for key in ("rank", "status", "exit_code")} for row in rows],
        )  # fmt: skip

    def _row(
        self, rank: int, answer: dict[str, Any] | None, late: bool, exits: bool, timeout_s: float
    ) -> dict[str, Any]:
        """What became of one rank, whether it answered, was silent or ended."""
        if answer is not None:
            return {"exit_code": None, **answer}
        row: dict[str, Any] = {"rank": rank, "code": "", "exit_code": None}
        if late:
            return {**row, "status": Status.TIMEOUT, "code": "HANG", "message": f"no answer in {timeout_s:g} s"}
        row |= {"exit_code": self._processes[rank].wait(), "message": f"ended with {self._ended(rank)}"}
        if exits and rank:
            return {**row, "status": Status.PASS}
        return {**row, "status": Status.CRASH, "code": "DIED"}
