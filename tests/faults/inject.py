"""In a rank: do something wrong at a given place and step of an otherwise ordinary run."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PER_STEP = 4
"""Samples of a step on each of two ranks."""

Action = Callable[[], Any]


def inject(faults: str, rank: int) -> None:
    """Install those of ``faults`` (JSON: a list of ``[place, rank or null, step, action]``) that are this rank's."""
    for place, who, step, action in json.loads(faults):
        if who is None or who == rank:
            PLACES[place](step, _marked(ACTIONS[action]))


def _marked(action: Action) -> Action:
    """``action``, which first notes the time in the file FAULT_AT."""

    def act() -> Any:
        path = Path(os.environ["FAULT_AT"])
        if not path.exists():
            path.write_text(str(time.time()))
        return action()

    return act


# ------------------------------------------------------------------------------------------------------ places


def _wrap(owner: Any, name: str, before: Callable[[], Any], after: Callable[[Any, Any], Any] | None = None) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = before()
        result = original(*args, **kwargs)
        return after(given, result) if after is not None else result

    setattr(owner, name, wrapped)


def _at_call(number: int, action: Action, counts: Callable[[], bool] = lambda: True) -> Callable[[], Any]:
    calls = 0

    def before() -> Any:
        nonlocal calls
        if not counts():
            return None
        calls += 1
        return action() if calls == number else None

    return before


def in_model(step: int, action: Action) -> None:
    from accelbridge.models.decoder import Decoder

    _wrap(Decoder, "forward", _at_call(step, action, torch.is_grad_enabled))


def in_evaluation(step: int, action: Action) -> None:
    from accelbridge.models.decoder import Decoder

    _wrap(Decoder, "forward", _at_call(step, action, lambda: not torch.is_grad_enabled()))


def in_loss(step: int, action: Action) -> None:
    """What the action returns is the factor of the loss."""
    from accelbridge.train.loss import NextTokenLoss

    _wrap(NextTokenLoss, "__call__", _at_call(step, action), lambda f, loss: loss if f is None else loss * f)


def in_data(step: int, action: Action) -> None:
    """What the action returns changes the sample."""
    from accelbridge.data.loader import PackedSamples

    before = _at_call((step - 1) * PER_STEP + 1, action)
    _wrap(PackedSamples, "__getitem__", before, lambda change, sample: sample if change is None else change(sample))


def in_save(number: int, action: Action) -> None:
    from accelbridge.checkpoint.save import Checkpointer

    _wrap(Checkpointer, "_write", _at_call(number, action))


def at_start(_: int, action: Action) -> None:
    from accelbridge.train.trainer import Trainer

    _wrap(Trainer, "__init__", _at_call(1, action))


PLACES: dict[str, Callable[[int, Action], None]] = {
    "model": in_model,
    "evaluation": in_evaluation,
    "loss": in_loss,
    "data": in_data,
    "save": in_save,
    "start": at_start,
}

# ----------------------------------------------------------------------------------------------------- actions


def _rank() -> int:
    return int(os.environ["RANK"])


def _signal(number: int) -> Action:
    return lambda: os.kill(os.getpid(), number)


def _raise(error: BaseException) -> Action:
    def act() -> None:
        raise error

    return act


def _loop() -> None:
    while True:
        pass


def _hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1000)  # PyDLL does not release the interpreter's lock


def _slow_step() -> None:
    """From now on this rank's steps take longer than all else they do."""
    from accelbridge.models.decoder import Decoder

    _wrap(Decoder, "forward", lambda: time.sleep(0.1))


def _halve(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t[: len(t) // 2] for name, t in sample.items()}


def _mark_targets(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    """Token ids far outside the vocabulary."""
    return {**sample, "tokens": torch.full_like(sample["tokens"], 10**6)}


def _differ(*calls: Callable[[], Any]) -> Action:
    """Each rank makes its own call, by rank."""
    return lambda: calls[_rank()]()


def _reduce(elements: int = 4, dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> Callable[[], Any]:
    return lambda: dist.all_reduce(torch.ones(elements, dtype=dtype), op)


def _twice(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: (first(), second())


def _broadcast(root: int = 0) -> Callable[[], Any]:
    return lambda: dist.broadcast(torch.ones(4), root)


def _gather() -> None:
    dist.all_gather([torch.ones(4) for _ in range(dist.get_world_size())], torch.ones(4))


def _limit_files() -> None:
    """As a full disk does, but for this process alone: a write beyond it fails, by the kernel."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def _jump() -> None:
    """The clock goes back an hour, as after a wrong NTP answer."""
    real = time.time
    time.time = lambda: real() - 3600


def _other_torch() -> None:
    """As where one host has another installation."""
    from accelbridge.cpu import backend

    backend.version = lambda _: "2.12.1"


def _end_data_thread() -> None:
    assert threading.current_thread().name.startswith("accelbridge-data")
    sys.exit(5)


def _end_store() -> None:
    os.kill(int(os.environ["STORE_HOST"]), signal.SIGKILL)


ACTIONS: dict[str, Action] = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(7)": lambda: os._exit(7),
    "os._exit(0)": lambda: os._exit(0),
    "exception": _raise(ValueError("the rank's own reason")),
    "interrupt": _raise(KeyboardInterrupt()),
    "IndexError": _raise(IndexError("sample 17 of 16")),
    "loop": _loop,
    "sleep": lambda: time.sleep(1000),
    "short sleep": lambda: time.sleep(1.5),
    "hold interpreter": _hold_the_interpreter,
    "slow steps": _slow_step,
    "out of memory": lambda: torch.empty(1 << 50),
    "NaN": lambda: float("nan"),
    "overflow": lambda: 1e30,
    "half a sample": lambda: _halve,
    "unknown tokens": lambda: _mark_targets,
    "end data thread": _end_data_thread,
    "shape": _differ(_reduce(5), _reduce(3)),
    "dtype": _differ(_reduce(), _reduce(dtype=torch.float64)),
    "op": _differ(_reduce(), _gather),
    "reduce op": _differ(_reduce(op=dist.ReduceOp.SUM), _reduce(op=dist.ReduceOp.MAX)),
    "root": _differ(_broadcast(0), _broadcast(1)),
    "order": _differ(_twice(_reduce(), _broadcast()), _twice(_broadcast(), _reduce())),
    "extra collective": lambda: dist.barrier(),
    "unanswered receive": lambda: dist.recv(torch.ones(4), (_rank() + 1) % dist.get_world_size()),
    "file limit": _limit_files,
    "clock back": _jump,
    "other torch": _other_torch,
    "end store": _end_store,
    "nothing": lambda: None,
}
