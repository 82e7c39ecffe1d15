"""Run a function on several real processes, as the ranks of a world.

``run_ranks(fn, 4, *args)`` starts 4 processes, calls ``fn(ctx, *args)`` in each and returns the results in
rank order; ``ctx`` (:class:`Rank`) knows the rank, the size and a store that all ranks share. ``fn`` must be
a module-level function, and arguments and results must pickle. ``outcomes`` is for tests about failure: it
returns what became of every rank and raises nothing itself. ``timeout`` counts from when ``fn`` starts.

The store's server runs in the test's own process on a port that the system chose, so there is no port to race
for, and it outlives any rank that dies.

Processes are forked from a server process that has imported torch and nothing else has happened in (importing
torch takes seconds of processor time, times the ranks, times the tests). With ``env`` they are spawned from
scratch, since torch reads some variables when it is imported.
"""

# pyright: reportPrivateImportUsage=false
# (torch.distributed re-exports without saying so)

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch.distributed as dist

PRELOAD = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint")
STARTED = b"started"
START_S = 120.0
"""How long a process may take to import what it needs, which a busy machine can make long."""
GRACE_S = 8.0
"""How long the other ranks may go on after one has failed (run_ranks only)."""


@dataclass(frozen=True)
class Rank:
    """Where a test function runs."""

    rank: int
    size: int
    port: int
    timeout: float

    def store(self) -> dist.TCPStore:
        """A new connection to the store of this world."""
        import torch.distributed as dist

        limit = timedelta(seconds=self.timeout)
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=limit)

    def launched(self) -> None:
        """Set what a launcher sets, so that a Trainer in this process joins the others."""
        os.environ |= {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: a value, or the exception's class and message."""

    rank: int
    value: Any = None
    error: str = ""
    """Name of the exception's class; "died" without an exception, "timeout" where it had to be killed."""
    message: str = ""
    traceback: str = ""
    seconds: float = 0.0


def _child(fn: Callable[..., Any], ctx: Rank, args: tuple[Any, ...], env: Mapping[str, str], pipe: Connection) -> None:
    os.environ.clear()  # a forked process has the environment of when the server started
    os.environ.update(env)
    torch.set_num_threads(1)
    pipe.send_bytes(STARTED)
    faulthandler.dump_traceback_later(max(ctx.timeout - 1, 1))  # to stderr: where a rank hung
    start = time.monotonic()
    # Plain pickle: the one of multiprocessing would share tensors as file handles of a process that ends.
    try:
        value = fn(ctx, *args)
        message = pickle.dumps(Outcome(ctx.rank, value, seconds=time.monotonic() - start))
    except BaseException as e:
        text, name = traceback.format_exc(), type(e).__name__
        message = pickle.dumps(Outcome(ctx.rank, None, name, str(e), text, time.monotonic() - start))
    pipe.send_bytes(message)
    pipe.close()
    os._exit(0)  # a group that has failed can block or abort while it is torn down


class _Children:
    """The processes of one world and what has been heard from them."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.found: dict[int, Outcome] = {}

    def receive(self, rank: int) -> bytes:
        """The next message of a rank that has one, or nothing where it died, which is an outcome."""
        try:
            return self.pipes[rank].recv_bytes()
        except EOFError:
            self.processes[rank].join(5)
            code = self.processes[rank].exitcode
            self.found[rank] = Outcome(rank, None, "died", f"exit code {code} without a result")
            return b""

    def wait_started(self) -> None:
        deadline = time.monotonic() + START_S
        for rank, pipe in enumerate(self.pipes):
            if pipe.poll(max(deadline - time.monotonic(), 0)):
                self.receive(rank)

    def collect(self, timeout: float, grace: float | None) -> None:
        """Outcomes until all are there or time is up (sooner after a failure, where ``grace`` is given)."""
        deadline = time.monotonic() + timeout
        while len(self.found) < len(self.pipes) and (left := deadline - time.monotonic()) > 0:
            ready = wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in self.found], left)
            for rank in [rank for rank, pipe in enumerate(self.pipes) if pipe in ready]:
                if (message := self.receive(rank)) not in (b"", STARTED):
                    self.found[rank] = pickle.loads(message)
            if grace is not None and any(o.error for o in self.found.values()):
                deadline = min(deadline, time.monotonic() + grace)
                grace = None

    def end(self) -> None:
        """Ends every process: a moment for those that are done, none for those that are not."""
        for rank, process in enumerate(self.processes):
            process.join(2 if rank in self.found else 0)
            process.kill()
            process.join()


def _run(
    fn: Callable[..., Any],
    size: int,
    args: tuple[Any, ...],
    timeout: float,
    env: Mapping[str, str] | None,
    grace: float | None,
) -> list[Outcome]:
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context: Any = mp.get_context("spawn" if env else "forkserver")
    if not env:
        context.set_forkserver_preload(list(PRELOAD))
    variables = {**os.environ, **(env or {})}
    children = _Children()
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            ctx = Rank(rank, size, server.port, timeout)
            process = context.Process(target=_child, args=(fn, ctx, args, variables, theirs), daemon=True)
            process.start()
            theirs.close()
            children.processes.append(process)
            children.pipes.append(ours)
        children.wait_started()
        children.collect(timeout, grace)
    finally:
        children.end()
    late = Outcome(-1, None, "timeout", "no result in time; if it had the whole time, its stack is on stderr")
    return [children.found.get(rank) or replace(late, rank=rank) for rank in range(size)]


def run_ranks(
    fn: Callable[..., Any], size: int, *args: Any, timeout: float = 60, env: Mapping[str, str] | None = None
) -> list[Any]:
    """``fn(ctx, *args)`` on ``size`` processes; the results by rank. Fails with the traceback of every rank
    that failed."""
    results = _run(fn, size, args, timeout, env, GRACE_S)
    failed = [f"rank {o.rank}: {o.traceback or f'{o.error}: {o.message}'}" for o in results if o.error]
    if failed:
        raise AssertionError(f"{len(failed)} of {size} ranks failed\n" + "\n".join(failed))
    return [o.value for o in results]


def outcomes(
    fn: Callable[..., Any], size: int, *args: Any, timeout: float = 60, env: Mapping[str, str] | None = None
) -> list[Outcome]:
    """Like :func:`run_ranks`, but returns what became of every rank, failures included."""
    return _run(fn, size, args, timeout, env, None)
