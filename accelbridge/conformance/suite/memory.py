"""MEM: copies, layouts, and memory that runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from accelbridge.backend import Mask, Request
from accelbridge.conformance import calls
from accelbridge.conformance.bench import Bench
from accelbridge.conformance.oracle import small
from accelbridge.conformance.registry import case

_SIZES = (0, 1, 15, 16, 17, 4095, 2**16 + 1)
_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MIB = 2**20


def movable(t: Bench) -> list[torch.dtype]:
    """Dtypes that the device holds: all integers, the floats of training, and what else the backend says it moves
    between ranks."""
    others = [torch.float64, *(getattr(torch, name) for name in _FP8)]
    stated = [d for d in others if t.supported("broadcast", str(d).removeprefix("torch."))]
    return [*_INTEGERS, *_FLOATS, *stated]


def noise(t: Bench, size: int, dtype: torch.dtype, name: str = "bytes") -> Tensor:
    """Host tensor of ``dtype`` with every bit at random; for bool every byte is 0 or 1."""
    if not size:
        return torch.zeros(0, dtype=dtype)
    high = 1 if dtype == torch.bool else 255
    raw = t.integers(size * dtype.itemsize, low=0, high=high, name=f"{name}/{dtype}/{size}", dtype=torch.uint8)
    return raw.view(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of ``x``, so that NaN is compared bit by bit too."""
    return x.contiguous().view(torch.uint8) if x.numel() else torch.zeros(0, dtype=torch.uint8)


@case("MEM-001", "core")
def round_trip(t: Bench) -> None:
    """Random bytes come back from the device as they went, NaN payloads included, for every dtype and sizes 0, 1, 15,
    16, 17, 4095 and 2^16+1, and 2^20+1 of bytes and float32: by transfers and by torch's own copies."""
    offload = t.backend.offload
    for dtype in movable(t):
        large = (2**20 + 1,) if dtype in (torch.uint8, torch.float32) else ()
        for size in (*_SIZES, *large):
            x = noise(t, size, dtype)
            device = t.run(offload.to_device, x).wait()
            t.equal(device, x, name=f"to_device {size} {dtype}")
            host = t.run(offload.to_host, device).wait()
            t.equal(as_bytes(host), as_bytes(x), name=f"to_host {size} {dtype}", host=True)
            t.equal(as_bytes(t.put(x).cpu()), as_bytes(x), name=f"put {size} {dtype}", host=True)


def _views(x: Tensor) -> dict[str, Tensor]:
    """Views of a [12, 10] tensor whose elements don't lie one after another, or not from the start."""
    return {
        "transposed": x.t(),
        "every 2nd row": x[::2],
        "every 2nd column": x[:, ::2],
        "columns 3 to 8": x[:, 3:8],
        "from row 5": x[5:],
        "one column, repeated": x[:, 4:5].expand(12, 7),
        "one element, repeated": x[2, 3].expand(5, 4),
        "turned": x.reshape(3, 4, 10).permute(2, 0, 1),
        "overlapping windows": x.reshape(-1).as_strided((6, 8), (3, 2), 4),
    }


@case("MEM-002", "core")
def strided_copies(t: Bench) -> None:
    """Sources that are transposed, sliced, stepped, repeated (stride 0), turned or overlapping are copied by value:
    to the device, on it and back, also into destinations with strides of their own."""
    offload = t.backend.offload
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        x = t.integers(12, 10, low=0, high=119, name=str(dtype), dtype=dtype)
        whole = t.put(x)
        for (name, host), device in zip(_views(x).items(), _views(whole).values(), strict=True):
            want = host.clone(memory_format=torch.contiguous_format)
            label = f"{name} {dtype}"
            t.equal(t.run(offload.to_device, host).wait(), want, name=f"to_device {label}")
            t.equal(t.run(offload.to_host, device).wait(), want, name=f"to_host {label}", host=True)
            t.equal(t.run(device.clone), want, name=f"clone {label}")
            t.equal(t.run(device.contiguous), want, name=f"contiguous {label}")
            # A destination of which every 2nd column is written.
            wide = torch.zeros(*host.shape[:-1], host.shape[-1] * 2, dtype=dtype)
            out = t.put(wide)
            t.run(offload.to_device, host, out=out[..., ::2]).wait()
            wide[..., ::2] = want
            t.equal(out, wide, name=f"into every 2nd column, {label}")


