"""One point that all traffic of a run passes: a c10d process group around the vendor's own.

c10d accepts a Python subclass of ``ProcessGroup`` as a backend: ``register`` makes one known under a name,
and ``init_process_group(name)``, ``new_group`` and ``DeviceMesh`` then make :class:`InterposedGroup`
objects. ``torch.distributed``'s Python functions reach it directly. C++ callers (functional collectives,
DDP's reducer) reach it through torch's trampoline, ``c10d/PyProcessGroup.hpp``, which looks methods up by
name. Up to torch 2.13 that lacks ``reduce``, ``gather``, ``scatter``, ``alltoall``, ``all_gather_single`` and
``reduce_scatter_single``. They have Python callers, with one exception: the op
``_c10d_functional::all_gather_into_tensor_out``, which inductor uses when it buckets all_gathers. Since this
group registers no backend of its own in C++, that fails ("No backend type associated with device type"), and
nothing can slip past the lowerings.

Method names are those of torch 2.13; the ones of 2.9 (``_allgather_base``, ...) are aliases, and the inner
group is called by whichever it has.
"""

# torch.distributed re-exports without saying so; its stubs overload each method with other parameter names.
# pyright: reportPrivateImportUsage=false, reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from accelbridge.backend import Lowering
from accelbridge.portable.guard import Guard
from accelbridge.portable.lowerings import Call, Finish, flatten, lower, select
from accelbridge.portable.ring import RING, Entry, GroupFacts

MakeInner = Callable[[Any, Any], dist.ProcessGroup]
"""(c10d's ``DistributedBackendOptions``, the user's ``pg_options``) -> a native group."""

# -------------------------------------------------------------------------------------------- the inner group

_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Name in torch 2.13 -> name in torch 2.9."""


def _make_backend(name: str, request: Any, options: Any) -> Any:
    """The c10d backend called ``name``: a plugin's, or torch's class ``ProcessGroup<Name>``."""
    if plugin := dist.Backend._plugins.get(name.upper()):
        if plugin.extended_api:
            return plugin.creator_fn(request, options)
        return plugin.creator_fn(request.store, request.group_rank, request.group_size, request.timeout)
    classes = {n.lower(): getattr(c10d, n) for n in dir(c10d) if n.startswith("ProcessGroup")}
    cls = classes.get(f"processgroup{name}")
    if cls is None:
        raise ValueError(f"this build of torch has no process group {name!r}")
    place = (request.store, request.group_rank, request.group_size)
    backend = _construct(cls, place, request.timeout, options)
    backend.options.global_ranks_in_group = list(request.global_ranks_in_group)
    return backend


def _construct(cls: Any, place: tuple[Any, int, int], timeout: timedelta, options: Any) -> Any:
    if options is None:
        try:
            return cls(*place, timeout=timeout)
        except TypeError:  # no such form: this class takes its time limit in an options object
            options = cls.Options()
    options._timeout = timeout
    return cls(*place, options)


def devices_of(config: str) -> dict[str, str]:
    """Device type -> backend name of a c10d backend string."""
    return dict(c10d.BackendConfig(dist.Backend(config)).get_device_backend_map())  # pyright: ignore[reportArgumentType]


def native_group(config: str) -> MakeInner:
    """Makes plain groups of ``config``, a c10d backend string: one name, or "device:name,device:name".

    It does what ``torch.distributed`` does for that string, but leaves the group out of c10d's registries.
    With several backends torch routes each call by the device of its tensors.
    """

    def make(request: Any, options: Any) -> dist.ProcessGroup:
        group = dist.ProcessGroup(request.store, request.group_rank, request.group_size)
        made: dict[str, Any] = {}
        store = request.store
        for device, name in devices_of(config).items():
            kind = dist.Backend.backend_type_map[name]
            if name not in made:
                # Two backends of one group must not meet under the same keys.
                request.store = dist.PrefixStore(f"{name}/", store)
                made[name] = _make_backend(name, request, options)
                if isinstance(made[name], dist.ProcessGroup):  # a vendor's own, written in Python: it is the group
                    request.store = store
                    return made[name]
                if len(made) == 1:
                    group._set_default_backend(kind)
            group._register_backend(torch.device(device), kind, made[name])
        request.store = store
        return group

    return make


class _Inner:
    """The vendor's group as the lowerings see it (:class:`~accelbridge.portable.lowerings.Transport`)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    def issue(self, call: Call) -> Any:
        method = getattr(self.group, call.op, None) or getattr(self.group, _OLD_NAMES[call.op])
        return method(*call.arguments())


