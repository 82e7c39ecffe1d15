"""FLT: what goes wrong must end as an error, on every rank, in time; and never as a success with wrong numbers.

Calls that do not fit together are tried twice, in groups of their own: with the comparison of calls
(``Collectives.init(check=True)``), which must name the mismatch on every rank and leave the group usable; and without,
where an error in time is asked, or the end that the backend declares (facts ``collective.on_mismatch`` = "abort": a
rank may end by SIGABRT; ``collective.op_mismatch`` = "undetected": SUM against MAX may go through). Every test runs in
processes of its own.

Under the spmd execution model nobody else is there to call otherwise, or to be missing: ids either mean what
``faults_spmd.py`` says, or say why nothing is left of their question.
"""

# torch.distributed re-exports without saying so, and stubs its functions with narrower types than it takes.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from accelbridge import Trainer
from accelbridge.backend import Format, Mask, Request, World
from accelbridge.conformance.bench import TYPED, Bench, is_unsupported
from accelbridge.conformance.launched import PIDS, RAISED
from accelbridge.conformance.oracle import collectives as oracle
from accelbridge.conformance.registry import case
from accelbridge.conformance.suite import faults_spmd as spmd
from accelbridge.conformance.suite.trainer_support import (
    BATCH,
    Given,
    Inner,
    Rows,
    equal_all,
    on_host,
    state,
    step,
    trainer,
)
from accelbridge.errors import CollectiveMismatch

_LIMIT_S = 4.0
"""Time limit of the groups here."""
_LATE_S = 20.0
"""What is allowed beyond it."""


def _open(t: Bench, name: str, check: bool, timeout_s: float = _LIMIT_S) -> None:
    assert t.store is not None
    # A slow rank may come to the first group much later than the others.
    with t.ends_within(timeout_s + _LATE_S, "init"):
        t.run(t.backend.collectives.init, t.store, replace(t.world, run_id=name), timeout_s, check)


def _meet(t: Bench, name: str) -> None:
    """Wait until every rank has come here, whatever has become of its group."""
    assert t.store is not None
    t.store.set(f"{name}/{t.world.rank}", "1")
    keys = [f"{name}/{rank}" for rank in range(t.world.size)]
    deadline = time.monotonic() + 60.0
    while not t.store.check(keys):
        if time.monotonic() > deadline:
            t.fail("TIMEOUT", f"not every rank came to {name!r}")
            return
        time.sleep(0.01)


def _works(t: Bench, name: str) -> None:
    """The group adds up whole numbers as it should."""
    parts = [t.integers(64, low=-8, high=8, name=f"{name}/rank{rank}") for rank in range(t.world.size)]
    x = t.put(parts[t.world.rank])
    with t.ends_within(_LIMIT_S + _LATE_S, f"a sum {name}"):
        t.run(dist.all_reduce, x)
    t.equal(x, oracle.whole_sum(parts), name=f"sum {name}")


def _to_the_end(t: Bench, call: Callable[[], Any]) -> Callable[[], None]:
    """``call``, and the device's errors, which an asynchronous device tells later."""

    def run() -> None:
        call()
        t.backend.device.synchronize()

    return run


def _checked(t: Bench, call: Callable[[], Any]) -> None:
    """With the comparison, ``call`` is a CollectiveMismatch at once, and the group goes on."""
    _open(t, "checked", check=True)
    _works(t, "before")
    with t.ends_within(_LIMIT_S + _LATE_S, "a call that is compared"):
        t.raises(CollectiveMismatch, call)
    _works(t, "after it")
    t.run(t.backend.collectives.shutdown)


def _differs(t: Bench, call: Callable[[], Any]) -> None:
    """``call`` is another one on each rank: it is never a success, in either mode."""
    _checked(t, call)
    _open(t, "unchecked", check=False)
    _works(t, "unchecked")
    _meet(t, "all well")  # a rank that aborts next door must not spoil the sum here
    t.may_abort()
    with t.ends_within(_LIMIT_S + _LATE_S, "a call that is not compared"):
        t.raises(Exception, _to_the_end(t, call))
    # The process ends now: a library that has failed may block or abort while it is torn down.


# ------------------------------------------------------------------------------------------------ mismatches


@case("FLT-001", "train", worlds=(2,), group=False, fresh=True, timeout_s=180.0, spmd=spmd.WHY["FLT-001"])
def shapes_differ(t: Bench) -> None:
    """all_reduce of another shape on each rank is an error on every rank within the time limit, never a success."""
    _differs(t, lambda: dist.all_reduce(t.put(torch.ones(4 + t.world.rank))))


