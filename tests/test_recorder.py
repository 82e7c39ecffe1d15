"""The vendor's flight recorder in our hang reports: its format, and a hang of groups that our ring doesn't see."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from accelbridge.backend import World
from accelbridge.errors import CollectiveTimeout
from accelbridge.portable import recorder
from accelbridge.portable.ring import RING
from accelbridge.watch import watch
from accelbridge.watch.recorded import Recorder, counts, oldest_pending
from accelbridge.watch.watch import Watch
from tests.ranks import Rank, run_ranks

NOW = 2_000_000_000_000
ENTRY: Mapping[str, Any] = {  # keys and kinds as torch 2.13 dumps them (a gloo all_reduce, seen; the name is NCCL's)
    "frames": [
        {"name": "all_reduce", "filename": recorder.__file__.replace("recorder.py", "x.py"), "line": 7},
        {"name": "step", "filename": "/home/someone/train.py", "line": 41},
    ],
    "record_id": 4,
    "pg_id": 0,
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 5,
    "p2p_seq_id": 0,
    "op_id": 5,
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": NOW - 3_500_000_000,
    "input_sizes": [[4, 3]],
    "input_dtypes": ["BFloat16"],
    "output_sizes": [[4, 3]],
    "output_dtypes": ["BFloat16"],
    "state": "started",
    "time_discovered_started_ns": NOW - 3_400_000_000,
    "time_discovered_completed_ns": None,
    "retired": False,
    "timeout_ms": 600000,
    "is_p2p": False,
}


def dump(*entries: Mapping[str, Any], ranks: str = "[0, 1]") -> bytes:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return pickle.dumps({"version": "2.10", "pg_config": groups, "entries": [dict(entry) for entry in entries]})


def test_an_entry_becomes_one_of_our_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RING, "step", 7)
    (found,) = recorder.entries(dump(ENTRY), NOW)
    assert found == {
        "group": "0", "label": "default_pg", "ranks": [0, 1], "number": 5, "op": "all_reduce", "reduce_op": "",
        "root": None, "peer": None, "tensors": ["bfloat16[4, 3]"], "step": 7, "site": "/home/someone/train.py:41",
        "age": 3.5, "state": "pending", "error": None,
    }  # fmt: skip


@pytest.mark.parametrize("change", [{"state": "completed"}, {"retired": True}])
def test_what_is_done_does_not_wait(change: Mapping[str, Any]) -> None:
    (found,) = recorder.entries(dump({**ENTRY, **change}), NOW)
    assert found["state"] == "finished"


def test_a_message_is_not_counted() -> None:
    message = {**ENTRY, "is_p2p": True, "profiling_name": "nccl:send 0->1"}
    (found,) = recorder.entries(dump(message), NOW)
    assert (found["op"], found["number"]) == ("send 0->1", 0)


def test_without_frames_and_members_it_says_so() -> None:
    bare = {key: value for key, value in ENTRY.items() if key != "frames"}
    (found,) = recorder.entries(dump(bare, ranks=""), NOW)
    assert (found["ranks"], found["site"]) == ([], "a place that torch did not record")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (threading.Event, ())


def test_a_dump_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    evil = pickle.dumps({"entries": [Evil()]})
    with pytest.raises(pickle.UnpicklingError, match=r"threading\.Event"):
        recorder.entries(evil, NOW)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", lambda: evil)  # pyright: ignore[reportAttributeAccessIssue]
    assert recorder.read() == []


def recorded_by_torch(ctx: Rank) -> list[dict[str, Any]]:
    import os

    os.environ["TORCH_FR_BUFFER_SIZE"] = "20"  # read when the first group is made
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=ctx.store(), rank=ctx.rank, world_size=ctx.size)
    dist.all_reduce(torch.ones(2, 3))
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + 10  # the group's own thread marks a call as finished, a little after it has returned
    while time.monotonic() < deadline and not (found and all(call["state"] == "finished" for call in found)):
        found = recorder.read(("_no_such_function", "_dump_fr_trace"))
        time.sleep(0.05)
    dist.destroy_process_group()
    return found


def test_torchs_own_recorder_is_read() -> None:
    for found in run_ranks(recorded_by_torch, 2):
        (call,) = [each for each in found if each["op"] == "all_reduce"]
        assert (call["tensors"], call["number"], call["state"]) == (["float32[2, 3]"], 1, "finished")
        assert "test_recorder.py:" in call["site"]


# ------------------------------------------------------------------------------------------------- the watch


def hung(ctx: Rank) -> str:
    """Native groups: rank 0 waits in its 5th collective, rank 1 has never called it."""
    now = time.time_ns()
    mine = {**ENTRY, "time_created_ns": now, "record_id": ctx.rank}
    if ctx.rank == 1:
        mine |= {"collective_seq_id": 4, "retired": True}
    world = World(ctx.rank, ctx.size)
    watched = Watch(world, 1.5, 60.0)
    watch.GRACE_S = 60.0  # this thread isn't stuck in a library, and needs no end from outside
    watched.start(ctx.store(), world, lambda: recorder.entries(dump(mine, ranks=""), time.time_ns()))
    try:
        deadline = time.monotonic() + 20
        while watched._verdict is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert watched._verdict is not None
        assert isinstance(watched._verdict.error(), CollectiveTimeout)
        return watched._verdict.text
    finally:
        watched.close()


def test_a_hang_in_native_groups_is_named_by_the_vendors_record() -> None:
    texts = run_ranks(hung, 2)
    assert texts[0] == texts[1]
    assert "all_reduce bfloat16[4, 3], collective 5 of group 'default_pg' (ranks 0, 1)" in texts[0]
    assert "rank 0 called it, rank 1 did not" in texts[0]
    assert "at /home/someone/train.py:41" in texts[0]


def test_a_recorder_that_hangs_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []
    stuck = threading.Event()

    def trace() -> list[Mapping[str, Any]]:
        asked.append(1)
        stuck.wait(30)
        return []

    slow = Recorder(trace, limit_s=0.05)
    assert (slow.ask(), slow.ask(), asked) == ([], [], [1])
    stuck.set()


def test_a_recorder_that_fails_is_asked_once() -> None:
    asked: list[int] = []

    def trace() -> list[Mapping[str, Any]]:
        asked.append(1)
        raise OSError("gone")

    broken = Recorder(trace)
    assert (broken.ask(), broken.ask(), asked) == ([], [], [1])


def test_which_call_is_spoken_of() -> None:
    done, waits = {"state": "finished", "group": "0", "number": 3}, {"state": "pending", "group": "0", "number": 4}
    assert oldest_pending([done, waits]) is waits
    assert oldest_pending([done]) is done
    assert oldest_pending([]) is None
    assert counts([done, waits]) == {"0": 4}
