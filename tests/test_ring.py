"""The ring of a process's last collectives: what it keeps, what it costs, what it says."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accelbridge.portable import ring
from accelbridge.portable.lowerings import Call
from accelbridge.portable.ring import GroupFacts, Ring, brief, call_site, where

SHARE = 0.25
"""Of what Python's own account of the stack costs, which recording one call may cost."""


class Work:
    """A work whose end the test decides."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done


def allreduce(*shape: int) -> Call:
    return Call("allreduce", [torch.zeros(shape)], None, dist.AllreduceOptions())


def test_what_a_call_says_of_itself() -> None:
    kept, group = Ring(), GroupFacts("7", [0, 2])
    group.label, kept.step = "mesh_tp", 12
    options: Any = dist.BroadcastOptions()
    options.rootRank = 1
    work = Work()
    kept.record(group, Call("broadcast", [torch.zeros(2, 3, dtype=torch.bfloat16)], None, options)).issued(work)
    newest = kept.newest()
    assert newest is not None
    said = newest.describe()
    assert said["site"].startswith(f"{__file__}:")
    said.pop("site")
    assert said.pop("age") < 1
    assert said == {
        "group": "7", "label": "mesh_tp", "ranks": [0, 2], "number": 1, "op": "broadcast", "reduce_op": "", "root": 1,
        "peer": None, "tensors": ["bfloat16[2, 3]"], "step": 12, "state": "pending", "error": None,
    }  # fmt: skip
    assert kept.pending() is newest
    work.done = True
    assert kept.pending() is None
    assert newest.describe()["state"] == "finished"


def test_it_keeps_the_newest_and_counts_all() -> None:
    kept, group, other = Ring(), GroupFacts("a", [0, 1]), GroupFacts("b", [0, 1])
    for _ in range(ring.SIZE + 6):
        kept.record(group, allreduce(1))
    kept.record(other, allreduce(1))
    kept.record(other, Call("send", None, [torch.zeros(1)], None, (1, 0)))  # the others make no such call
    numbers = [entry.number for entry in kept]
    assert numbers == [*range(9, ring.SIZE + 7), 1, 0]
    assert kept.counts() == {"a": ring.SIZE + 6, "b": 1}


def test_it_keeps_neither_tensors_nor_works() -> None:
    kept = Ring()
    call, work = allreduce(1000), Work()
    tensor = weakref.ref(call.outputs[0])
    kept.record(GroupFacts("a", [0]), call).issued(work)
    assert kept.pending() is not None
    del call, work
    gc.collect()
    assert tensor() is None
    assert kept.pending() is None  # nobody can wait for it any more


def test_many_tensors_are_counted_and_not_listed() -> None:
    kept = Ring()
    call = Call("allreduce_coalesced", [torch.zeros(n) for n in range(9)], None, dist.AllreduceCoalescedOptions())
    said = kept.record(GroupFacts("a", [0]), call).describe()
    assert said["tensors"] == ["float32[0]", "float32[1]", "float32[2]", "float32[3]", "... 9 in all"]


def test_failures_keep_the_first_reason() -> None:
    kept = Ring()
    entries = [kept.record(GroupFacts("a", [0]), allreduce(1)) for _ in range(2)]
    kept.failed(entries[0], RuntimeError("[/x/pair.cc:5] Connection closed by peer. This is typical.\nmore"))
    kept.failed(entries[1], RuntimeError("later"))
    assert kept.error == "RuntimeError: Connection closed by peer"
    assert [entry.describe()["state"] for entry in kept] == ["failed", "failed"]
    kept.clear()
    assert (kept.error, list(kept), kept.counts()) == (None, [], {})
    assert brief(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_recording_is_cheap() -> None:
    """Beside what would tell the same, in one run: how long either takes depends on the machine."""
    kept, group, call = Ring(), GroupFacts("a", [0, 1]), allreduce(32, 64)

    def timed(depth: int, what: Callable[[], object], times: int) -> float:  # a forward pass is some 20 functions deep
        if depth:
            return timed(depth - 1, what, times)
        began = time.thread_time()
        for _ in range(times):
            what()
        return (time.thread_time() - began) / times

    recorded = min(timed(20, lambda: kept.record(group, call), 500) for _ in range(20))
    whole = min(timed(20, traceback.extract_stack, 50) for _ in range(10))
    assert recorded < SHARE * whole


def test_reading_while_another_thread_records() -> None:
    kept, group, call, stop = Ring(), GroupFacts("a", [0]), allreduce(1), threading.Event()

    def record() -> None:
        while not stop.is_set():
            kept.record(group, call)

    writer = threading.Thread(target=record)
    writer.start()
    try:
        for _ in range(300):
            numbers = [entry.number for entry in kept]
            assert numbers == sorted(numbers)
    finally:
        stop.set()
        writer.join()


def test_places_are_those_of_no_library() -> None:
    assert call_site().startswith(__file__)
    gate = threading.Event()
    waiting = threading.Thread(target=gate.wait)
    waiting.start()
    assert waiting.ident is not None
    frames = sys._current_frames()
    gate.set()
    waiting.join()
    assert where(frames[waiting.ident]) is None  # only the standard library is on its stack
    here = where(sys._getframe())
    assert here is not None
    assert here.endswith(" in test_places_are_those_of_no_library()")


def test_real_works_are_recorded_and_timed() -> None:
    from accelbridge.portable.process_group import RecordedWork, register

    register("recorded", "gloo")
    dist.init_process_group("recorded", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ring.RING.clear()
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert isinstance(work, RecordedWork)
        work.wait()
        assert ring.RING.waited > 0
        assert ring.RING.take_waited() > ring.RING.waited == 0
        (entry,) = ring.RING
        assert entry.describe()["state"] == "finished"
        assert entry.describe()["label"] == "default_pg"
    finally:
        dist.destroy_process_group()
