"""OFF: tensors that wait on the host or in files, and come back in time. Under spmd the same bodies serve, as the one
process moves its own tensors; where ranks matter it is said."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from accelbridge.conformance.bench import Bench
from accelbridge.conformance.oracle import momentum as by_hand
from accelbridge.conformance.registry import case
from accelbridge.conformance.suite.memory import MIB, allocated, as_bytes, movable, noise
from accelbridge.errors import DataError


@case("OFF-001", "offload")
def set_round_trip(t: Bench) -> None:
    """A set of tensors of every dtype and of uneven sizes comes back from the host, and from files, as it went, bit by
    bit; all of it is under way before the first is waited for."""
    names = [(dtype, size) for dtype in movable(t) for size in (1, 13, 1000, 65537)]
    wants = [noise(t, size, dtype) for dtype, size in names]
    devices = [t.put(x) for x in wants]
    going = [t.run(t.backend.offload.to_host, x) for x in devices]
    hosts = [transfer.wait() for transfer in going]
    coming = [t.run(t.backend.offload.to_device, x) for x in hosts]
    for (dtype, size), transfer, host, want in zip(names, coming, hosts, wants, strict=True):
        t.same(str(host.dtype), str(dtype), "dtype on the host", code="EXACT")
        t.equal(as_bytes(host), as_bytes(want), name=f"{dtype} {size} on the host", host=True)
        t.equal(as_bytes(transfer.wait().cpu()), as_bytes(want), name=f"{dtype} {size} back", host=True)
    for number, want in enumerate(wants):
        t.run(t.backend.offload.write, t.folder / f"x{number}", t.put(want))
    for number, ((dtype, size), want) in enumerate(zip(names, wants, strict=True)):
        out = t.run(t.backend.offload.read, t.folder / f"x{number}", t.put(torch.zeros_like(want)))
        t.equal(as_bytes(out.cpu()), as_bytes(want), name=f"{dtype} {size} from a file", host=True)


@case("OFF-002", "offload")
def memory_given_back(t: Bench) -> None:
    """Once a tensor was offloaded and dropped, at least 90 % of its bytes on the device are free again.

    Measured as memory in use with it minus memory in use without it, so that it also means something where host memory
    is device memory; and nothing refers to its storage any more."""
    size = 96 * MIB
    x = torch.ones(size // 4, device=t.device)
    x[::1024] = 2.0
    storage = StorageWeakRef(x.untyped_storage())
    host = t.run(t.backend.offload.to_host, x).wait()
    with_it = allocated(t)
    del x
    without = allocated(t)
    t.same(storage.expired(), True, "the storage on the device is gone", code="MEMORY")
    if with_it is not None and without is not None:
        t.at_least(with_it - without, 0.9 * size, "bytes given back of 96 MiB", code="MEMORY")
    t.equal(host[: 4096 * 4 : 512], torch.tensor([2.0, 1.0] * 16), name="what waits on the host", host=True)


class Parked:
    """Tensors that lie on the host between uses, as an offloaded optimizer keeps its state."""

    def __init__(self, t: Bench, tensors: dict[str, Tensor]) -> None:
        self._t = t
        self._hosts = {name: t.run(t.backend.offload.to_host, x).wait() for name, x in tensors.items()}

    def fetch(self) -> dict[str, Tensor]:
        going = {name: self._t.run(self._t.backend.offload.to_device, x) for name, x in self._hosts.items()}
        return {name: transfer.wait() for name, transfer in going.items()}

    def park(self, tensors: dict[str, Tensor]) -> None:
        going = [self._t.run(self._t.backend.offload.to_host, x, out=self._hosts[n]) for n, x in tensors.items()]
        for transfer in going:
            transfer.wait()


class Kept:
    """The same, left on the device."""

    def __init__(self, t: Bench, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def fetch(self) -> dict[str, Tensor]:
        return self._tensors

    def park(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors


def _linear_losses(t: Bench, keep: Callable[..., Any], steps: int) -> tuple[list[Tensor], Tensor]:
    """Losses and last weights of the linear model, trained by hand with everything kept by ``keep`` between steps."""
    x, y, weight = (t.integers(*shape, low=-1, high=1, name=name) for name, shape in by_hand.SHAPES.items())
    store = keep(t, {"weight": t.put(weight), "momentum": t.put(torch.zeros_like(weight))})
    losses: list[Tensor] = []
    inputs, targets = t.put(x), t.put(y)
    for _ in range(steps):
        held = store.fetch()
        parameter = held["weight"].clone().requires_grad_()
        loss = (inputs @ parameter.t() - targets).square().sum() / by_hand.DIVISOR
        (gradient,) = torch.autograd.grad(loss, parameter)
        momentum = held["momentum"] * by_hand.MOMENTUM + gradient
        losses.append(loss.detach())
        store.park({"weight": parameter.detach() - by_hand.RATE * momentum, "momentum": momentum})
    return losses, store.fetch()["weight"]


def _adamw_losses(t: Bench, keep: Callable[..., Any], steps: int) -> list[Tensor]:
    """Losses of a two-layer model under AdamW, whose moments and weights ``keep`` keeps between steps."""
    layers = [t.put(t.normal(16, 8, name="first") * 0.5), t.put(t.normal(4, 16, name="second") * 0.5)]
    store = keep(t, {f"p{i}": p for i, p in enumerate(layers)})
    moments = keep(t, {f"{m}{i}": torch.zeros_like(p) for i, p in enumerate(layers) for m in "mv"})
    x, y, losses = t.put(t.normal(32, 8, name="x")), t.put(t.normal(32, 4, name="y")), []
    for step in range(1, steps + 1):
        held, state = store.fetch(), moments.fetch()
        parameters = [held[f"p{i}"].clone().requires_grad_() for i in range(2)]
        loss = ((x @ parameters[0].t()).tanh() @ parameters[1].t() - y).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        losses.append(loss.detach())
        for i, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
            m, v = state[f"m{i}"] * 0.9 + g * 0.1, state[f"v{i}"] * 0.99 + g * g * 0.01
            update = (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
            held[f"p{i}"] = p.detach() - 1e-2 * update
            state |= {f"m{i}": m, f"v{i}": v}
        store.park(held)
        moments.park(state)
    return losses


@case("OFF-003", "offload")
def training_unchanged(t: Bench) -> None:
    """Training goes as if nothing was offloaded: the linear model on integers gives the losses and weights that float64
    gives, bit for bit, with weights and momentum on the host between steps; AdamW gives the losses that it gives with
    its state on the device, bit for bit, as transfers change no bit."""
    x, y, weight = (t.integers(*shape, low=-1, high=1, name=name) for name, shape in by_hand.SHAPES.items())
    losses, last = by_hand.linear(x, y, weight, by_hand.DIVISOR, steps=3)
    for keep in (Kept, Parked):
        got, weights = _linear_losses(t, keep, 3)
        t.equal(torch.stack(got[:2]), losses[:2], name=f"losses, {keep.__name__.lower()}")
        t.equal(weights, last, name=f"weights, {keep.__name__.lower()}")
    kept, parked = _adamw_losses(t, Kept, 12), _adamw_losses(t, Parked, 12)
    t.equal(torch.stack(parked), torch.stack(kept).cpu(), name="losses of AdamW")


@case("OFF-004", "offload")
def prefetch_in_step(t: Bench) -> None:
    """Parameters stamped with the number of the step, offloaded and prefetched one step ahead into two buffers that
    take turns, arrive with the stamp of their step: 400 steps, each of which writes new ones on the device."""
    shape, offload = (33, 31), t.backend.offload
    hosts = [torch.zeros(shape), torch.zeros(shape)]
    buffers = [torch.zeros(shape, device=t.device), torch.zeros(shape, device=t.device)]
    working = torch.zeros(shape, device=t.device)
    arrived: Tensor | None = None
    stamps = torch.zeros(400, device=t.device)
    for step in range(400):
        working.fill_(float(step))
        going = t.run(offload.to_host, working, out=hosts[step % 2])
        working.fill_(-1.0)  # the device goes on; what was queued before saw the stamp
        coming = t.run(offload.to_device, going.wait(), out=buffers[step % 2])
        if arrived is not None:
            stamps[step - 1] = arrived.max() + (arrived.max() - arrived.min())
        arrived = coming.wait()
    assert arrived is not None
    stamps[-1] = arrived.max()
    t.equal(stamps, torch.arange(400, dtype=torch.float32), code="ORDER")


@case("OFF-005", "offload")
def overwritten_source(t: Bench) -> None:
    """Work queued on the device after ``to_host`` was called does not reach the copy: overwriting the source at once
    changes nothing of it, 60 times."""
    for turn in range(60):
        x = t.integers(50, 40, low=-9, high=9, name=f"turn {turn % 3}") + turn
        device = t.put(x)
        transfer = t.run(t.backend.offload.to_host, device)
        device.fill_(-1.0)
        device.mul_(3.0)
        t.equal(transfer.wait(), x, code="ORDER", name="the copy", host=True)
        t.equal(device, torch.full_like(x, -3.0), name="the source")


@case("OFF-006", "offload")
def activations_offloaded(t: Bench) -> None:
    """Activations that autograd saves may wait on the host: gradients have the bits that they have without, and
    changing what was saved does not reach the copy, or is refused."""
    x, w = t.normal(24, 16, name="x"), [t.normal(16, 16, name=f"w{i}") * 0.25 for i in range(3)]

    def gradients(offloaded: bool) -> list[Tensor]:
        leaves = [t.put(v).requires_grad_() for v in (x, *w)]
        with _saved_on_host(t, offloaded):
            y = leaves[0]
            for weight in leaves[1:]:
                y = (y @ weight).tanh()
        return list(torch.autograd.grad(y.square().sum(), leaves))

    for number, (got, want) in enumerate(zip(gradients(True), gradients(False), strict=True)):
        t.equal(got, want.cpu(), name=f"gradient {number}")
    leaf = t.put(x).requires_grad_()
    with _saved_on_host(t, True):
        inner = leaf * 2.0
        y = inner.square()
    inner.detach().mul_(0.0)
    try:
        (got,) = torch.autograd.grad(y.sum(), leaf)
    except RuntimeError as error:
        t.note("saved tensors changed in place", f"refused: {str(error)[:60]}")
    else:
        t.equal(got, x * 8.0, name="a saved tensor that was changed in place")


def _saved_on_host(t: Bench, offloaded: bool) -> torch.autograd.graph.saved_tensors_hooks:
    def pack(x: Tensor) -> Any:
        return t.backend.offload.to_host(x) if offloaded else x

    def unpack(saved: Any) -> Tensor:
        return t.backend.offload.to_device(saved.wait()).wait() if offloaded else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@case("OFF-007", "offload")
def host_memory_given_back(t: Bench) -> None:
    """60 cycles of 2 MiB to the host and back leave less than 16 MiB more of host memory in use; host memory that runs
    out is told as such."""
    x = t.put(torch.arange(MIB // 2, dtype=torch.float32))
    process, before, back = psutil.Process(), 0, x
    for cycle in range(70):
        host = t.run(t.backend.offload.to_host, x).wait()
        back = t.run(t.backend.offload.to_device, host).wait()
        if cycle == 9:  # by then pools are as large as they become
            t.backend.device.synchronize()
            before = process.memory_info().rss
    t.backend.device.synchronize()
    t.at_most(process.memory_info().rss - before, 16.0 * MIB, "bytes more after 60 cycles of 2 MiB", code="LEAK")
    t.equal(back, torch.arange(MIB // 2, dtype=torch.float32), name="after 70 cycles")
    outcome = "nothing was raised"
    try:
        t.backend.offload.to_host(torch.zeros(1, device=t.device).expand(2**48)).wait()
    except Exception as error:
        told = t.backend.device.is_out_of_memory(error)
        outcome = "out of memory" if told else f"{type(error).__name__}: {error}"
    t.same(outcome[:80], "out of memory", "a copy of 2^50 bytes on the host", code="ERROR")


@case("OFF-008", "offload")
def failures_leave_nothing_halfway(t: Bench) -> None:
    """A transfer into what doesn't fit, and a file that is damaged or of another shape, are refused by type and leave
    their destination as it was; the next transfers are right."""
    x, before = t.normal(40, 30), t.normal(40, 30, name="before")
    path = t.folder / "damaged"
    t.run(t.backend.offload.write, path, t.put(x))
    out = t.put(before)
    t.equal(t.run(t.backend.offload.read, path, t.put(before)), x, name="the file, whole")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    t.raises(DataError, t.backend.offload.read, path, out)
    t.equal(out, before, code="STATE", name="after a damaged file")
    path.write_bytes(raw[:-64])
    t.raises(DataError, t.backend.offload.read, path, out)
    t.equal(out, before, code="STATE", name="after a short file")
    t.raises(ValueError, t.backend.offload.to_device, x.double()[:, :7], out=out)
    t.raises(ValueError, t.backend.offload.to_device, x[:20], out=out)
    t.equal(out, before, code="STATE", name="after transfers that don't fit")
    t.equal(t.run(t.backend.offload.to_device, x, out=out).wait(), x, name="the next transfer")


@case(
    "OFF-009",
    "offload",
    worlds=(3,),
    spmd="the one process holds all shards, and what it offloads is asked by OFF-003",
)
def sharded_training_unchanged(t: Bench) -> None:
    """Weights sharded by rows over ranks, each shard and its momentum on the host between steps, with gradients summed
    over ranks that hold other rows of the data: the loss and the weights are those of one process in float64."""
    size, rank = t.world.size, t.world.rank
    shapes = by_hand.sharded_shapes(size)
    x, y, weight = (t.integers(*shape, low=-1, high=1, name=name) for name, shape in shapes.items())
    divisor = 32.0
    losses, last = by_hand.linear(x, y, weight, divisor, steps=2)
    rows, data = weight.shape[0] // size, x.shape[0] // size
    mine, part = slice(rank * rows, (rank + 1) * rows), slice(rank * data, (rank + 1) * data)
    store = Parked(t, {"weight": t.put(weight[mine]), "momentum": t.put(torch.zeros_like(weight[mine]))})
    inputs, targets = t.put(x[part]), t.put(y[part])
    for step in range(2):
        held = store.fetch()
        whole = torch.zeros_like(weight, device=t.device)
        dist.all_gather_into_tensor(whole, held["weight"])
        whole.requires_grad_()
        loss = (inputs @ whole.t() - targets).square().sum() / divisor
        (gradient,) = torch.autograd.grad(loss, whole)
        total = loss.detach().reshape(1)
        dist.all_reduce(total)
        if step == 0:  # the next one has more bits than float32
            t.equal(total, losses[:1], name="the first loss")
        dist.all_reduce(gradient)
        momentum = held["momentum"] * by_hand.MOMENTUM + gradient[mine]
        store.park({"weight": held["weight"] - by_hand.RATE * momentum, "momentum": momentum})
    t.equal(store.fetch()["weight"], last[mine], name="weights of this rank")


@case("OFF-010", "offload")
def odd_tensors(t: Bench) -> None:
    """Tensors that are not contiguous, that share memory (tied) or have no elements can be offloaded: values come back,
    and what shares memory shares it again, if it is offloaded once and looked at twice."""
    x = t.integers(20, 12, low=-99, high=99)
    for name, host in {"transposed": x.t(), "stepped": x[::3, 1::2], "repeated": x[:1].expand(5, 12)}.items():
        device = t.put(x)
        view = {"transposed": device.t(), "stepped": device[::3, 1::2], "repeated": device[:1].expand(5, 12)}[name]
        waiting = t.run(t.backend.offload.to_host, view).wait()
        t.equal(waiting, host.contiguous(), name=f"{name}, on the host", host=True)
        back = t.run(t.backend.offload.to_device, waiting, out=torch.empty(host.shape, device=t.device)).wait()
        t.equal(back, host.contiguous(), name=f"{name}, back")
    empty = t.run(t.backend.offload.to_host, t.put(torch.zeros(3, 0))).wait()
    t.equal(t.run(t.backend.offload.to_device, empty).wait(), torch.zeros(3, 0), name="empty")
    _tied(t, x)


def _tied(t: Bench, x: Tensor) -> None:
    """Two views of one parameter: its memory is offloaded once, and what comes back serves both."""
    whole = t.put(x)
    first, second = whole[:12], whole[8:]
    waiting = t.run(t.backend.offload.to_host, whole).wait()
    del whole, first, second
    gc.collect()
    back = t.run(t.backend.offload.to_device, waiting).wait()
    first, second = back[:12], back[8:]
    first[8:] += 1000.0
    want = x.clone()
    want[8:12] += 1000.0
    t.equal(second, want[8:], name="the second view of shared memory")
