"""A thread per rank that turns hangs and lost ranks into one error on every rank.

Twice a second each rank says in the CPU store where it is: its step, its oldest collective that is not done, the line
its main thread is at. The lowest rank that is alive reads all of it, the others only that one's and a verdict: the
store's traffic is O(N). A verdict is due when a collective has been pending for longer than ``parallel.timeout``, when
one has failed, or when a rank that others wait for gives no sign of life; then every rank adds its ring of collectives,
and the text is made of all of them (:mod:`accelbridge.watch.verdict`). A rank that fails by itself puts up its reason
at once. A main thread that does not come back with the verdict, stuck in a library or in a loop, is ended from here.

What is slow on all ranks alike (compiling, evaluating, saving, reading data) is no hang: nobody waits for anybody.
All times are monotonic, so a jump of the clock changes nothing, and a rank that was stopped itself counts nobody's
silence meanwhile.
"""

# pyright: reportPrivateImportUsage=false
# (torch.distributed re-exports without saying so)

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accelbridge.backend import World
from accelbridge.errors import RankFailed, RunFailed
from accelbridge.portable.ring import RING, brief, where
from accelbridge.train.last_words import report
from accelbridge.train.logs import log
from accelbridge.watch.recorded import Recorder, Trace, oldest_pending
from accelbridge.watch.recorded import counts as count_of
from accelbridge.watch.skew import Skew
from accelbridge.watch.verdict import DONE, FAILED, RUNNING, Beat, Verdict, conclude, failure

EVERY_S = 0.5
"""Between two beats."""
LOST_S = 2.5
"""Silence that counts as lost where a connection has broken already."""
GRACE_S = 5.0
"""How long a main thread may take to fail with the verdict before it is ended."""
ANSWER_S = 3.0
"""How long ranks may take to add their ring once it is asked for."""
STALL_S = 1.0
"""Without any progress for so long, a beat says where the threads are."""
RECORD_S = 30.0
"""Without any progress for so long, or a quarter of the time limit, the library's own record is read."""
_THREADS = "accelbridge-"
_OURS = ("accelbridge-watch", "accelbridge-watch-recorder", "accelbridge-parent")
_BROKEN = ("/gloo/", "Connection closed by peer", "Connection reset by peer", "Socket Timeout", "wait timeout")
"""Texts of errors that say: another rank, or the way to it."""


def broken(error: BaseException) -> bool:
    """Whether ``error`` is about another rank: a collective or the store that failed, rather than this rank."""
    if RING.error is not None or isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return not isinstance(error, (KeyboardInterrupt, SystemExit)) and any(text in str(error) for text in _BROKEN)


