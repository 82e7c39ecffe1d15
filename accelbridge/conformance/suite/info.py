"""INF: what a backend says of itself is so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from accelbridge.backend import Implementation, Request, World
from accelbridge.conformance import calls, children
from accelbridge.conformance.bench import Abandoned, Bench, is_unsupported
from accelbridge.conformance.mandatory import mandatory
from accelbridge.conformance.oracle import small
from accelbridge.conformance.registry import case
from accelbridge.conformance.suite.casts import probed_class
from accelbridge.conformance.trace import Trace
from accelbridge.errors import Unsupported
from accelbridge.plan import PlanInputs, resolve
from accelbridge.plugins import Candidate, Selection


@case("INF-001", "core", timeout_s=150.0)
def discovered(t: Bench) -> None:
    """A new process finds the backend through its entry point, under its name, with the version of the interface and
    of the distribution that it was installed with, and describes its capabilities without loading torch."""
    try:
        found = children.discover(t.backend.name)
    except children.ChildFailed as error:
        t.fail("DISCOVERY", f"a new process could not discover {t.backend.name}: {error}")
        found = {}
    for key, want in (
        ("name", t.backend.name),
        ("class_name", t.backend.name),
        ("available", True),
        ("api_version", ".".join(map(str, t.backend.api_version))),
        ("class_api_version", ".".join(map(str, t.backend.api_version))),
        ("cells", len(t.capabilities.table)),
        ("torch", False),
    ):
        t.same(found.get(key), want, f"{key} in a new process", code="DISCOVERY")
    t.same(found.get("version"), found.get("metadata_version", ""), "version of the distribution", code="DISCOVERY")


@case("INF-002", "core", timeout_s=60.0)
def identified(t: Bench) -> None:
    """The probe names chips, software and why it is available, in words, and says the same when it is asked again."""
    backend = type(t.backend)
    first, again = t.run(backend.probe), t.run(backend.probe)
    t.same(first.available, True, "available", code="IDENTITY")
    t.same(astuple(again), astuple(first), "the second probe", code="IDENTITY")
    t.at_least(len(first.devices), 1, "devices", code="IDENTITY")
    t.same([d.index for d in first.devices], list(range(len(first.devices))), "indices", code="IDENTITY")
    told = {
        "reason": first.reason,
        **first.software,
        **first.facts,
        **{f"chip {d.index}": d.chip for d in first.devices},
    }
    t.same(sorted(key for key, text in told.items() if not text.strip()), [], "facts without a word", code="IDENTITY")
    t.at_least(len(first.software), 1, "versions of software", code="IDENTITY")
    t.same(t.capabilities.chip.name != "", True, "capabilities name the chip", code="IDENTITY")


@case("INF-003", "core", timeout_s=60.0)
def placed(t: Bench) -> None:
    """What is made "on the device" lies on the device that was bound: new tensors, transfers and results; binding
    another index moves the next allocation there, and binding the first one again moves it back. A process whose group
    comes before its device has one for life."""
    device = t.backend.device
    t.same(t.device.type, device.type, "type of the bound device", code="PLACE")
    t.at_least(device.count(), t.world.local_size, "devices", code="PLACE")
    host = t.integers(4, 4)
    made = {
        "torch.zeros": torch.zeros(3, device=device.type),
        "put": t.put(host),
        "to_device": t.run(t.backend.offload.to_device, host).wait(),
        "matmul": t.run(t.backend.matmul.matmul, t.put(host), t.put(host)),
    }
    for name, tensor in made.items():
        t.same(str(tensor.device), str(t.device), f"place of {name}", code="PLACE")
    t.equal(made["matmul"], (host.double() @ host.double()).float(), name="matmul")
    movable = t.backend.execution.model == "eager" and not t.backend.collectives.before_device
    count = device.count() if movable else 1
    for index in range(min(count, 2)):
        bound = t.run(device.bind, World(local_rank=index, local_size=count))
        t.same(str(torch.zeros(3, device=device.type).device), str(bound), f"place on device {index}", code="PLACE")
        if bound.index is not None:
            t.same(bound.index, index, "index of the bound device", code="PLACE")
    t.same(str(t.run(device.bind, t.world)), str(t.device), "the first device, bound again", code="PLACE")


@case("INF-004", "core")
def mandatory_core(t: Bench) -> None:
    """Every cell that the level core demands is stated, and supported."""
    _mandatory(t, "core")


@case("INF-013", "train")
def mandatory_train(t: Bench) -> None:
    """Every cell that the level train demands is stated, and supported."""
    _mandatory(t, "train")


def _mandatory(t: Bench, level: str) -> None:
    for op, dtype, variant in mandatory(level):
        support = t.capabilities.support(op, dtype, variant)
        name = f"{op} {dtype} {variant}".strip()
        t.same(support.level if not support else "supported", "supported", f"{name} ({support.reason})", "CAPABILITY")


# ------------------------------------------------------------------------------------------- claims and refusals


def _claims(t: Bench) -> list[tuple[str, str, str]]:
    return sorted(cell for cell, support in t.capabilities.table.items() if support)


def _claimed_ops(t: Bench) -> None:
    """Claims about ops of one process; under spmd there are no others."""
    for op, dtype, variant in _claims(t):
        if op in calls.OPS and not variant:
            wanted = calls.call(t, op, dtype)
            for name, implementation in calls.implementations(t, op, dtype):
                label = f"{op} {dtype} {name}"
                got = _claimed(t, label, partial(wanted.invoke, t, implementation))
                if got is not None:
                    near(t, got, wanted, label)
        elif op in ("quantize", "scaled_mm"):
            t.found.cells.add((op, dtype, variant))  # core does not hang on whether they are emulated
            label, small_call = f"{op} {dtype} {variant}", calls.quantized if op == "quantize" else calls.scaled_product
            found = _claimed(t, label, partial(small_call, t, dtype, variant))
            if found is not None:  # 2 bits of mantissa give 22 dB
                t.sqnr(found[0], found[1].double(), 20.0, name=label, rows=False)
        elif op not in calls.GROUP_OPS:
            t.fail("CAPABILITY", f"{op} {dtype} {variant} is claimed; the suite has no such op, so nothing shows it")


_T = TypeVar("_T")


def _claimed(t: Bench, label: str, call: Callable[[], _T]) -> _T | None:
    """What ``call`` returns; an error, also a typed refusal, breaks the claim."""
    try:
        return call()
    except Exception as error:
        t.fail("CAPABILITY", f"{label} is claimed and raised {type(error).__name__}: {error}")
        return None


def near(t: Bench, got: Tensor, wanted: calls.Call, label: str) -> None:
    """The result of a small call has its dtype and is right."""
    t.same(str(got.dtype), str(wanted.dtype), f"dtype of {label}")
    t.within(got, wanted.want, small.bound(wanted.want, wanted.dtype), name=label)


@case("INF-005", "core", worlds=(2,), timeout_s=180.0, spmd=_claimed_ops)
def claims_hold(t: Bench) -> None:
    """The smallest call of every cell that the capability table claims, full or emulated, works and is right: of ops
    in everything that a plan may bind to them, of collectives on 2 ranks. A refusal is a broken claim."""
    _claimed_ops(t)
    for op, dtype, variant in _claims(t):
        if op not in calls.GROUP_OPS:
            continue
        t.covers(op, dtype, variant)
        label = f"{op} {dtype} {variant}".strip()
        got = _claimed(t, label, partial(calls.group_call, t, op, dtype, variant))
        if got is None:
            raise Abandoned  # the other ranks may wait in it
        if got[1].dtype == got[0].dtype and op not in calls.VOCAB_PARALLEL:  # whose sums are not exact
            t.equal(*got, name=label)
        else:
            t.within(*got, small.bound(got[1], getattr(torch, dtype)), name=label)


_NOBODYS = (
    ("linear", "complex32", ""),
    ("all_reduce", "complex32", "sum"),
    ("scaled_mm", "float8_e4m3fn x float8_e5m2fnuz", "tensor"),
)
"""Cells that hardly any vendor states: what nobody claims must be refused as well."""


def _refused_ops(t: Bench) -> None:
    """The plan refuses every cell that is not stated or stated absent; so does a scaled product when it is called."""
    absent = sorted(cell for cell, support in t.capabilities.table.items() if not support)
    absent += [cell for cell in _NOBODYS if not t.supported(*cell)]
    for op, dtype, variant in absent:
        label = f"{op} {dtype} {variant}".strip()
        support = t.capabilities.support(op, dtype, variant)
        t.same(support.reason.strip() != "", True, f"{label} says why it is absent", code="CAPABILITY")
        wire = op in calls.GROUP_OPS
        requests = () if wire else (Request(op, dtype, variant=variant),)
        inputs = PlanInputs(requests, {}, wire=((op, dtype, variant),) if wire else ())
        t.raises(Unsupported, resolve, _selection(t), t.backend, t.capabilities, inputs, says=op)
        if op == "scaled_mm":
            _refuses(t, label, partial(calls.scaled_product, t, dtype, variant))


def _selection(t: Bench) -> Selection:
    backend = type(t.backend)
    return Selection(backend, Candidate(t.backend.name, backend=backend), "argument", ())


def _refuses(t: Bench, label: str, call: Callable[[], object]) -> None:
    """``call`` is refused by type: neither done, nor anything else that is raised."""
    outcome = "refused"
    try:
        call()
        outcome = "worked"
    except Exception as error:
        if not is_unsupported(error):
            outcome = f"raised {type(error).__name__}: {error}"
    if outcome == "worked":
        t.fail("CAPABILITY", f"{label} is stated as absent and works")
    t.same(outcome, "refused", label, code="ERROR")


@case("INF-006", "core", worlds=(2,), spmd=_refused_ops)
def absences_refused(t: Bench) -> None:
    """Every cell that the capability table states as absent says why, is refused by the plan, and raises
    ``Unsupported`` where it is called all the same: no crash, no other error, and no success."""
    _refused_ops(t)
    for (op, dtype, variant), support in sorted(t.capabilities.table.items()):
        if not support and op in calls.GROUP_OPS:
            label = f"{op} {dtype} {variant}".strip()
            _refuses(t, label, partial(calls.group_call, t, op, dtype, variant))


@case("INF-007", "core")
def facts_probed(t: Bench) -> None:
    """What is stated about arithmetic is what a probe finds: subnormal numbers kept or flushed, by dtype; operands of
    float32 products not shortened; bfloat16 products summed in float32, which 512 ones tell from bfloat16 (which
    stops at 256) and 4096 from float16 (which stops at 2048).

    Facts about fp8 and about reductions are probed by the families of these."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        found = probed_class(t, dtype)
        t.note(f"subnormals.{name}", found)
        t.same(found, t.capabilities.subnormals.get(name, "kept"), f"subnormals.{name}", code="PROBE")
    for name, product in _products(t):
        fine = torch.tensor([[1.0 + 2.0**-12, 1.0 - 2.0**-13], [1.0 + 2.0**-23, -(2.0**-20)]])
        got = t.run(product, t.put(fine), t.put(torch.eye(2)))
        t.equal(got, fine, code="PROBE", name=f"operands of {name} float32")
        for count, kind in ((512, torch.bfloat16), (4096, torch.bfloat16), (4096, torch.float16)):
            ones = torch.ones(2, count, dtype=kind)
            ones[1, ::2] = 0.0
            want = torch.tensor([[float(count)] * 2, [count / 2.0] * 2]).to(kind)
            t.equal(t.run(product, t.put(ones), t.put(torch.ones(2, count, dtype=kind))), want, code="PROBE",
                    name=f"sum of {count} in {name} {kind}")  # fmt: skip


