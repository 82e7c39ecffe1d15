"""The last collectives of this process, kept so that a hang or a crash can be described.

:class:`~accelbridge.portable.process_group.InterposedGroup` records every call here, and the works that it returns tell
when they are done. One ring serves all groups of a process: :data:`RING`. Recording costs a few microseconds and never
waits; texts are made only when somebody reads. Where a vendor's group stays native nothing is recorded, and that
vendor's own flight recorder has to answer.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from accelbridge.portable.lowerings import Call, flatten

SIZE = 64
"""Entries that are kept."""
POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})
"""Calls between two ranks: they are not counted, since the others of the group make no such call."""
_TENSORS = 4
"""Tensors of a call that are described; a coalesced one may have hundreds."""

# ----------------------------------------------------------------------------------------------- where a call is

_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen", "<eval_with_key")
_STDLIB = sysconfig.get_path("stdlib")
_hides: dict[CodeType, bool] = {}
"""Whether a function belongs to a library; asked for every frame of every collective."""


def is_library_file(file: str) -> bool:
    """Whether ``file`` belongs to torch, ``accelbridge.portable`` or the standard library."""
    return (file.startswith(_STDLIB) and "site-packages" not in file) or file.startswith(_HIDDEN)


def _is_library(code: CodeType) -> bool:
    hides = _hides[code] = is_library_file(code.co_filename)
    return hides


def visible_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from ``frame`` outwards that is outside torch, ``accelbridge.portable`` and the standard
    library (its contextlib stands between a decorated function and its caller); None where there is none."""
    while frame is not None:
        code = frame.f_code
        hides = _hides.get(code)
        if hides is None:
            hides = _is_library(code)
        if not hides:
            return frame
        frame = frame.f_back
    return None


def _in_thread_of_torch() -> str:
    return f"a thread of torch ({threading.current_thread().name})"


def call_site() -> str:
    """``file:line`` of the caller's innermost frame that is no library's (:func:`visible_frame`)."""
    frame = visible_frame(sys._getframe(1))
    return _in_thread_of_torch() if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def where(frame: FrameType | None) -> str | None:
    """``"file:line in function"`` of a running frame; None where only libraries are on its stack."""
    frame = visible_frame(frame)
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}()"


# ---------------------------------------------------------------------------------------------------- the ring


class Entry:
    """One collective that this rank has called."""

    __slots__ = (
        "_options",
        "_peer",
        "_place",
        "_tensors",
        "_work",
        "began",
        "done",
        "error",
        "group",
        "number",
        "op",
        "step",
    )

    def __init__(self, group: GroupFacts, number: int, step: int, call: Call) -> None:
        self.group, self.number, self.step, self.op, self._options = group, number, step, call.op, call.options
        self._peer = group.ranks[call.extra[0]] if call.op in ("send", "recv") else None
        given = call.outputs if call.inputs is None else call.inputs
        if isinstance(given, Tensor):
            self._tensors: tuple[Any, ...] = ((given.dtype, given.shape),)
        else:
            tensors = list(flatten(given))
            self._tensors = tuple((t.dtype, t.shape) for t in tensors[:_TENSORS])
            if len(tensors) > _TENSORS:
                self._tensors += (f"... {len(tensors)} in all",)
        frame = visible_frame(sys._getframe(2))
        self._place = _in_thread_of_torch() if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        self._work: Any = None
        self.done = False
        self.error: str | None = None
        self.began = time.monotonic()

    def issued(self, work: Any) -> None:
        """The library has taken the call; ``work`` tells when it is done. It is not kept alive: it holds tensors."""
        self._work = None if work is None else weakref.ref(work)

    def finished(self) -> bool:
        """Whether it is done, also where nobody has waited for it. Never blocks."""
        if not self.done and self._work is not None:
            work = self._work()
            # Without a work nobody can wait any more, so it keeps nobody.
            self.done = work is None or work.is_completed()
        return self.done

    def describe(self) -> dict[str, Any]:
        """This call as JSON data: what was called where, its ``age`` in seconds and its ``state``."""
        call = Call(self.op, options=self._options)
        state = "failed" if self.error is not None else "finished" if self.finished() else "pending"
        return {
            "group": self.group.name,
            "label": self.group.label,
            "ranks": self.group.ranks,
            "number": self.number,
            "op": self.op,
            "reduce_op": call.reduce_op,
            "root": call.root,
            "peer": self._peer,
            "tensors": [t if isinstance(t, str) else _shape(*t) for t in self._tensors],
            "step": self.step,
            "site": self._place if isinstance(self._place, str) else "{}:{}".format(*self._place),
            "age": round(time.monotonic() - self.began, 3),
            "state": state,
            "error": self.error,
        }


def brief(error: BaseException) -> str:
    """The class of ``error`` and its first sentence, without the source file that libraries put before it."""
    text = re.sub(r"^(\[[^\]]*\]\s*)+", "", str(error)).partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shape(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


class GroupFacts:
    """What an entry says of its group, and how many collectives the group has had."""

    def __init__(self, name: str, ranks: list[int]) -> None:
        self.name, self.label, self.ranks = name, "", ranks
        """``name`` is equal on all members; ``label`` is what people call it; ``ranks`` are global."""
        self.count = 0


class Ring:
    """The newest :data:`SIZE` collectives of this process; see the module's text."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=SIZE)
        self._groups: dict[str, GroupFacts] = {}
        self.step = 0
        """Number of the step being done, which the owner of the loop sets; 0: before the first."""
        self.waited = 0.0
        """Seconds that threads of this process have waited for collectives."""
        self.error: str | None = None
        """What the first collective that failed said."""

    def clear(self) -> None:
        """Begin a new run. Groups that still live go on counting."""
        self._entries.clear()
        self._groups.clear()
        self.step, self.waited, self.error = 0, 0.0, None

    def record(self, group: GroupFacts, call: Call) -> Entry:
        """Note that ``call`` is about to be made."""
        number = 0
        if call.op not in POINT_TO_POINT:
            group.count = number = group.count + 1
        self._groups[group.name] = group
        entry = Entry(group, number, self.step, call)
        self._entries.append(entry)
        return entry

    def failed(self, entry: Entry, error: BaseException) -> None:
        """Waiting for ``entry`` has raised ``error``."""
        entry.done, entry.error = True, brief(error)
        self.error = self.error or entry.error

    def take_waited(self) -> float:
        """:attr:`waited`, which starts anew."""
        waited, self.waited = self.waited, 0.0
        return waited

    def pending(self) -> Entry | None:
        """The oldest call that is not done."""
        return next((entry for entry in self._snapshot() if not entry.finished()), None)

    def newest(self) -> Entry | None:
        """The call made last."""
        entries = self._snapshot()
        return entries[-1] if entries else None

    def counts(self) -> dict[str, int]:
        """Collectives so far, by group."""
        return {name: group.count for name, group in list(self._groups.items())}

    def __iter__(self) -> Iterator[Entry]:
        """Oldest first."""
        return iter(self._snapshot())

    def _snapshot(self) -> list[Entry]:
        while True:
            try:
                return list(self._entries)
            except RuntimeError:  # another thread has recorded a call meanwhile
                continue


RING = Ring()
"""That of this process."""
