"""What every rank is told when one of them hangs, fails, differs or is gone; and that nobody is told without need.

Real gloo processes under a Trainer; the texts themselves, and who speaks when, are tested on data below.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelbridge import Trainer
from accelbridge.backend import World
from accelbridge.watch import verdict, watch
from accelbridge.watch.skew import IN_A_ROW, Skew
from accelbridge.watch.verdict import DONE, FAILED, Beat, Verdict, conclude, failure
from accelbridge.watch.watch import EVERY_S, Observer, Watch
from tests import cli
from tests.ranks import Outcome, Rank, outcomes, run_ranks

LIMIT_S = 3.0
STEP = 4


# ---------------------------------------------------------------------------------------------- real processes


def misbehave(what: str, rank: int, size: int) -> Any:
    """What the odd rank does in the model's forward of one step."""
    if what == "sleeps":
        time.sleep(60)
    if what == "calls another":
        dist.broadcast(torch.ones(3), 0)
    if what == "raises":
        raise ValueError("a reason of its own")
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "pauses":
        time.sleep(LIMIT_S / 2)
    return None


def train(ctx: Rank, folder: Path, store: Path, what: str, odd: int) -> Any:
    from accelbridge.models.decoder import Decoder

    ctx.launched()
    os.environ["TORCHELASTIC_RUN_ID"] = what
    original, calls = Decoder.forward, 0

    def forward(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == STEP and ctx.rank == odd:
            misbehave(what, ctx.rank, ctx.size)
        return original(self, *args, **kwargs)

    Decoder.forward = forward
    limits = {"timeout": LIMIT_S, "heartbeat_timeout": LIMIT_S}
    recipe = cli.recipe(folder / what, store, parallel=limits, train={"steps": 8, "global_batch_size": 6})
    return Trainer(recipe).fit().step


def hang(tmp_path: Path, store: Path, what: str, odd: int = 1, size: int = 3) -> list[Outcome]:
    return outcomes(train, size, tmp_path, store, what, odd, timeout=60)


def test_a_rank_that_does_not_come(tmp_path: Path, store: Path) -> None:
    found = hang(tmp_path, store, "sleeps")
    assert found[1].message == "exit code 69 without a result"  # its main thread never came back
    log = (tmp_path / "sleeps" / "logs" / "rank_1.log").read_text()
    assert "in misbehave" in log  # the stacks
    for text in (found[0].message, found[2].message, log):
        assert f"in step {STEP}" in text
        assert "ranks 0, 2 called it, rank 1 did not" in text
        assert "rank 1 (" in text
        assert "in no collective, at" in text
        assert "in misbehave()" in text
        assert "do: see what rank 1 did instead" in text
    assert {found[0].error, found[2].error} == {"CollectiveTimeout"}
    assert found[0].message == found[2].message


def test_ranks_that_call_different_things(tmp_path: Path, store: Path) -> None:
    found = hang(tmp_path, store, "calls another", size=2)
    assert [o.error for o in found] == ["CollectiveTimeout"] * 2
    for o in found:
        assert "the ranks called different things: op: all_gather_single on rank 0; broadcast on rank 1" in o.message
        assert "broadcast float32[3] root 0 at" in o.message


def test_a_rank_that_fails_tells_the_others_why(tmp_path: Path, store: Path) -> None:
    found = hang(tmp_path, store, "raises")
    assert (found[1].error, found[1].message) == ("ValueError", "a reason of its own")
    for o in (found[0], found[2]):
        assert o.error == "RankFailed"
        assert "found: rank 1 " in o.message
        assert "failed with ValueError: a reason of its own" in o.message


def test_a_rank_that_is_killed_is_named_within_seconds(tmp_path: Path, store: Path) -> None:
    found = hang(tmp_path, store, "is killed", odd=0)  # the one that judges otherwise
    for o in found[1:]:
        assert o.error == "RankFailed"
        assert "found: rank 0 gave no sign of life for" in o.message
        assert "last seen" in o.message


def test_a_pause_within_the_limit_is_none(tmp_path: Path, store: Path) -> None:
    found = hang(tmp_path, store, "pauses", size=2)
    assert [o.value for o in found] == [8, 8], found


# ----------------------------------------------------------------------------------------------- texts on data


def call(**changes: Any) -> dict[str, Any]:
    base = {
        "group": "g", "label": "mesh_dp_shard", "ranks": [0, 1, 2], "number": 7, "op": "allreduce", "reduce_op": "SUM",
        "root": None, "peer": None, "tensors": ["float32[4]"], "step": 3, "site": "model.py:5", "age": 9.0,
        "state": "pending", "error": None,
    }  # fmt: skip
    return base | changes


def beat(rank: int, **changes: Any) -> Beat:
    return replace(Beat(rank, f"host{rank}", 100 + rank, 1, step=3, where="train.py:9 in f()"), **changes)


def waiting(rank: int, **changes: Any) -> Beat:
    entry = call(**changes)
    return beat(rank, call=entry, ring=(entry,), counts={"g": entry["number"]})


def text_of(beats: list[Beat], silent: Mapping[int, float] | None = None) -> str:
    return conclude({b.rank: b for b in beats}, silent or {}, 5.0, 10.0).text


def test_absent_ranks_are_told_from_those_that_arrived_and_those_that_went_on() -> None:
    ahead = beat(2, counts={"g": 9}, call=call(number=9, age=1.0), ring=())
    text = text_of([waiting(0), beat(1, counts={"g": 6}), ahead])
    assert text.startswith(
        "asked: allreduce SUM float32[4], collective 7 of group 'mesh_dp_shard' (ranks 0, 1, 2), in step 3, at "
        "model.py:5\nfound: after 9.0 s ranks 0, 2 called it, rank 1 did not\n"
    )
    assert "  rank 1 (host1, process 101): in step 3, in no collective, at train.py:9 in f()\n" in text


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"tensors": ["float32[5]"]}, "tensors: float32[4] on ranks 0, 2; float32[5] on rank 1"),
        ({"reduce_op": "MAX"}, "reduce op: SUM on ranks 0, 2; MAX on rank 1"),
        ({"op": "broadcast", "reduce_op": "", "root": 1}, "op: allreduce on ranks 0, 2; broadcast on rank 1"),
    ],
)
def test_calls_that_do_not_fit_are_named(changes: dict[str, Any], difference: str) -> None:
    assert f"called different things: {difference}\n" in text_of([waiting(0), waiting(1, **changes), waiting(2)])