def _products(t: Bench) -> list[tuple[str, Callable[[Tensor, Tensor], Tensor]]]:
    """Every ``x @ weight.T`` that a plan may bind."""
    found = [(name, run) for name, run in calls.implementations(t, "linear", "float32") if name != "matmul"]
    return [*found, ("matmul", lambda x, weight: t.backend.matmul.matmul(x, weight.T))]


# ------------------------------------------------------------------------------------------------ who does the work


def _tried(t: Bench, ops: Sequence[str] = tuple(calls.OPS)) -> Iterator[tuple[str, calls.Call, calls.Implemented]]:
    """(label, small call, implementation) of each claimed op in float32 and bfloat16."""
    for op in ops:
        for dtype in ("float32", "bfloat16"):
            if t.supported(op, dtype):
                wanted = calls.call(t, op, dtype)
                for name, implementation in calls.implementations(t, op, dtype):
                    yield f"{op} {dtype} {name}", wanted, implementation


@case("INF-008", "core")
def no_silent_fallback(t: Bench) -> None:
    """Ops do their work on the device: no op of torch's that they run touches a tensor elsewhere, unless it is stated
    in ``Capabilities.fallbacks``; a device that counts launches has launched something; and a candidate that states
    what it launches is seen to run it. Forward passes; torch's dispatcher is what is listened to."""
    stated = {(c.op, c.name): c for c in t.backend.implementations()}
    for label, wanted, implementation in _tried(t):
        op, _, name = label.split()
        t.backend.device.synchronize()
        before = t.backend.device.launches()
        listened = partial(_traced, t, implementation, label, stated.get((op, name)))
        got = t.run(wanted.invoke, t, listened)
        t.backend.device.synchronize()
        after = t.backend.device.launches()
        if before is not None and after is not None:
            t.at_least(after - before, 1, f"launches of {label}", code="FALLBACK")
        near(t, got, wanted, label)