# ------------------------------------------------------------------------------------------------------- work


class RecordedWork(dist.Work):
    """The inner work of a call that is in the ring: as asynchronous as ever, and its waiting is timed."""

    def __init__(self, work: Any, entries: Sequence[Entry]) -> None:
        super().__init__()
        self._work, self._entries = work, entries

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        began = time.perf_counter()
        try:
            done = self._work.wait(timeout) if timeout else self._work.wait()
        except BaseException as error:
            for entry in self._entries:
                RING.failed(entry, error)
            raise
        RING.waited += time.perf_counter() - began
        for entry in self._entries:
            entry.done = True
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Future[list[Tensor]]:
        return self._work.get_future()

    def synchronize(self) -> None:
        self._work.synchronize()

    def result(self) -> list[Tensor]:
        return self._work.result()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank


class LoweredWork(RecordedWork):
    """The work of a lowered call: done once the inner work is done and the result has been brought back.

    The way back (copy, cast, scale) runs in ``wait``, on the waiting thread and its current stream, exactly
    once. It is local to the process, so works can be waited for in any order.
    """

    def __init__(self, work: Any, entries: Sequence[Entry], finish: Sequence[Finish], outputs: list[Tensor]) -> None:
        super().__init__(work, entries)
        self._finish, self._outputs = finish, outputs
        self._lock = threading.RLock()
        self._done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._lock:
            if not self._done:
                super().wait(timeout)
                with torch.no_grad():
                    for finish in self._finish:
                        finish()
                self._finish, self._done = (), True
        return True

    def is_completed(self) -> bool:
        """A caller that polls may read the result next, so the first "yes" brings it back."""
        if not self._done and self._work.is_completed():
            self.wait()
        return self._done

    def get_future(self) -> Future[list[Tensor]]:
        """A completed future: waits first. Its consumers (DDP, communication hooks) wait next anyway."""
        self.wait()
        devices: list[Any] = sorted({t.device for t in self._outputs if t.device.type != "cpu"}, key=str)
        future: Future[list[Tensor]] = Future(devices=devices) if devices else Future()
        future.set_result(self._outputs)
        return future

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def is_success(self) -> bool:
        return self._done and self._work.is_success()


# -------------------------------------------------------------------------------------------- the outer group

_OPTIONS = {
    "allreduce": c10d.AllreduceOptions,
    "allreduce_coalesced": c10d.AllreduceCoalescedOptions,
    "reduce": c10d.ReduceOptions,
    "broadcast": c10d.BroadcastOptions,
    "gather": c10d.GatherOptions,
    "scatter": c10d.ScatterOptions,
    "reduce_scatter": c10d.ReduceScatterOptions,
    "reduce_scatter_single": c10d.ReduceScatterOptions,
    "reduce_scatter_single_coalesced": c10d.ReduceScatterOptions,
    "all_to_all_single": c10d.AllToAllOptions,
    "alltoall": c10d.AllToAllOptions,
    "barrier": c10d.BarrierOptions,
}


def _options(method: str, given: Any, timeout: timedelta | None = None, root: int | None = None, op: Any = None) -> Any:
    """The options object of ``method``. The methods also have forms that take a reduce op, a root and a time
    limit in its place."""
    cls = _OPTIONS.get(method, c10d.AllgatherOptions)
    if isinstance(given, cls):
        return given
    options: Any = cls()
    if isinstance(given, int) and root is None and hasattr(options, "rootRank"):
        root = given
    elif given is not None and op is None and hasattr(options, "reduceOp"):
        op = given
    if root is not None:
        options.rootRank = root
    if op is not None:
        options.reduceOp = op
    if timeout is not None:
        options.timeout = timeout
    return options


def _listed(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, Tensor) else tensors


_BY_KIND = ("allreduce", "broadcast", "all_gather_single", "reduce_scatter_single")
"""The calls of a step, whose lowerings go by dtype, reduce op and density alone."""