def test_tensors_of_a_gather_may_differ() -> None:
    beats = [waiting(0, op="gather", root=0), waiting(1, op="gather", root=0, tensors=["float32[9]"])]
    assert "all its ranks called it, and it did not finish" in text_of(beats)


def test_a_message_that_does_not_come() -> None:
    asks = {"number": 0, "op": "recv", "reduce_op": "", "peer": 0, "age": 20.0}
    text = text_of([waiting(0), waiting(1, **asks), waiting(2)])
    assert "ranks 0, 2 called it, rank 1 did not" in text
    assert "rank 1 (host1, process 101): in step 3, for 20.0 s in recv float32[4] peer 0" in text
    text = text_of([beat(0), waiting(1, **asks), beat(2)])
    assert text.startswith("asked: recv float32[4] peer 0, in group 'mesh_dp_shard'")
    assert "found: after 20.0 s it did not finish" in text
    assert "do: see whether the peer makes the call that fits" in text


def test_lost_ranks_are_named_with_where_they_were_seen() -> None:
    found = conclude({0: waiting(0), 1: beat(1, step=2)}, {1: 12.0}, 5.0, 10.0)
    assert "found: rank 1 gave no sign of life for 12.0 s" in found.text
    assert "parallel.heartbeat_timeout" in found.text
    assert found.last_seen == {"1": "in step 2, in no collective, at train.py:9 in f()"}
    assert "parallel.heartbeat_timeout" not in conclude({0: waiting(0), 1: beat(1)}, {1: 3.0}, 5.0, 10.0).text