@case("FLT-002", "train", worlds=(2,), group=False, fresh=True, timeout_s=180.0, spmd=spmd.WHY["FLT-002"])
def dtypes_differ(t: Bench) -> None:
    """all_reduce of another dtype on each rank is an error on every rank within the time limit, never a success.

    Where calls are compared, dtypes of one size are tried too: no library can see those apart by itself.
    """
    dtypes = (torch.int32, torch.float32)
    _checked(t, lambda: dist.all_reduce(t.put(torch.ones(64).to(dtypes[t.world.rank % 2]))))
    dtypes = (torch.int64, torch.float32)
    _differs(t, lambda: dist.all_reduce(t.put(torch.ones(64).to(dtypes[t.world.rank % 2]))))


@case("FLT-003", "train", worlds=(2,), group=False, fresh=True, timeout_s=180.0, spmd=spmd.WHY["FLT-003"])
def order_differs(t: Bench) -> None:
    """all_reduce on one rank against broadcast on the other: both end, with an error, within the limit + 20 s."""
    x = t.put(torch.ones(64))
    _differs(t, lambda: dist.all_reduce(x) if t.world.rank else dist.broadcast(x, 0))


@case("FLT-021", "train", worlds=(2,), group=False, fresh=True, timeout_s=180.0, spmd=spmd.WHY["FLT-021"])
def operations_differ(t: Bench) -> None:
    """SUM on one rank against MAX on the other is named where calls are compared; where not, it is an error, or goes
    through where the backend declares that (``collective.op_mismatch`` = "undetected")."""
    x = t.put(torch.ones(64))
    op = dist.ReduceOp.SUM if t.world.rank else dist.ReduceOp.MAX
    _checked(t, lambda: dist.all_reduce(x, op=op))
    _open(t, "unchecked", check=False)
    _works(t, "unchecked")
    _meet(t, "all well")
    t.may_abort()
    found = "raise"
    with t.ends_within(_LIMIT_S + _LATE_S, "a call that is not compared"):
        try:
            _to_the_end(t, lambda: dist.all_reduce(x, op=op))()
            found = "undetected"
        except Exception as error:
            t.note("collective.op_mismatch.error", f"{type(error).__name__}: {error}")
    t.note("collective.op_mismatch", found)
    declared = t.capabilities.facts.get("collective.op_mismatch", "raise")
    t.same(found == "raise" or declared == "undetected", True, f"SUM against MAX: {found}", "ERROR")


@case("FLT-022", "train", worlds=(2,), group=False, fresh=True, timeout_s=180.0, spmd=spmd.WHY["FLT-022"])
def roots_differ(t: Bench) -> None:
    """broadcast from another root on each rank: both end, with an error, within the limit + 20 s."""
    x = t.put(torch.ones(64))
    _differs(t, lambda: dist.broadcast(x, t.world.rank))


@case("FLT-004", "train", worlds=(2,), group=False, fresh=True, timeout_s=180.0, spmd=spmd.WHY["FLT-004"])
def one_never_calls(t: Bench) -> None:
    """One rank never calls: the others get an error within 1.5 x the time limit, which names the operation, the group
    and the absent rank where calls are compared.

    (Under the trainer the watch makes a CollectiveTimeout of it; the watch rests on what is asked here.)
    """
    absent = t.world.size - 1
    limit_s = 2 * _LIMIT_S
    for check in (True, False):
        _open(t, f"check {check}", check, limit_s)
        _works(t, f"check {check}")
        if t.world.rank != absent:
            x = t.put(torch.ones(64))
            kinds = CollectiveMismatch if check else Exception
            with t.ends_within(1.5 * limit_s, "a call that waits for an absent rank"):
                error = t.raises(kinds, _to_the_end(t, lambda x=x: dist.all_reduce(x)))
            text = str(error).lower().replace("_", "")
            names = ("allreduce", "group", f"rank {absent} made no call") if check else ()
            t.same([name for name in names if name not in text], [], "missing in the error", "ERROR")
        _meet(t, f"over {check}")
        with t.ends_within(_LATE_S, "shutdown of a group that failed"):
            t.run(t.backend.collectives.shutdown)


# -------------------------------------------------------------------------------------------------- lost ranks