def _kind(call: Call) -> tuple[Any, ...] | None:
    """What the lowerings of such a call go by; None for any other, which is looked at each time."""
    if call.op not in _BY_KIND:
        return None
    tensors = [t for part in (call.outputs, call.inputs) if part is not None for t in _listed(part)]
    if not all(t.is_contiguous() and t.numel() for t in tensors):
        return None
    return (call.op, call.reduce_op, *(t.dtype for t in tensors))


@dataclass
class _Coalesced:
    """The calls of a coalescing block: one work does them all."""

    entries: list[Entry] = field(default_factory=list)
    finish: list[Finish] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class InterposedGroup(dist.ProcessGroup):
    """A process group that hands every call to ``inner`` after the ring has noted it, the guard has compared it
    and the lowerings have rewritten it."""

    def __init__(self, name: str, request: Any, inner: dist.ProcessGroup, lowerings: Sequence[Lowering], check: bool):
        # The form with a store makes a plain C++ object that Python overrides do not reach.
        super().__init__(request.group_rank, request.group_size)  # pyright: ignore[reportCallIssue]
        self._store, self._group_name, self._group_desc = request.store, str(request.group_id), "undefined"
        self._backend_name = name
        self._inner = _Inner(inner)
        self._rewrites = select(lowerings)
        self._untouched: set[tuple[Any, ...] | None] = set()
        """Kinds of calls that no lowering has anything to say about."""
        self._coalesced: _Coalesced | None = None
        ranks = list(request.global_ranks_in_group) or list(range(request.group_size))
        self._facts = GroupFacts(self._group_name, ranks)
        store = dist.PrefixStore("guard/", request.store)
        self._guard = Guard(store, request.group_rank, ranks, request.timeout, request.group_id) if check else None

    def _run(self, call: Call) -> Any:
        if self._guard is not None:
            self._guard.compare(call)
        entry = RING.record(self._facts, call)
        try:
            work, finish = self._issue(call)
        except BaseException:
            entry.done = True  # refused: nobody waits for it
            raise
        if self._coalesced is not None:  # runs at the end of the block
            self._coalesced.entries.append(entry)
            if finish:
                self._coalesced.finish.extend(finish)
                self._coalesced.outputs.extend(flatten(call.outputs))
            return work
        entry.issued(work)
        if not finish:
            return RecordedWork(work, (entry,))
        return LoweredWork(work, (entry,), finish, list(flatten(call.outputs)))

    def _issue(self, call: Call) -> tuple[Any, Sequence[Finish]]:
        """The inner group's work, and what is left to do after it."""
        if not self._rewrites or (kind := _kind(call)) in self._untouched:
            return self._inner.issue(call), ()
        with torch.no_grad():
            plan = lower(call, self._rewrites, self._inner)
        work = self._inner.issue(plan.call)
        if plan.call is call and kind is not None:
            self._untouched.add(kind)
        return work, plan.finish

    # ---- collectives, in the order of c10d's ProcessGroup.hpp

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: int | None = None) -> Any:
        return self._run(Call("broadcast", _listed(tensors), None, _options("broadcast", opts, timeout, root)))

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Any:
        return self._run(Call("allreduce", _listed(tensors), None, _options("allreduce", opts, timeout, None, op)))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        return self._run(Call("allreduce_coalesced", tensors, None, _options("allreduce_coalesced", opts)))

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        return self._run(Call("reduce", _listed(tensors), None, _options("reduce", opts, timeout, root, op)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        outputs = [outputs] if isinstance(inputs, Tensor) else outputs
        return self._run(Call("allgather", outputs, _listed(inputs), _options("allgather", opts, timeout)))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._run(Call("all_gather_single", output, input, _options("all_gather_single", opts)))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._run(Call("allgather_coalesced", outputs, inputs, _options("allgather_coalesced", opts)))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        options = _options("all_gather_single_coalesced", opts)
        return self._run(Call("all_gather_single_coalesced", outputs, inputs, options))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        outputs = [outputs] if isinstance(inputs, Tensor) and outputs else outputs
        return self._run(Call("gather", outputs, _listed(inputs), _options("gather", opts, timeout, root)))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Any:
        inputs = [inputs] if isinstance(outputs, Tensor) and inputs else inputs
        return self._run(Call("scatter", _listed(outputs), inputs, _options("scatter", opts, timeout, root)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None):
        inputs = [inputs] if isinstance(outputs, Tensor) else inputs
        options = _options("reduce_scatter", opts, timeout, None, op)
        return self._run(Call("reduce_scatter", _listed(outputs), inputs, options))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._run(Call("reduce_scatter_single", output, input, _options("reduce_scatter_single", opts)))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        options = _options("reduce_scatter_single_coalesced", opts)
        return self._run(Call("reduce_scatter_single_coalesced", outputs, inputs, options))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Any,
        input_splits: Any,
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        splits = (list(output_splits), list(input_splits))
        options = _options("all_to_all_single", opts, timeout)
        return self._run(Call("all_to_all_single", output, input, options, splits))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        return self._run(Call("alltoall", outputs, inputs, _options("alltoall", opts, timeout)))

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        return self._run(Call("send", None, _listed(tensors), None, (peer, tag)))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        return self._run(Call("recv", _listed(tensors), None, None, (peer, tag)))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._run(Call("recv_anysource", _listed(tensors), None, None, (tag,)))

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        return self._run(Call("barrier", options=_options("barrier", opts, timeout)))

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- coalescing: calls within it run at its end, so all their results are brought back after that

    def _start_coalescing(self, device: torch.device) -> None:
        self._inner.group._start_coalescing(device)
        self._coalesced = _Coalesced()

    def _end_coalescing(self, device: torch.device) -> Any:
        block, self._coalesced = self._coalesced or _Coalesced(), None
        work = self._inner.group._end_coalescing(device)
        for entry in block.entries:
            entry.issued(work)
        if not block.finish:
            return RecordedWork(work, block.entries)
        return LoweredWork(work, block.entries, block.finish, block.outputs)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # torch after 2.13

    # ---- what torch asks of a group besides collectives

    def name(self) -> str:
        return self._backend_name

    getBackendName = _get_backend_name = name

    # C++ keeps a group's name and description in its backends, of which this group has none.

    def setGroupName(self, name: str) -> None:
        self._group_name = self._facts.name = name
        self._inner.group._set_group_name(name)  # pyright: ignore[reportArgumentType]

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupDesc(self, text: str) -> None:
        self._group_desc = self._facts.label = text
        self._inner.group._set_group_desc(text)

    def getGroupDesc(self) -> str:
        return self._group_desc

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return self._inner.group._device_types

    def _get_backend(self, device: torch.device) -> Any:
        return self._inner.group._get_backend(device)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        group: Any = self._inner.group
        return group.monitored_barrier(*args, **kwargs)

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.group.set_timeout(timeout)
        if self._guard is not None:
            self._guard.timeout = timeout

    def abort(self) -> None:
        self._inner.group.abort()

    def shutdown(self) -> None:
        self._inner.group.shutdown()


# ----------------------------------------------------------------------------------------------- registration


@dataclass(frozen=True)
class _Registration:
    make_inner: MakeInner
    lowerings: tuple[Lowering, ...]
    check: bool


_REGISTERED: dict[str, _Registration] = {}


def register(
    name: str,
    make_inner: MakeInner | str,
    lowerings: Sequence[Lowering] = (),
    check: bool = False,
    devices: Sequence[str] | None = None,
) -> None:
    """Make ``name`` a c10d backend; ``init_process_group(name, ...)`` and everything after it then uses it.

    ``make_inner`` makes the vendor's groups, or is a c10d backend string (:func:`native_group`), from which
    ``devices`` default. Registering a name again replaces what groups made from now on consist of.
    """
    if isinstance(make_inner, str):
        devices = devices or list(devices_of(make_inner))
        make_inner = native_group(make_inner)
    select(lowerings)  # an unknown one fails here and not at the first collective
    _REGISTERED[name] = _Registration(make_inner, tuple(lowerings), check)

    def create(request: Any, options: Any) -> InterposedGroup:
        now = _REGISTERED[name]
        return InterposedGroup(name, request, now.make_inner(request, options), now.lowerings, now.check)

    dist.Backend.register_backend(name, create, extended_api=True, devices=list(devices or ["cpu"]))