@case("MEM-003", "core")
def overlapping_copies(t: Bench) -> None:
    """A copy on the device between views that overlap either raises, and changes nothing, or comes out as if the
    source had been copied away first, in both directions.

    Views without gaps: where there are some, torch itself looks for no overlap, on any device."""
    moves: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "forward": lambda x: (x[1:], x[:-1]),
        "backward": lambda x: (x[:-1], x[1:]),
        "far": lambda x: (x[16:], x[:-16]),
    }
    x = t.integers(64, 33, low=-99, high=99)
    for name, views in moves.items():
        device, want = t.put(x), x.clone()
        target, source = views(device)
        try:
            target.copy_(source)
            right, origin = views(want)
            right.copy_(origin.clone())
        except RuntimeError as error:
            t.note(f"overlapping copies, {name}", f"refused: {str(error)[:60]}")
        t.equal(device, want, name=name)


_CANARY = 256
"""Bytes on either side."""


def _guarded(t: Bench, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A device tensor with the elements of ``x`` inside a buffer of noise, that buffer, and a host copy of it."""
    side = _CANARY // x.element_size()
    host = noise(t, x.numel() + 2 * side, x.dtype, name="canary")
    host[side : side + x.numel()] = x.reshape(-1)
    buffer = t.put(host)
    return buffer[side : side + x.numel()].view(x.shape), buffer, host


def _intact(t: Bench, buffer: Tensor, host: Tensor, inside: Tensor, name: str, on_host: bool = False) -> None:
    side = _CANARY // inside.element_size()
    want = host.clone()
    want[side : side + inside.numel()] = inside.reshape(-1)
    t.equal(buffer[side : side + inside.numel()].view(inside.shape), inside, name=name, host=on_host)
    for start, what in ((0, "before"), (side + inside.numel(), "after")):
        canary = slice(start, start + side)
        t.equal(buffer[canary], want[canary], code="CANARY", name=f"{what} {name}", host=on_host)


@case("MEM-004", "core")
def canaries(t: Bench) -> None:
    """256 bytes on both sides of what is written survive: of destinations of transfers and files, of parameters that
    an optimizer updates, and of the arguments of every op, which only reads them."""
    offload = t.backend.offload
    for shape in ((1,), (7, 5), (64, 65)):
        for dtype in (torch.float32, torch.bfloat16):
            x = t.normal(*shape, dtype=dtype)
            name = f"{shape} {dtype}"
            inside, buffer, host = _guarded(t, torch.zeros_like(x))
            t.run(offload.to_device, x, out=inside).wait()
            _intact(t, buffer, host, x, f"to_device {name}")
            t.run(offload.write, t.folder / "canary", t.put(x))
            inside, buffer, host = _guarded(t, torch.zeros_like(x))
            t.run(offload.read, t.folder / "canary", inside)
            _intact(t, buffer, host, x, f"read {name}")
            side = _CANARY // x.element_size()
            there, kept = host.clone(), host.clone()
            t.run(offload.to_host, t.put(x), out=there[side : side + x.numel()].view(shape)).wait()
            _intact(t, there, kept, x, f"to_host {name}", on_host=True)
    _canaries_of_arguments(t)


def _canaries_of_arguments(t: Bench) -> None:
    for op in calls.OPS:
        wanted = calls.call(t, op, "float32")
        for name, implementation in calls.implementations(t, op, "float32"):
            guarded = [_guarded(t, x) if isinstance(x, Tensor) and x.dim() else None for x in wanted.arguments]
            arguments = [g[0] if g else x for g, x in zip(guarded, wanted.arguments, strict=True)]
            got = t.run(implementation, *(t.put(x) if isinstance(x, Tensor) and not x.dim() else x for x in arguments))
            t.within(got, wanted.want, small.bound(wanted.want, wanted.dtype), name=f"{op} {name}")
            for place, (guard, x) in enumerate(zip(guarded, wanted.arguments, strict=True)):
                updated = op == "adamw" and place == 0
                if guard:
                    inside = t.fetch(guard[0]) if updated else x  # checked above, to a bound
                    _intact(t, guard[1], guard[2], inside, f"{op} {name}, argument {place}")


@case("MEM-005", "core")
def shifted_views(t: Bench) -> None:
    """Products, attention and copies of views that start 1 element into their memory, or rows into it, give what their
    aligned copies give: exact integers in float32 and bfloat16, so in any order of sums."""
    for dtype in (torch.float32, torch.bfloat16):
        a, b = t.integers(8, 24, name="a", dtype=dtype), t.integers(24, 16, name="b", dtype=dtype)
        want = (a.double() @ b.double()).to(dtype)
        for shift in (1, 3, 16):
            left, right = _shifted(t, a, shift), _shifted(t, b, shift)
            t.equal(t.run(left.clone), a, name=f"clone, shifted {shift} {dtype}")
            t.equal(t.run(t.backend.offload.to_host, left).wait(), a, name=f"to_host {shift} {dtype}", host=True)
            t.equal(t.run(t.backend.matmul.matmul, left, right), want, name=f"matmul {shift} {dtype}")
            weight = _shifted(t, b.t().contiguous(), shift)
            for name, linear in t.candidates(Request("linear", str(dtype).removeprefix("torch."))):
                t.equal(t.run(linear, left, weight), want, name=f"linear {name} {shift} {dtype}")
            _shifted_attention(t, dtype, shift)


def _shifted(t: Bench, x: Tensor, shift: int) -> Tensor:
    """``x`` on the device, ``shift`` elements into memory that holds something else before and after."""
    host = t.integers(x.numel() + 2 * shift, low=-9, high=9, name="around", dtype=x.dtype)
    host[shift : shift + x.numel()] = x.reshape(-1)
    return t.put(host)[shift : shift + x.numel()].view(x.shape)


def _shifted_attention(t: Bench, dtype: torch.dtype, shift: int) -> None:
    """Where one key alone is seen, the result is its value exactly: keys 0 and 1 are of documents of their own."""
    q, k, v = (t.integers(1, 2, 8, 16, name=name, dtype=dtype) for name in "qkv")
    segments = torch.arange(8).unsqueeze(0)
    request = Request("attention", str(dtype).removeprefix("torch."), needs=frozenset({"causal", "segments"}))
    for name, attention in t.candidates(request):
        mask = Mask(segments_BS=t.put(segments))
        got = t.run(attention, _shifted(t, q, shift), _shifted(t, k, shift), _shifted(t, v, shift), mask)
        t.equal(got, v, name=f"attention {name} {shift} {dtype}")


@case("MEM-006", "core")
def empty_tensors(t: Bench) -> None:
    """Tensors without elements are copied, added, multiplied and reduced: to nothing, or to the identity of the
    reduction (sum 0, product 1, all true), on every path that takes tensors with elements."""
    for shape in ((0,), (0, 5), (5, 0), (2, 0, 3)):
        for dtype in (torch.float32, torch.bfloat16):
            x, label = torch.zeros(shape, dtype=dtype), f"{shape} {dtype}"
            device = t.run(t.backend.offload.to_device, x).wait()
            t.equal(device, x, name=f"to_device {label}")
            t.equal(t.run(t.backend.offload.to_host, device).wait(), x, name=f"to_host {label}", host=True)
            t.equal(t.run(lambda d=device: d + 1.0), x, name=f"sum {label}")
            t.equal(t.run(lambda d=device: (d * d).exp()), x, name=f"product {label}")
            t.equal(t.run(device.sum), torch.zeros((), dtype=dtype), name=f"sum of {label}")
            t.equal(t.run(device.prod), torch.ones((), dtype=dtype), name=f"product of {label}")
    for m, k, n in ((0, 3, 5), (4, 0, 5), (4, 3, 0), (4, 3, 5)):
        a, b = t.integers(m, k, name="a"), t.integers(k, n, name="b")
        want = (a.double() @ b.double()).float()
        t.equal(t.run(t.backend.matmul.matmul, t.put(a), t.put(b)), want, name=f"matmul {m}x{k}x{n}")
        for name, linear in t.candidates(Request("linear", "float32")):
            t.equal(t.run(linear, t.put(a), t.put(b.t().contiguous())), want, name=f"linear {name} {m}x{k}x{n}")
    t.equal(t.run(t.put(torch.zeros(5, 0)).sum, 1), torch.zeros(5), name="sum over no columns")
    t.equal(t.run(t.put(torch.zeros(0, dtype=torch.bool)).all), torch.tensor(True), name="all of nothing")


# ------------------------------------------------------------------------------------------- memory that runs out

_SIDE = 2**23
"""The product of a column and a row of so many float32 takes 2^48 bytes, which no process can address; the two take 32
MiB each."""


def run_out(t: Bench, name: str) -> None:
    """Ask for too much in three ways, and for one number of it, without which a lazy device would do nothing; each is
    told as memory that ran out, and nothing is left behind."""
    device = t.backend.device
    asked: dict[str, Callable[[], Tensor]] = {
        "allocation": lambda: torch.empty(2**48, dtype=torch.float32, device=t.device),
        "product": lambda: t.backend.matmul.matmul(
            torch.ones(_SIDE, 1, device=t.device), torch.ones(1, _SIDE, device=t.device)
        ),
        "transfer": lambda: t.backend.offload.to_device(torch.zeros(1).expand(2**48)).wait(),
    }
    for what, call in asked.items():
        outcome = "nothing was raised"
        try:
            made = call()
            device.synchronize()
            t.fetch(made.flatten()[:1])
            del made
        except Exception as error:  # which error it is, is the vendor's; what it means, the backend says
            told = device.is_out_of_memory(error)
            outcome = "out of memory" if told else f"{type(error).__name__}: {error}"
        t.same(outcome[:80], "out of memory", f"{name}{what} too large", code="ERROR")
    gc.collect()


def _works(t: Bench, name: str) -> None:
    a, b = t.integers(33, 17, name="a"), t.integers(17, 9, name="b")
    t.equal(t.run(t.backend.matmul.matmul, t.put(a), t.put(b)), (a.double() @ b.double()).float(), name=name)


@case("MEM-007", "core", timeout_s=600.0)
def out_of_memory(t: Bench) -> None:
    """An allocation, a product and a transfer of 2^48 bytes or more raise what ``Device.is_out_of_memory`` knows; then
    memory in use is what it was, and 64 MiB and a product are given as before. Where the chip's memory is known, it is
    also filled block by block: what fitted before memory ran out fits again once it is given back."""
    t.same(t.backend.device.is_out_of_memory(RuntimeError("shapes differ")), False, "other errors", code="ERROR")
    _works(t, "before")
    before = allocated(t)
    run_out(t, "")
    if before is not None:
        t.at_most((allocated(t) or 0) - before, 32 * MIB, "bytes still held", code="LEAK")  # the operands were 64 MiB
    t.equal(torch.ones(16, MIB, device=t.device)[:, ::1024], torch.ones(16, 1024), name="64 MiB after")
    _works(t, "after")
    total = t.capabilities.chip.memory_bytes
    if total is not None:
        first, second = _fill(t, total), _fill(t, total)
        t.at_least(second, first, "blocks that fit after memory ran out", code="LEAK")
        _works(t, "after it was full")


def _fill(t: Bench, total: int) -> int:
    """How many blocks of an eighth of the chip's memory fit."""
    blocks: list[Tensor] = []
    try:
        while len(blocks) < 16:
            blocks.append(torch.empty(total // 8, dtype=torch.uint8, device=t.device))
    except Exception as error:
        t.same(t.backend.device.is_out_of_memory(error), True, "a full device", code="ERROR")
    return len(blocks)


def allocated(t: Bench) -> int | None:
    """Bytes in use, once all that is queued has finished."""
    gc.collect()
    t.backend.device.synchronize()
    return t.backend.device.memory()["allocated"]


@case("MEM-008", "core", timeout_s=240.0)
def out_of_memory_again(t: Bench) -> None:
    """Running out of memory 4 times more, in 3 ways each, leaves less than 1 MiB each time in use."""
    _works(t, "before")
    run_out(t, "time 1: ")
    before = allocated(t)
    for number in range(4):
        run_out(t, f"time {number + 2}: ")
    _works(t, "afterwards")
    after = allocated(t)
    if before is not None and after is not None:
        t.at_most(after - before, 4.0 * MIB, "bytes more after 4 times", code="LEAK")


@case("MEM-009", "core")
def memory_is_measured(t: Bench) -> None:
    """The memory in use rises by at least what is allocated and falls by it again, and its peak is never below it: 96
    MiB, less 10 % for allocators that had some ready."""
    memory = t.backend.device.memory
    before, size = allocated(t), 96 * MIB
    t.same(sorted(memory()), ["allocated", "peak", "total"], "keys of memory()", code="MEMORY")
    if before is None:
        t.same([key for key, value in memory().items() if key != "total" and value], [], "untold", code="MEMORY")
        return
    t.backend.device.reset_peak_memory()
    x = torch.ones(size // 4, device=t.device)
    during = allocated(t) or 0
    t.at_least(during - before, 0.9 * size, "bytes more with 96 MiB", code="MEMORY")
    t.at_least(memory()["peak"] or 0, during * 0.999, "peak with 96 MiB", code="MEMORY")
    t.equal(x[:: size // 64], torch.ones(16), name="what was allocated")
    del x
    t.at_least(during - (allocated(t) or 0), 0.9 * size, "bytes fewer without", code="MEMORY")
    t.at_least(memory()["peak"] or 0, before + 0.9 * size, "peak afterwards", code="MEMORY")
    t.at_least(memory()["total"] or 0, during, "total", code="MEMORY")


# ------------------------------------------------------------------------------------------ copies that don't block


@case("MEM-010", "core")
def to_device_in_flight(t: Bench) -> None:
    """After a transfer to the device was waited for, or the device was synchronised, what is there is the source, and
    overwriting the source on the host changes nothing: 20 times with other values."""
    for turn in range(20):
        x = torch.arange(20_000, dtype=torch.float32) * (turn + 1)
        want, out = x.clone(), torch.zeros(20_000, device=t.device)
        transfer = t.run(t.backend.offload.to_device, x, out=out)
        if turn % 2:
            t.backend.device.synchronize()
        else:
            out = transfer.wait()
        copied = out.clone()
        x.fill_(-7.0)
        t.equal(copied, want, name="at once")
        t.equal(out, want, name="after the source was overwritten")
        transfer.wait()


@case("MEM-011", "core")
def to_host_in_flight(t: Bench) -> None:
    """What a transfer to the host gives once it was waited for is what the device holds, 200 times with other values,
    in new memory and in memory used before."""
    size = 5000
    reused = torch.zeros(size)
    for turn in range(200):
        x = torch.arange(size, dtype=torch.float32) * (turn + 1)
        transfer = t.run(t.backend.offload.to_host, t.put(x), out=reused if turn % 2 else None)
        t.equal(transfer.wait(), x, name="out" if turn % 2 else "new", host=True)