@case("FLT-005", "train", worlds=(2,), group=False, fresh=True, exits=True, timeout_s=120.0, spmd=spmd.WHY["FLT-005"])
def killed_in_the_middle(t: Bench) -> None:
    """A rank is killed in the middle of an all_reduce: the others get an error within the time limit x 1.5.

    (What a killed process held on the device is the driver's to free, and no interface of ours shows it.)
    """
    _lose(t, lambda: os.kill(os.getpid(), signal.SIGKILL))


@case("FLT-006", "train", worlds=(2,), group=False, fresh=True, exits=True, timeout_s=120.0, spmd=spmd.WHY["FLT-006"])
def leaves_without_a_word(t: Bench) -> None:
    """A rank ends its process in good order without leaving the group: the others get an error within the time limit
    x 1.5."""
    _lose(t, sys.exit)


def _lose(t: Bench, leave: Callable[[], Any]) -> None:
    limit_s = 2 * _LIMIT_S
    _open(t, "group", check=False, timeout_s=limit_s)
    _works(t, "before")
    x = t.put(t.integers(2**20))
    if t.world.rank == t.world.size - 1:
        dist.all_reduce(x, async_op=True)
        leave()

    def until_it_fails() -> None:
        # What was under way may have come through; what begins after that can't.
        for _ in range(100):
            dist.all_reduce(x)
            t.backend.device.synchronize()

    with t.ends_within(1.5 * limit_s, "a call to a rank that is gone"):
        t.raises(Exception, until_it_fails)


@case("FLT-012", "train", worlds=(2,), group=False, fresh=True, timeout_s=180.0, spmd=spmd.WHY["FLT-012"])
def memory_runs_out_on_one_rank(t: Bench) -> None:
    """Memory runs out on one rank within a backward pass: that error is known as what it is, every other rank gets one
    too, and after a new group has been made the next step is right on all."""
    unlucky = t.world.rank == t.world.size - 1
    data = [t.integers(32, 8, name=f"x/rank{rank}") for rank in range(t.world.size)]
    x = t.put(data[t.world.rank])

    def gradient(exhausted: bool) -> Tensor:
        weight = t.put(torch.ones(8)).requires_grad_()
        (_Exhausting.apply(x @ weight) if exhausted else x @ weight).sum().backward()
        assert weight.grad is not None
        dist.all_reduce(weight.grad)
        t.backend.device.synchronize()
        return weight.grad

    _open(t, "first", check=False)
    _works(t, "first")
    with t.ends_within(1.5 * _LIMIT_S + _LATE_S, "a step in which memory runs out"):
        error = t.raises(Exception, gradient, unlucky)
    if unlucky and error is not None:
        t.same(t.backend.device.is_out_of_memory(error), True, f"out of memory: {error}", "ERROR")
    del error  # it holds the frames, and those the tensors
    _anew(t, "second")
    got = t.run(gradient, False)
    t.equal(got, oracle.whole_sum([part.sum(0) for part in data]), name="the next step")