def test_a_rank_that_has_ended_and_one_outside_the_group() -> None:
    text = text_of([waiting(0, ranks=[0, 1]), beat(1, state=DONE), beat(2)])
    assert "rank 1 (host1, process 101): had ended its run at step 3" in text
    assert "rank 2 (host2, process 102): in step 3" in text


def test_verdicts_survive_the_store() -> None:
    given = failure(beat(1), ValueError("why\nmore"))
    assert Verdict.decode(given.encode()) == given
    assert "rank 1 (host1, process 101) failed with ValueError: why" in given.text
    assert Beat.decode(waiting(1).encode()).call == call()


# ----------------------------------------------------------------------------------------- who is silent, slow


def test_silence_is_counted_from_the_last_beat_and_not_while_we_were_stopped() -> None:
    observer = Observer()
    observer.see({0: beat(0), 1: beat(1)}, 0.0)
    observer.see({0: beat(0, count=2), 1: beat(1)}, 0.5)
    beats = {0: beat(0, count=3), 1: beat(1)}
    observer.see(beats, 1.0)
    assert observer.silence(beats, 1.0) == {0: 0.0, 1: 1.0}
    observer.see(beats, 31.0)  # this process was stopped for half a minute
    assert observer.silence(beats, 31.0)[1] == pytest.approx(1.0 + 3 * EVERY_S)
    assert observer.silence({1: beat(1, state=FAILED)}, 31.0) == {}


def test_slow_ranks_are_named_once_after_some_intervals() -> None:
    skew, said = Skew(3), []
    for number in range(1, IN_A_ROW + 3):
        beats = [beat(rank, interval=10 * number, busy=0.3 if rank == 2 else 0.1) for rank in range(3)]
        said.append(skew.see(beats))
        assert skew.see(beats) == []  # the same interval again
    want = {"step": 10 * IN_A_ROW, "rank": 2, "ratio": 3.0, "seconds": 0.3}
    assert [found for found in said if found] == [[want]]


def test_ranks_are_compared_at_the_same_step_only() -> None:
    skew = Skew(2)
    for number in range(9):
        assert skew.see([beat(0, interval=number + 1, busy=1.0), beat(1, interval=number, busy=0.1)]) == []


# -------------------------------------------------------------------------------------- the watch without a run


def apart(ctx: Rank, what: str) -> list[str]:
    """A watch on each rank, and no process group: what it says of a rank that is through, or that stays."""
    seen: list[str] = []
    original: Callable[..., Verdict] = watch.conclude
    watch.conclude = lambda *args: seen.append("judged") or original(*args)
    world = World(ctx.rank, ctx.size, run_id=what)
    watched = Watch(world, 0.8, 0.8)
    watched.start(ctx.store(), world)
    if what == "one leaves" and ctx.rank == 0:
        watched.close()
    else:
        time.sleep(2.0)
        watched.close()
    return seen


@pytest.mark.parametrize("what", ["one leaves", "all stay"])
def test_slowness_of_all_and_an_early_end_are_no_hang(what: str) -> None:
    assert run_ranks(apart, 3, what) == [[], [], []]


def test_one_process_is_not_watched() -> None:
    alone = Watch(World(), 1.0, 1.0)
    alone.start(dist.HashStore(), World())
    alone.begin(1)
    alone.step_done(0.1)
    assert alone.interval_done() == []
    assert alone.explain(ValueError("x")) is None
    alone.close()


def test_which_errors_are_about_other_ranks() -> None:
    watch.RING.clear()
    assert watch.broken(RuntimeError("[../gloo/transport/tcp/pair.cc:537] Connection closed by peer [::1]:5"))
    assert not watch.broken(ValueError("Connection to the tracker"))
    assert not watch.broken(SystemExit("/gloo/"))
    assert verdict.MAY_DIFFER
