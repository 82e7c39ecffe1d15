"""Seeded defects under the spmd execution model, and what the conformance suite makes of them.

    python spmd_mutants.py FOLDER        runs every test against every defect that it must see; writes FOLDER/found.json

A defect is an operation on the devices, or a method of the execution, that does something else: what a partitioner or a
runtime that is wrong would do. All run in one process, one after the other: the runtime counts its devices once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelbridge.conformance.runner import PUBLIC_SEED
from accelbridge.conformance.worker import _Rank
from accelbridge.launch import local
from accelbridge.portable.offload import PortableOffload
from accelbridge_xla.execution import XlaExecution
from accelbridge_xla.sharding import Annotator

DEVICES = 4


@dataclass(frozen=True)
class Mutant:
    """One defect, and the code with which each of these tests must fail."""

    what: str
    kills: Mapping[str, str]
    broken: Callable[[_Rank], AbstractContextManager[Any]]


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, what: str, kills: Mapping[str, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that gives a context in which the defect is there."""

    def register(broken: Callable[..., Any]) -> Callable[..., Any]:
        MUTANTS[name] = Mutant(what, kills, broken)
        return broken

    return register


class _Operations(TorchDispatchMode):
    """``replacement(operation, *args, **kwargs)`` in the place of operations of these names on XLA tensors."""

    def __init__(self, replacement: Callable[..., Any], *names: str) -> None:
        super().__init__()
        self.replacement, self.names = replacement, names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hit = str(func).removeprefix("aten.") in self.names and args[0].device.type == "xla"
        return self.replacement(func, *args, **(kwargs or {})) if hit else func(*args, **(kwargs or {}))


def method(owner: Any, name: str, replacement: Callable[..., Any]) -> AbstractContextManager[Any]:
    """``replacement(inner, *args, **kwargs)`` in the place of ``owner.name``."""
    inner = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args, **kwargs: replacement(inner, *args, **kwargs))