class _Exhausting(torch.autograd.Function):
    """Asks for more memory than any device has on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] + torch.empty(2**50, dtype=torch.uint8, device=grads[0].device)[0]


def _anew(t: Bench, name: str) -> None:
    """Leave a group that failed, wait for the others to do so, and make another."""
    with t.ends_within(_LIMIT_S + _LATE_S, "shutdown of a group that failed"):
        t.run(t.backend.collectives.shutdown)
    _meet(t, f"{name} begins")
    _open(t, name, check=False, timeout_s=10 * _LIMIT_S)


# -------------------------------------------------------------------------------------------- life of a group


@case("FLT-007", "train", worlds=(2,), group=False, fresh=True, timeout_s=180.0, spmd=spmd.again_after_a_failure)
def again_after_a_failure(t: Bench) -> None:
    """After a group has failed, it can be shut down, and a new one in the same processes works."""
    _open(t, "first", check=False)
    _works(t, "first")
    if t.world.rank:
        x = t.put(torch.ones(64))
        with t.ends_within(_LIMIT_S + _LATE_S, "a call that waits for an absent rank"):
            t.raises(Exception, _to_the_end(t, lambda: dist.all_reduce(x)))
    _meet(t, "failed")
    _anew(t, "second")
    _works(t, "second")


@case("FLT-008", "train", worlds=(2,), group=False, fresh=True, timeout_s=120.0, spmd=spmd.life_of_an_execution)
def life_of_a_group(t: Bench) -> None:
    """A second init is refused and harms nothing; a call after shutdown raises; shutdown twice and init again work."""
    collectives, x = t.backend.collectives, t.put(torch.ones(64))
    _open(t, "first", check=False)
    _works(t, "first")
    t.raises(TYPED, collectives.init, t.store, replace(t.world, run_id="again"), _LIMIT_S, False)
    _works(t, "after a second init")
    for _ in range(2):
        t.run(collectives.shutdown)
        t.raises(TYPED, dist.all_reduce, x)
    _open(t, "second", check=False)
    _works(t, "second")


@case("FLT-009", "train", worlds=(2,), fresh=True, timeout_s=120.0, spmd=spmd.wrong_arguments)
def wrong_arguments(t: Bench) -> None:
    """A root that does not exist, an output of another size or dtype, a list of another length, splits that do not add
    up and ranks that do not exist are errors on every rank, and the group works on."""
    n = t.world.size
    one = t.put(torch.ones(4))
    some, more = t.put(torch.ones(4 * n)), t.put(torch.ones(4 * n + 1))

    def list_of(count: int) -> list[Tensor]:
        return [one.clone() for _ in range(count)]

    calls: dict[str, Callable[[], Any]] = {
        "broadcast from no rank": lambda: dist.broadcast(one, n),
        "broadcast from a negative rank": lambda: dist.broadcast(one, -1),
        "reduce to no rank": lambda: dist.reduce(one, n),
        "reduce to a negative rank": lambda: dist.reduce(one, -1),
        "all_gather into another size": lambda: dist.all_gather_into_tensor(more, one),
        "all_gather into another dtype": lambda: dist.all_gather_into_tensor(some.bfloat16(), one),
        "reduce_scatter of another size": lambda: dist.reduce_scatter_tensor(one, more),
        "all_gather into a longer list": lambda: dist.all_gather(list_of(n + 1), one),
        "all_gather into a shorter list": lambda: dist.all_gather(list_of(n - 1), one),
        "reduce_scatter of a longer list": lambda: dist.reduce_scatter(one, list_of(n + 1)),
        "splits of another sum": lambda: dist.all_to_all_single(one, one.clone(), [1] * n, [2] * n),
        "a group with a rank that is not": lambda: dist.new_group([0, n]),
        "a group with a rank twice": lambda: dist.new_group([0, 0]),
    }
    for name, call in calls.items():
        with t.ends_within(_LIMIT_S + _LATE_S, name):
            error = t.raises(Exception, _to_the_end(t, call))
        t.note(f"FLT-009 {name}", type(error).__name__)
    _works(t, "after all of it")


@case("FLT-010", "train", worlds=(2,), group=False, fresh=True, timeout_s=240.0, spmd=spmd.wrong_worlds)
def wrong_worlds(t: Bench) -> None:
    """No ranks, a rank outside the world, a rank that is there twice and one that never comes: init raises a typed
    error within the time limit + 20 s, and a right init works afterwards.

    (An address cannot be missing here: the ranks are handed a store.)
    """
    init, alone = t.backend.collectives.init, dist.HashStore()
    n, rank = t.world.size, t.world.rank
    worlds = {
        "no ranks": (alone, World(rank=0, size=0)),
        "a rank outside": (alone, World(rank=1, size=1)),
        "a negative rank": (alone, World(rank=-1, size=1)),
        "a rank twice": (t.store, World(rank=0, size=n, local_rank=rank, local_size=n)),
        "a rank that never comes": (t.store, World(rank=rank, size=n + 1, local_rank=rank, local_size=n)),
    }
    for name, (store, world) in worlds.items():
        with t.ends_within(_LIMIT_S + _LATE_S, name):
            t.raises(TYPED, init, store, replace(world, run_id=name), _LIMIT_S, False)
        t.run(t.backend.collectives.shutdown)
    _meet(t, "tried")
    _open(t, "right", check=False)
    _works(t, "right")


@case("FLT-011", "train", worlds=(2,), fresh=True, timeout_s=120.0, spmd=spmd.WHY["FLT-011"])
def groups_without_me(t: Bench) -> None:
    """A group without members is refused or has none; a call of no member changes nothing, and members go on."""
    try:
        empty = dist.new_group([])
    except Exception as error:
        t.note("FLT-011", f"{type(error).__name__}: {error}")
    else:
        t.same(dist.get_rank(empty), -1, "rank in a group without members", "RANKS")
    first = t.run(dist.new_group, [0])
    data = t.integers(64, name=f"rank{t.world.rank}")
    x = t.put(data)
    with t.ends_within(_LATE_S, "a call in a group of rank 0"):
        t.run(dist.all_reduce, x, group=first)
    t.equal(x, data, name="a group of one, of which the others are no members")
    _works(t, "in the world")


# ------------------------------------------------------------------------------------------- launcher, restarts


def _launcher_tells_of_one(t: Bench) -> None:
    """The one process that the launcher starts raises: the launcher returns a code that is not 0 and names its rank,
    within 10 s of the error."""
    _launcher_tells(t, 1)


@case("FLT-014", "train", group=False, fresh=True, timeout_s=180.0, spmd=_launcher_tells_of_one)
def launcher_tells(t: Bench) -> None:
    """One of two launched ranks raises: the launcher returns a code that is not 0, names that rank, and has ended the
    other, which waits in a collective, within 10 s of the error."""
    _launcher_tells(t, 2)


def _launcher_tells(t: Bench, count: int) -> None:
    """Of the last of ``count`` ranks, which raises."""
    from accelbridge.launch.local import launch

    settings = {"backend": t.backend.name, "options": t.options, "folder": str(t.folder)}
    command = [sys.executable, "-P", "-m", "accelbridge.conformance.launched", json.dumps(settings)]
    said, last = io.StringIO(), f"rank {count - 1}"
    with _unlaunched(), redirect_stderr(said), t.ends_within(120.0, "the launcher"):
        code = t.run(launch, command, count, t.backend.collectives, None, t.folder)
    ended = time.time()
    raised_at = float((t.folder / RAISED).read_text())
    t.at_most(ended - raised_at, 10.0, "seconds from the error to the end of the launcher", code="TIMEOUT")
    t.same(code != 0, True, f"the launcher's exit code {code}", "ERROR")
    t.same(last in said.getvalue(), True, f"names {last}: {said.getvalue()!r}", "ERROR")
    left = [pid for pid in (t.folder / PIDS).read_text().split() if _runs(int(pid))]
    t.same(left, [], "launched ranks that still run", "ERROR")


@contextmanager
def _unlaunched() -> Iterator[None]:
    """Without the variables of the launcher that started this process itself."""
    mine = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.pop(name) for name in mine if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


_VICTIMS = (7, 3, 0)


@case("FLT-017", "scale", worlds=(8,), group=False, fresh=True, phases=4, timeout_s=400.0, spmd=spmd.WHY["FLT-017"])
def kills_and_restarts(t: Bench) -> None:
    """Rank 7, 3 or 0 of 8 is killed in the middle of a step: every survivor gets an error within the time limit + 20 s,
    and new processes that resume from the checkpoint end with the bits of a run that nobody killed.

    Three runs of two steps that are saved and a third that is not; the fourth goes on to the end. AdamW, sharded.
    """
    assert t.store is not None
    limits = {"timeout": 15, "heartbeat_timeout": 15, "agreement_timeout": 120}
    shapes = {"weight": (12, 8), "bias": (9,)}
    count = sum(math.prod(shape) for shape in shapes.values())
    rows = Rows(x=t.normal(8 * BATCH, count, name="gradients"))

    def model() -> Given:
        return Given(**{name: t.normal(*shape, name=name) for name, shape in shapes.items()})

    sections: dict[str, Any] = {"train": {"steps": 8}, "parallel": limits, "optimizer": {"lr": 2.0**-5}}
    resume = "auto" if t.phase else "none"
    with trainer(t, "killed", model(), rows, loss=Inner(), resume=resume, **sections) as run:
        t.same(run.step, 2 * t.phase, "step at which it goes on", code="STEPS")
        for _ in range(2):
            step(t, run)
        if t.phase < len(_VICTIMS):
            t.run(run.save)
            if t.world.rank == _VICTIMS[t.phase]:
                _meet(t, "saved")  # the others don't wait here: rank 0 takes the store with it
                t.die()
            t.store.set(f"saved/{t.world.rank}", "1")
            with t.ends_within(15.0 + _LATE_S, "a step with a rank that is gone"):
                t.raises(Exception, _one_more_step, run)
            t.answer(0)  # closing a trainer that has lost a rank is no question of this test
        got = on_host(state(t, run))
    with trainer(t, "straight", model(), rows, loss=Inner(), **sections) as run:
        for _ in range(8):
            step(t, run)
        equal_all(t, state(t, run), got)


def _one_more_step(run: Trainer) -> None:
    """To its end on the device."""
    values = run.train_step(run.loader.step(run.position))
    run.execution.read_sums([values["loss"]])


@case("FLT-019", "scale", worlds=(8,), group=False, fresh=True, timeout_s=120.0, spmd=spmd.WHY["FLT-019"])
def slow_but_well(t: Bench) -> None:
    """A rank that comes 2 s late to each of three steps is no fault: nobody times out, sums are exact, and barriers
    wait for it."""
    assert t.store is not None
    _open(t, "group", check=False, timeout_s=5 * _LIMIT_S)
    for number in range(3):
        slow = 3 * number % t.world.size
        if t.world.rank == slow:
            time.sleep(2.0)
            t.store.set(f"came/{number}", "1")
        t.run(dist.barrier)
        t.same(t.store.check([f"came/{number}"]), True, f"rank {slow} had come", "ORDER")
        if t.world.rank == slow:
            time.sleep(2.0)
        _works(t, f"step {number}")


# ----------------------------------------------------------------------------------------------- unsupported


_NARROW = (
    Format("float8_e4m3fn", 4, 3, 7, 448.0, "all_ones", "saturate"),
    Format("float8_e4m3fnuz", 4, 3, 8, 240.0, "negative_zero", "saturate"),
    Format("float8_e4m3", 4, 3, 7, 240.0, "ieee", "saturate"),
    Format("float8_e5m2", 5, 2, 15, 57344.0, "ieee", "saturate"),
)


@case("FLT-016", "core", timeout_s=60.0)
def unsupported_is_refused(t: Bench) -> None:
    """A dtype that an op does not take is a typed error or gives the right number: never a wrong one, or a bare error.

    Products and attention over integers, truth values and 8-bit floats, in every candidate that claims them; and
    quantizing to 8-bit formats, and their products, where no cell of them is declared.
    """
    for dtype in (torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2):
        name = str(dtype).removeprefix("torch.")
        a, b = (t.integers(*shape, low=0, name=f"{name}/{shape}").to(dtype) for shape in ((4, 8), (8, 6)))
        for label, matmul in t.candidates(Request("matmul", name, {"m": 4, "n": 6, "k": 8})):
            _right_or_refused(
                t, f"{label} {name}", a.double() @ b.double(), lambda f=matmul, a=a, b=b: f(t.put(a), t.put(b))
            )
        q, k, v = (t.integers(1, 2, 8, 16, low=0, name=f"{name}/{part}").to(dtype) for part in "qkv")
        weights = torch.softmax(q.double() @ k.double().transpose(-1, -2) / 4.0, -1)
        want = weights @ v.double()
        for label, attention in t.candidates(Request("attention", name, {"head_dim": 16, "sequence": 8})):
            args = [t.put(x) for x in (q, k, v)]
            mask = Mask(causal=False)
            _right_or_refused(t, f"{label} {name}", want, lambda f=attention, args=args, mask=mask: f(*args, mask))
    claimed = {(op, dtype) for (op, dtype, _), support in t.capabilities.table.items() if support}
    x, quantize = t.put(t.normal(16, 16)), t.backend.matmul.quantize
    whole = t.integers(16, 16, low=1, high=8, name="whole")
    for format in _NARROW:
        if ("quantize", format.name) not in claimed:
            _right_or_refused(
                t, f"quantize {format.name}", whole, lambda f=format: quantize(t.put(whole), f, "tensor").dequantize()
            )
    if "scaled_mm" not in {op for op, _ in claimed}:
        t.raises(TYPED, t.backend.matmul.scaled_mm, x, x, torch.float32)
    # What is supported is not refused.
    a, b = t.integers(4, 8, name="a"), t.integers(8, 6, name="b")
    t.equal(t.run(t.backend.matmul.matmul, t.put(a), t.put(b)), (a.double() @ b.double()).float(), name="float32")


def _right_or_refused(t: Bench, name: str, want: Tensor, call: Callable[[], Tensor]) -> None:
    try:
        got = call()
    except Exception as error:
        good = is_unsupported(error) or isinstance(error, (ValueError, TypeError))
        line = (str(error).splitlines() or [""])[0]
        t.same(good, True, f"{name} is refused by {type(error).__name__}: {line}", "ERROR")
        return
    # To the nearest number of the result's dtype: half a unit of integers, half a step of 8-bit floats.
    within = want.abs() * (2.0 ** -(4 if "e4m3" in name else 3)) if got.dtype.is_floating_point else 0.5
    t.within(got, want, within, name=name)
