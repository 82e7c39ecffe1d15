"""Run a function on several real processes, as the ranks of a world.

``run_ranks(fn, 4, *args)`` starts 4 processes, calls ``fn(ctx, *args)`` in each and returns the results in rank
order; ``ctx`` (:class:`Rank`) knows the rank, the size and a store that all ranks share. ``fn`` must be a
module-level function, and arguments and results must pickle. ``outcomes`` is for tests about failure: it returns
what became of every rank and raises nothing itself.

The store's server runs in the test's own process on a port that the system chose, so there is no port to race
for, and it outlives any rank that dies.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch.distributed as dist

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
    os.environ.update(env)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(max(ctx.timeout - 1, 1))  # to stderr: where a rank hung
    start = time.monotonic()
    try:
        outcome = Outcome(ctx.rank, fn(ctx, *args), seconds=time.monotonic() - start)
    except BaseException as e:
        text, name = traceback.format_exc(), type(e).__name__
        outcome = Outcome(ctx.rank, None, name, str(e), text, time.monotonic() - start)
    # Plain pickle: the one of multiprocessing would share tensors as file handles of a process that ends.
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    os._exit(0)  # a group that has failed can block or abort while it is torn down


def _collect(
    processes: list[Any], pipes: list[Connection], timeout: float, grace: float | None
) -> dict[int, Outcome]:
    """Outcomes by rank until all are there or time is up (sooner after a failure, where ``grace`` is given)."""
    found: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    while len(found) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in found], left)
        for rank in [rank for rank, pipe in enumerate(pipes) if pipe in ready]:
            try:
                found[rank] = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                processes[rank].join(5)
                code = processes[rank].exitcode
                found[rank] = Outcome(rank, None, "died", f"exit code {code} without a result")
            if found[rank].error and grace is not None:
                deadline = min(deadline, time.monotonic() + grace)
    return found


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
    context = mp.get_context("spawn")
    processes, pipes = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            ctx = Rank(rank, size, server.port, timeout)
            process = context.Process(target=_child, args=(fn, ctx, args, dict(env or {}), theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        found = _collect(processes, pipes, timeout, grace)
    finally:
        for process in processes:
            process.join(0.5 if process.exitcode is None and len(pipes) == size else 0)
            process.kill()
            process.join()
    late = "no result in time; its stack is on stderr if the whole time limit had passed"
    return [found.get(rank) or Outcome(rank, None, "timeout", late) for rank in range(size)]


def run_ranks(
    fn: Callable[..., Any], size: int, *args: Any, timeout: float = 60, env: Mapping[str, str] | None = None
) -> list[Any]:
    """``fn(ctx, *args)`` on ``size`` processes; the results by rank. Fails with the traceback of every rank that
    failed."""
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