class Observer:
    """How long each rank has been silent, as seen from here."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        self._last: float | None = None

    def see(self, beats: Mapping[int, Beat], now: float) -> None:
        """Take in what the ranks said last, ``now`` on a monotonic clock."""
        # Stopped ourselves, we saw nobody: that pause is not theirs.
        pause = max(0.0, now - self._last - 3 * EVERY_S) if self._last is not None else 0.0
        self._last = now
        for rank, beat in beats.items():
            count, at = self._seen.get(rank, (-1, now))
            self._seen[rank] = (beat.count, now) if beat.count != count else (count, at + pause)

    def silence(self, beats: Mapping[int, Beat], now: float) -> dict[int, float]:
        """Seconds without a beat, of the ranks that have not said that they end."""
        return {rank: now - self._seen[rank][1] for rank, beat in beats.items() if beat.state == RUNNING}


class Watch:
    """Watches one run, from :meth:`start` to :meth:`close`. One process alone is not watched.

    The owner of the loop calls :meth:`begin`, :meth:`step_done` and :meth:`interval_done`, and :meth:`explain` with an
    error. ``logs`` is the folder of the ranks' logs.
    """

    def __init__(self, world: World, timeout_s: float, heartbeat_timeout_s: float, logs: Path | None = None) -> None:
        self._world, self._timeout_s, self._silence_s = world, timeout_s, heartbeat_timeout_s
        self._log = logs / f"rank_{world.rank}.log" if logs is not None else None
        self._lock = threading.Lock()
        """Over what the two threads share below."""
        self._state, self._failed = RUNNING, None
        self._verdict: Verdict | None = None
        self._judged = threading.Event()
        self._own_error = False
        self._slow: list[dict[str, float | int]] = []
        self._busy, self._steps, self._interval = 0.0, 0, (0, 0.0)
        self._count = 0
        self._progress: tuple[int, Mapping[str, int]] = (0, {})
        self._progress_at = time.monotonic()
        self._seen: tuple[str | None, dict[str, str]] = (None, {})
        self._main = threading.get_ident()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._store: dist.Store | None = None
        self._recorder = Recorder(None)

    def start(self, store: dist.Store, world: World, trace: Trace | None = None) -> None:
        """Begin to watch ``world``, whose ``run_id`` is that of this start of the ranks; every rank has agreed to run.
        What is shown of this rank is the stack of the thread that calls this. ``trace`` tells what the collective
        library has recorded itself (:meth:`accelbridge.backend.Collectives.trace`)."""
        self._world = world
        self._recorder = Recorder(trace)
        RING.clear()
        self._main = threading.get_ident()
        self._store = self._connect(store) if self._world.size > 1 else None
        if self._store is not None:
            self._thread = threading.Thread(target=self._run, name=_OURS[0], daemon=True)
            self._thread.start()

    def _connect(self, store: dist.Store) -> dist.Store | None:
        """A connection of our own: a client of torch's serialises its calls, and others wait in theirs."""
        if not isinstance(store, dist.TCPStore):
            return None
        limit = timedelta(seconds=max(self._silence_s, 1.0))
        own = dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=limit)
        run = dist.PrefixStore(f"watch/{self._world.run_id}/{self._world.restart}", own)
        # A process may train twice in one run.
        return dist.PrefixStore(str(run.add(f"begun/{self._world.rank}", 1)), run)

    # ------------------------------------------------------------------------------------- the main thread's calls

    def begin(self, step: int) -> None:
        """Step number ``step`` is the first to be done now."""
        RING.step = step
        RING.take_waited()

    def step_done(self, seconds: float) -> float:
        """A step took ``seconds`` on the host, waiting for collectives included; returns the seconds of that."""
        RING.step += 1
        waited = RING.take_waited()
        self._busy += seconds - waited
        self._steps += 1
        return waited

    def interval_done(self) -> list[dict[str, float | int]]:
        """The metrics have been read, and what followed is done; returns the ranks found slow since
        (:meth:`Skew.see`), on rank 0. Asks nobody: what it returns came over the store."""
        RING.take_waited()
        self._interval = (RING.step - 1, self._busy / max(self._steps, 1))
        self._busy, self._steps = 0.0, 0
        with self._lock:
            slow, self._slow = self._slow, []
        return slow

    def explain(self, error: BaseException) -> RunFailed | None:
        """What the run has failed with, where ``error`` is only what that looked like from here.

        None where ``error`` is this rank's own; the others are told of it then. Waits for the verdict as long as it
        can take: a dead rank is known to be dead only after a while.
        """
        if self._store is None:
            return None
        if not broken(error):
            self._own_error = True
            self._put_up(failure(self._beat(), error))
            self._state = FAILED
            self._wake.set()
            return None
        RING.error = self._failed = RING.error or brief(error)
        self._wake.set()
        self._judged.wait(self._silence_s + ANSWER_S + GRACE_S)
        return self._verdict.error() if self._verdict is not None else RankFailed(self._alone())

    def close(self) -> None:
        """End the thread, and say that this rank is through. Safe to repeat."""
        if self._store is None or self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        self._thread.join(2 * EVERY_S)
        if self._state == RUNNING:
            self._state = DONE if self._failed is None else FAILED
        self._try_beat()

    # ---------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        assert self._store is not None
        seat = _Seat(self._world, self._store, self._timeout_s, self._silence_s)
        doomed: float | None = None
        while not self._closed.is_set():
            try:
                self._store.set(f"beat/{self._world.rank}", self._beat().encode())
                self._learn(seat.look(lambda: self._beat(ring=True).encode()))
            except RuntimeError as error:  # whatever class torch gives a store that is gone
                log.warning("the store of this run is lost (%s); hangs are no longer named", _first_line(error))
                self._judged.set()
                return
            with self._lock:
                self._slow += seat.slow()
            if self._verdict is not None and not self._own_error:
                doomed = doomed or time.monotonic() + GRACE_S
                if time.monotonic() > doomed:
                    self._end(self._verdict)
            self._wake.wait(EVERY_S)
            self._wake.clear()

    def _learn(self, verdict: Verdict | None) -> None:
        if verdict is not None and self._verdict is None:
            self._verdict = verdict
            self._judged.set()
            log.error("the run cannot go on\n%s", verdict.text)

    def _beat(self, ring: bool = False) -> Beat:
        entry = RING.pending() or RING.newest()
        call, counts = (None, RING.counts()) if entry is None else (entry.describe(), RING.counts())
        calls = [each.describe() for each in RING] if ring else []
        main, threads = self._places(look=ring)
        if call is None and (ring or self._stalled(min(RECORD_S, self._timeout_s / 4))):  # groups are native
            calls = [self._with_ranks(each) for each in self._recorder.ask()]
            call, counts = oldest_pending(calls), count_of(calls)
        self._count += 1
        return Beat(
            self._world.rank,
            socket.gethostname(),
            os.getpid(),
            self._count,
            self._state,
            RING.step,
            main,
            threads,
            call,
            counts,
            self._failed or RING.error,
            calls if ring else (),
            *self._interval,
        )

    def _with_ranks(self, call: dict[str, Any]) -> dict[str, Any]:
        """A library may leave out the members of the group that holds all ranks."""
        return call if call["ranks"] else {**call, "ranks": list(range(self._world.size))}

    def _stalled(self, seconds: float) -> bool:
        """Whether nothing has moved for so long, as far as beats have seen."""
        return time.monotonic() - self._progress_at > seconds

    def _places(self, look: bool) -> tuple[str | None, dict[str, str]]:
        """Where the main thread is, and others of ours; not known while the run makes progress.

        Looked up once in a stall and when asked: to look at a frame can keep its tensors alive beyond their time, which
        took 8 % more memory at the peak when it was done with every beat.
        """
        progress, now = (RING.step, RING.counts()), time.monotonic()
        if progress != self._progress:
            self._progress, self._progress_at, self._seen = progress, now, (None, {})
        if look or (self._seen[0] is None and now - self._progress_at > STALL_S):
            self._seen = self._look()
        return self._seen

    def _look(self) -> tuple[str | None, dict[str, str]]:
        if self._main == threading.get_ident():
            return None, {}
        frames = sys._current_frames()
        threads = {
            thread.name: place
            for thread in threading.enumerate()
            if thread.name.startswith(_THREADS) and thread.name not in _OURS
            if thread.ident in frames and (place := where(frames[thread.ident])) is not None
        }
        return where(frames.get(self._main)) or "code of a library", threads

    def _put_up(self, verdict: Verdict) -> None:
        assert self._store is not None
        try:
            self._learn(_publish(self._store, verdict))
        except RuntimeError as error:
            log.warning("the others could not be told: %s", _first_line(error))

    def _try_beat(self) -> None:
        assert self._store is not None
        try:
            self._store.set(f"beat/{self._world.rank}", self._beat().encode())
        except RuntimeError:
            log.info("the store was gone before this rank could say that it is through")

    def _alone(self) -> str:
        call = RING.pending() or RING.newest()
        asked = f"{call.describe()['op']} at {call.describe()['site']}" if call is not None else "the run's set-up"
        return (
            f"asked: {asked}, in step {RING.step}\nfound: {self._failed}; the other ranks did not say why\n"
            "do: see their logs, and whether the process that hosts the store (the launcher or rank 0) lives"
        )

    def _end(self, verdict: Verdict) -> None:
        """End this process for its main thread, which does not come back."""
        error = verdict.error()
        log.error("the main thread did not come back in %g s; ending this process", GRACE_S)
        if self._log is not None and self._log.parent.is_dir():
            with self._log.open("a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        report(verdict.text, time.time(), verdict.last_seen)
        os._exit(error.exit_code)


def _publish(store: dist.Store, verdict: Verdict) -> Verdict:
    """Put up a verdict, and return the one that stands: the first."""
    return Verdict.decode(store.compare_set("verdict", "", verdict.encode()))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


class _Seat:
    """One rank's view of the others: rank 0, or the lowest that lives, judges; the others wait for a verdict."""

    def __init__(self, world: World, store: dist.Store, timeout_s: float, silence_s: float) -> None:
        self._world, self._store = world, store
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self._observer = Observer()
        self._skew = Skew(world.size)
        self._found: list[dict[str, float | int]] = []
        self._questions = self._answered = 0
        self._asked_at: float | None = None

    def slow(self) -> list[dict[str, float | int]]:
        """Ranks newly found slow."""
        found, self._found = self._found, []
        return found

    def look(self, ring: Callable[[], str]) -> Verdict | None:
        """What stands in the store, after having done this rank's part; ``ring()`` gives its beat with the ring."""
        if self._store.check(["verdict"]):
            return Verdict.decode(self._store.get("verdict"))
        if self._store.check(["question"]) and (number := int(self._store.get("question"))) > self._answered:
            self._answered = number
            self._store.set(f"ring/{number}/{self._world.rank}", ring())
        now = time.monotonic()
        beats = self._read([0]) if self._world.rank else {}
        if beats is None:
            return None
        self._observer.see(beats, now)
        if beats and not self._deputy(beats[0], now):
            return None
        beats = self._read(range(self._world.size))
        if beats is None:
            return None
        self._observer.see(beats, now)
        self._found += self._skew.see(beats.values())
        return self._judge(beats, self._observer.silence(beats, now), now)

    def _read(self, ranks: Iterable[int]) -> dict[int, Beat] | None:
        """The last beats; None while a rank has not begun."""
        keys = [f"beat/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return None
        beats = [Beat.decode(text) for text in self._store.multi_get(keys)]
        return {beat.rank: beat for beat in beats}

    def _deputy(self, zero: Beat, now: float) -> bool:
        """Whether rank 0 is out, and this is the first of the others. Each lets those before it go first."""
        out = zero.state != RUNNING or self._observer.silence({0: zero}, now)[0] > LOST_S
        if not out:
            return False
        lower = self._read(range(1, self._world.rank))
        if lower is None:
            return False
        self._observer.see(lower, now)
        silence = self._observer.silence(lower, now)
        return all(silence.get(rank, self._silence_s) > LOST_S for rank in lower)

    def _judge(self, beats: dict[int, Beat], silence: Mapping[int, float], now: float) -> Verdict | None:
        if not self._trouble(beats, silence):
            self._asked_at = None
            return None
        if self._asked_at is None:
            self._asked_at = now
            self._questions = self._store.add("questions", 1)
            self._store.set("question", str(self._questions))
            return None
        keys = {rank: f"ring/{self._questions}/{rank}" for rank in beats}
        rings = {rank: Beat.decode(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        lost = {rank: seconds for rank, seconds in silence.items() if seconds > LOST_S}
        accounted = rings.keys() | lost.keys() | {rank for rank, beat in beats.items() if beat.state != RUNNING}
        # Where a connection broke, a rank that answered may be dead by now; where one is only late, it has its time.
        broke = any(beat.failed is not None for beat in beats.values())
        patience = max(self._silence_s, ANSWER_S) if broke and not lost else ANSWER_S
        if accounted != beats.keys() and now - self._asked_at < patience:
            return None
        said = {rank: rings[rank] if rank in rings and rank not in lost else beat for rank, beat in beats.items()}
        return _publish(self._store, conclude(said, lost, self._timeout_s, self._silence_s))

    def _trouble(self, beats: Mapping[int, Beat], silence: Mapping[int, float]) -> bool:
        """Whether the run cannot go on by itself."""
        if any(beat.failed is not None for beat in beats.values()):
            return True
        waits = {rank: beat.waits for rank, beat in beats.items() if beat.waits is not None and beat.state == RUNNING}
        silent = [rank for rank, seconds in silence.items() if seconds > self._silence_s]
        overdue = any(seconds > self._timeout_s for rank, seconds in waits.items() if rank not in silent)
        return overdue or bool(silent and any(rank not in silent for rank in waits))