def _share(x: Tensor) -> int:
    """Rows that a device holds."""
    return -(-x.shape[0] // DEVICES)


def _swapped(x: Tensor) -> Tensor:
    """With the rows of each device on the next one."""
    return x.roll(_share(x), 0) if x.dim() and x.shape[0] > 1 else x


# ------------------------------------------------------------------------------------------------------ reductions


@mutant(
    "S1",
    "sums over rows leave out those of the last device",
    {**dict.fromkeys(("COL-001", "COL-006", "COL-014", "COL-017", "COL-019"), "EXACT"), "COL-002": "BOUND"},
)
def sum_drops_rows(_: _Rank) -> Any:
    def total(inner: Any, x: Tensor, dim: Any = None, *rest: Any, **kwargs: Any) -> Tensor:
        whole = x.shape[0] <= 1 or dim != [0]
        return inner(x if whole else x[: x.shape[0] - _share(x)], dim, *rest, **kwargs)

    return _Operations(total, "sum.dim_IntList")


@mutant("S2", "sums are added in bfloat16", {"COL-002": "BOUND"})
def sum_in_bfloat16(_: _Rank) -> Any:
    return _Operations(
        lambda inner, x, *rest, **kwargs: inner(x.bfloat16(), *rest, **kwargs).to(x.dtype), "sum.dim_IntList"
    )


@mutant("S3", "means are divided by the number of devices twice", {"COL-003": "BOUND"})
def mean_divided_twice(_: _Rank) -> Any:
    return _Operations(lambda inner, *args, **kwargs: inner(*args, **kwargs) / DEVICES, "mean.dim")


@mutant("S4", "the extremes of rows leave out the last device", {"COL-004": "EXACT", "COL-006": "EXACT"})
def extremes_drop_rows(_: _Rank) -> Any:
    return _Operations(
        lambda inner, x, *rest: inner(x[: max(1, x.shape[0] - _share(x))], *rest), "amax.default", "amin.default"
    )


@mutant("S5", "NaN counts as 0 in sums", {"COL-004": "BOUND"})
def nan_is_nothing(_: _Rank) -> Any:
    def total(inner: Any, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        return inner(x.nan_to_num(0.0) if x.is_floating_point() else x, *rest, **kwargs)

    return _Operations(total, "sum.dim_IntList")


@mutant("S6", "sums within halves run over both", {"COL-013": "EXACT"})
def halves_mix(_: _Rank) -> Any:
    def total(inner: Any, x: Tensor, dim: Any, *rest: Any, **kwargs: Any) -> Tensor:
        found = inner(x, dim, *rest, **kwargs)
        return found + found.flip(0) if x.dim() == 3 and dim == [1] else found

    return _Operations(total, "sum.dim_IntList")


@mutant("S7", "a sum gives what the last one of its shape gave", {"COL-019": "EXACT", "COL-015": "EXACT"})
def stale_sum(_: _Rank) -> Any:
    last: dict[Any, Tensor] = {}

    def total(inner: Any, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        new: Tensor = inner(x, *rest, **kwargs)
        old = last.get(new.shape)
        last[new.shape] = new
        return new if old is None else old + 0

    return _Operations(total, "sum.dim_IntList")


@mutant("S8", "sums of 8-bit integers wrap", {"COL-021": "EXACT"})
def small_sums_wrap(_: _Rank) -> Any:
    def total(inner: Any, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        found = inner(x, *rest, **kwargs)
        return found % 16 if x.dtype is torch.int8 else found

    return _Operations(total, "sum.dim_IntList")


@mutant("S9", "every second sum is one bit larger", {"COL-022": "EXACT"})
def sums_vary(_: _Rank) -> Any:
    calls = iter(range(10**9))

    def total(inner: Any, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        return inner(x, *rest, **kwargs) * (1.0 + next(calls) // 3 % 2 * 2.0**-22)

    return _Operations(total, "sum.dim_IntList")


# ----------------------------------------------------------------------------------------------------------- moves


@mutant(
    "S10",
    "place gives each device the rows of its neighbour",
    dict.fromkeys(("COL-007", "COL-009", "COL-010"), "EXACT"),
)
def placed_elsewhere(_: _Rank) -> Any:
    def place(inner: Any, self: XlaExecution, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return inner(self, {name: _swapped(x) for name, x in batch.items()})

    return method(XlaExecution, "place", place)


@mutant("S11", "rows that the devices do not divide end as zeros", {"COL-010": "EXACT"})
def padding_wins(_: _Rank) -> Any:
    def cut(x: Tensor) -> Tensor:
        x = x.clone()
        x[x.shape[0] // DEVICES * DEVICES :] = 0
        return x

    def place(inner: Any, self: XlaExecution, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return inner(self, {name: cut(x) for name, x in batch.items()})

    return method(XlaExecution, "place", place)


@mutant(
    "S12", "a parameter's parts are gathered, and its gradient's cut, one off", {"COL-007": "EXACT", "COL-008": "EXACT"}
)
def parts_one_off(_: _Rank) -> Any:
    return method(Annotator, "_alias", lambda inner, self, x, where: inner(self, _swapped(x), where))


@mutant("S13", "every row reads the first one, whichever is asked", {"COL-005": "EXACT", "COL-020": "EXACT"})
def reads_the_first(_: _Rank) -> Any:
    return _Operations(lambda inner, x, dim, index: inner(x, dim, 0 if dim == 0 else index), "select.int")


@mutant("S14", "rows roll within their device alone", {"COL-011": "EXACT", "COL-012": "ORDER"})
def rolls_within(_: _Rank) -> Any:
    def roll(inner: Any, x: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
        return torch.cat([inner(part, shifts, dims) for part in x.split(_share(x))])

    return _Operations(roll, "roll.default")


@mutant("S15", "rows against columns, and the columns of a neighbour", {"COL-009": "EXACT", "COL-016": "EXACT"})
def turned_one_off(_: _Rank) -> Any:
    return _Operations(lambda inner, x: _swapped(inner(x)), "t.default")


@mutant("S16", "a row that is moved loses subnormals, which is not stated", {"COL-018": "EXACT"})
def flushed_in_silence(rank: _Rank) -> Any:
    return _restated(rank, "ftz.float32")


@mutant("S17", "a row that is moved loses the sign of zero, which is not stated", {"COL-018": "EXACT"})
def signs_lost_in_silence(rank: _Rank) -> Any:
    return _restated(rank, "move.zero_sign")


def _restated(rank: _Rank, fact: str) -> Any:
    """What the device does anyway, and the backend keeps to itself."""
    facts = {name: value for name, value in rank.capabilities.facts.items() if name != fact}
    return mock.patch.object(rank, "capabilities", replace(rank.capabilities, facts=facts))


# ------------------------------------------------------------------------------------------------------- execution


@mutant("S18", "Execution.sum adds up devices that are summed already", {"COL-014": "EXACT", "COL-002": "BOUND"})
def summed_twice(_: _Rank) -> Any:
    return method(XlaExecution, "sum", lambda inner, self, x: inner(self, x) * DEVICES)


@mutant("S19", "read_sums gives them in another order", {"COL-001": "EXACT"})
def read_in_reverse(_: _Rank) -> Any:
    return method(XlaExecution, "read_sums", lambda inner, self, shares: inner(self, shares)[::-1])


@mutant("S20", "end_step hands out the values of the step before", {"COL-015": "EXACT"})
def values_of_the_step_before(_: _Rank) -> Any:
    before: dict[str, Any] = {}

    def end_step(inner: Any, self: XlaExecution, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        new = inner(self, values)
        old = {name: before.get(name, value) for name, value in new.items()}
        before.update(new)
        return old

    return method(XlaExecution, "end_step", end_step)


@mutant("S21", "what is written in place is lost", {"COL-017": "EXACT"})
def writes_lost(_: _Rank) -> Any:
    return _Operations(lambda inner, x, other: x, "sub_.Tensor")


class _Late:
    """A transfer of which the part of the last device arrives when it is waited for."""

    def __init__(self, inner: Any, out: Tensor, late: Tensor) -> None:
        self.inner, self.out, self.late = inner, out, late

    def wait(self) -> Tensor:
        self.out[-len(self.late) :] = self.late
        return self.inner.wait()


@mutant("S22", "synchronize does not wait for the last device", {"COL-012": "ORDER"})
def last_device_late(_: _Rank) -> Any:
    def to_host(inner: Any, self: PortableOffload, x: Tensor, out: Tensor | None = None) -> Any:
        transfer = inner(self, x, out)
        if out is None:
            return transfer
        late = out[-_share(out) :].clone()
        out[-_share(out) :] = torch.nan
        return _Late(transfer, out, late)

    return method(PortableOffload, "to_host", to_host)


@mutant("S23", "an execution can be started once", {"FLT-007": "RAISED"})
def started_once(_: _Rank) -> Any:
    calls: list[int] = []

    def start(inner: Any, self: XlaExecution, *args: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("started before")
        inner(self, *args)

    return method(XlaExecution, "start", start)


@mutant("S24", "close leaves everything open", {"FLT-008": "ERROR"})
def never_closed(_: _Rank) -> Any:
    return method(XlaExecution, "close", lambda inner, self: None)


@mutant("S25", "shapes that do not fit are cut", {"FLT-009": "ERROR"})
def cut_to_fit(_: _Rank) -> Any:
    return _Operations(lambda inner, x, other, **kwargs: x, "add.Tensor")


@mutant("S26", "a layout of too many devices is taken", {"FLT-010": "ERROR"})
def any_layout(_: _Rank) -> Any:
    def start(inner: Any, self: XlaExecution, store: Any, world: Any, layout: Any, *rest: Any) -> None:
        inner(self, store, world, replace(layout, dp_shard=DEVICES), *rest)

    return method(XlaExecution, "start", start)


@mutant("S27", "the launcher returns 0 whatever became of its process", {"FLT-014": "ERROR"})
def launcher_is_content(_: _Rank) -> Any:
    return method(local, "launch", lambda inner, *args: inner(*args) * 0)


@mutant("S28", "what a checkpoint holds of parameters is not read", {"CKP-004": "EXACT", "CKP-005": "EXACT"})
def parameters_not_read(_: _Rank) -> Any:
    def load_state(inner: Any, self: XlaExecution, model: Any, optimizer: Any, state: Mapping[str, Tensor]) -> None:
        lost = {name: x * 0 if name.startswith("model.") else x for name, x in state.items()}
        inner(self, model, optimizer, lost)

    return method(XlaExecution, "load_state", load_state)


@mutant("S29", "parameters are kept in bfloat16 from step to step", {"TRN-008": "EXACT"})
def narrow_parameters(_: _Rank) -> Any:
    def end_step(inner: Any, self: XlaExecution, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        with torch.no_grad():
            for parameter in self._model.parameters() if self._model is not None else ():
                parameter.copy_(parameter.bfloat16().float())
        return inner(self, values)

    return method(XlaExecution, "end_step", end_step)


# ------------------------------------------------------------------------------------------------------------- run


def main(folder: Path) -> None:
    """What became of every test under each defect that it must see."""
    rank = _Rank(
        {"backend": "xla", "options": {}, "mutant": "", "world": 1, "rank": 0, "run_id": "mutants",
         "folder": str(folder), "port_file": str(folder / "port")}
    )  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for name, defect in MUTANTS.items():
        for id, code in defect.kills.items():
            request = {"id": id, "seed": PUBLIC_SEED, "token": f"{name}-{id}", "falsification": "", "phase": 0}
            with defect.broken(rank):
                answer = rank.answer({**request, "kept": ""}, lambda _: None)
            told = {key: str(answer[key]) for key in ("status", "code", "message")}
            good = (told["status"], told["code"]) == ("FAIL", code)
            found.setdefault(name, {})[id] = {"good": good, "expected": code, **told}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