def _traced(t: Bench, run: calls.Implemented, label: str, candidate: Implementation | None, *arguments: Any) -> Any:
    """``run`` with its arguments, which lie on the device already, listened to."""
    with Trace() as trace:
        out = run(*arguments)
    foreign = [text for text in trace.foreign(t.device.type) if text.split()[0] not in t.capabilities.fallbacks]
    t.same(foreign, [], f"{label}: ops elsewhere than on {t.device.type}", code="FALLBACK")
    if candidate is not None and candidate.launches:
        seen = bool(trace.ops & set(candidate.launches))
        t.same(seen, True, f"{label} runs one of {', '.join(candidate.launches)}", code="FALLBACK")
    return out


@case("INF-009", "core")
def nothing_remembered(t: Bench) -> None:
    """A second call of the same shapes with one element changed gives a right result that differs from the first in
    exactly the elements which depend on it: each float argument of every op in turn."""
    for label, wanted, implementation in _tried(t):
        if " float32 " not in label:
            continue
        first = t.run(wanted.invoke, t, implementation)
        near(t, first, wanted, label)
        for place, argument in enumerate(wanted.arguments):
            if isinstance(argument, Tensor) and argument.is_floating_point():
                _changed(t, wanted, implementation, first, place, label)


def _changed(t: Bench, wanted: calls.Call, run: calls.Implemented, first: Tensor, place: int, label: str) -> None:
    arguments = list(wanted.arguments)
    arguments[place] = arguments[place].clone()
    arguments[place].view(-1)[arguments[place].numel() // 2] -= 1.5
    again = replace(wanted, arguments=tuple(arguments))
    second = t.run(again.invoke, t, run)
    near(t, second, again, f"{label}, argument {place} changed")
    moved = (again.want - wanted.want).abs()
    must, may = moved > 2.0 * small.bound(wanted.want, wanted.dtype), moved > 0
    differs = (second != first) if second.dim() else (second != first).reshape(1)
    must, may = must.reshape(differs.shape), may.reshape(differs.shape)
    host = t.fetch(differs)
    t.equal(differs, torch.where(must == may, must, host), name=f"{label}: what argument {place} reaches")


@case("INF-010", "core")
def outputs_written(t: Bench) -> None:
    """Every op writes all of its result: memory that is about to be handed out again is first filled with NaN, and
    transfers get destinations full of NaN."""
    for label, wanted, implementation in _tried(t):
        sizes = {wanted.want.numel(), *(x.numel() for x in wanted.arguments if isinstance(x, Tensor))}
        poison = [
            torch.full((size,), torch.nan, dtype=wanted.dtype, device=t.device) for size in sizes for _ in range(8)
        ]
        t.backend.device.synchronize()
        del poison
        near(t, t.run(wanted.invoke, t, implementation), wanted, label)
    offload = t.backend.offload
    for dtype in (torch.float32, torch.bfloat16):
        x, nan = t.normal(33, 7, dtype=dtype), torch.full((33, 7), torch.nan, dtype=dtype)
        t.equal(t.run(offload.to_device, x, out=t.put(nan)).wait(), x, name=f"to_device {dtype}")
        t.equal(t.run(offload.to_host, t.put(x), out=nan.clone()).wait(), x, name=f"to_host {dtype}", host=True)
        t.run(offload.write, t.folder / "x", t.put(x))
        t.equal(t.run(offload.read, t.folder / "x", t.put(nan)), x, name=f"read {dtype}")


@case("INF-011", "core", timeout_s=60.0)
def begun_again(t: Bench) -> None:
    """A second and a third instance of the backend in one process bind, compute and move as the first does."""
    a, b = t.integers(9, 5, name="a"), t.integers(5, 7, name="b")
    want = (a.double() @ b.double()).float()
    for number in (2, 3):
        backend = t.run(type(t.backend), t.backend.options)
        device = t.run(backend.device.bind, t.world)
        t.same(str(device), str(t.device), f"device of instance {number}", code="STATE")
        left = t.run(backend.offload.to_device, a).wait()
        t.equal(t.run(backend.matmul.matmul, left, t.put(b)), want, name=f"instance {number}")
        t.run(backend.device.synchronize)
    t.equal(t.run(t.backend.matmul.matmul, t.put(a), t.put(b)), want, name="the first instance")


@case("INF-012", "core", timeout_s=240.0)
def no_device(t: Bench) -> None:
    """Where a backend that was asked for by name cannot be used, choosing it raises ``BackendError`` that names it and
    says why, and nothing else is chosen in its place: with a probe that found nothing and, where the backend states
    how its devices are hidden, in a process that sees none."""
    reason = "no device was found by this test"
    environments = [({}, reason)] + ([(dict(t.backend.hidden_by), "")] if t.backend.hidden_by else [])
    for environment, unusable in environments:
        try:
            found = children.choose(t.backend.name, environment, unusable)
        except children.ChildFailed as error:
            t.fail("ERROR", f"choosing {t.backend.name} without a device ended with {error}")
            raise Abandoned from error
        t.same(found["chosen"], "", "chosen without a device", code="FALLBACK")
        t.same(found["error"], "BackendError", "error without a device", code="ERROR")
        t.same(
            t.backend.name in found["text"] and unusable in found["text"], True, "it says which and why", code="ERROR"
        )
