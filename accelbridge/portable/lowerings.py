"""The library of lowerings: rewrites of a collective that a vendor's library lacks or gets wrong.

A lowering is a pure function of one :class:`Call`. It returns the call to issue instead and what to do after
that one has completed, or None where it does not apply. Lowerings compose in the fixed order of
:data:`LIBRARY` (what moves bytes first, what does arithmetic last), so that a bfloat16 average over a strided
tensor is copied, widened, summed, divided in float32 and rounded once. A backend only names the ones that it
needs.
"""

# pyright: reportPrivateImportUsage=false
# (torch.distributed re-exports without saying so)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from accelbridge.backend import Lowering
from accelbridge.errors import BackendError, Unsupported

# ----------------------------------------------------------------------------------------- calls and rewrites

IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "reduce", "broadcast"})
REDUCTIONS = frozenset(
    {
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
    }
)
SUMS = frozenset({"SUM", "AVG", "PREMUL_SUM"})


@dataclass(frozen=True)
class Call:
    """One collective as it is handed to c10d, in the method names of torch 2.13.

    Tensors lie in nested lists, as c10d takes them. An in-place op has its tensors in ``outputs`` and None in
    ``inputs``; ``send`` and ``barrier`` have no outputs. ``extra`` holds what stands between tensors and
    options: the split sizes (of the output, of the input), or the peer and the tag.
    """

    op: str
    outputs: Any = None
    inputs: Any = None
    options: Any = None
    extra: tuple[Any, ...] = ()

    def arguments(self) -> list[Any]:
        """The positional arguments of the c10d method."""
        parts = [p for p in (self.outputs, self.inputs) if p is not None]
        return [*parts, *self.extra, *([] if self.options is None else [self.options])]

    def tensors(self) -> Iterator[Tensor]:
        yield from flatten(self.outputs)
        yield from flatten(self.inputs)

    @property
    def reduce_op(self) -> str:
        """ "SUM", "AVG", "MAX", ..., or "" where the op does not reduce."""
        return reduce_op_name(self.options.reduceOp) if self.op in REDUCTIONS else ""

    @property
    def root(self) -> int | None:
        """The root as a rank of the group."""
        return getattr(self.options, "rootRank", None)

    def reads_outputs(self, rank: int) -> bool:
        """Whether what lies in ``outputs`` goes into the call on this rank."""
        return self.op in IN_PLACE and (self.op != "broadcast" or self.root == rank)

    def writes_outputs(self, rank: int) -> bool:
        """Whether this rank's ``outputs`` are the call's result (a non-root's are left alone)."""
        if self.op == "reduce":
            return self.root == rank
        return self.op != "broadcast" or self.root != rank

    def with_reduce_op(self, op: Any) -> Call:
        """The same call with another reduce op; the caller's options object stays as it is."""
        return replace(self, options=copy_options(self.options, reduceOp=op))


class Transport(Protocol):
    """What a lowering may ask of the group below it."""

    rank: int
    size: int

    def issue(self, call: Call) -> Any:
        """Run ``call`` on the vendor's group and return its work."""
        ...


Finish = Callable[[], None]
"""Runs once, after the issued call has completed: copy back, cast, scale."""
Step = tuple[Call, Finish | None]
"""The call to issue instead. No finish: the result lies where the caller looks for it."""
Rewrite = Callable[[Call, Transport], Step | None]


def flatten(nested: Any) -> Iterator[Tensor]:
    """All tensors of nested lists, in order."""
    if isinstance(nested, Tensor):
        yield nested
    elif nested is not None:
        for item in nested:
            yield from flatten(item)


def nested_map(fn: Callable[[Tensor], Tensor], nested: Any) -> Any:
    """``fn`` of every tensor of nested lists, in the same nesting."""
    if nested is None or isinstance(nested, Tensor):
        return None if nested is None else fn(nested)
    return [nested_map(fn, item) for item in nested]


def copy_options(options: Any, **changes: Any) -> Any:
    """A copy of a c10d options object (they have no copy of their own) with some fields changed."""
    copy = type(options)()
    for name in (n for n in dir(options) if not n.startswith("_")):
        setattr(copy, name, getattr(options, name))
    for name, value in changes.items():
        setattr(copy, name, value)
    return copy


def reduce_op_name(op: Any) -> str:
    """ "SUM", "AVG", ...: a ``ReduceOp`` wraps its kind, which ``__getstate__`` tells on 2.9 and on 2.13."""
    state: Any = op.__getstate__() if isinstance(op, dist.ReduceOp) else (op, None)
    return state[0].name


@dataclass(frozen=True)
class Codec:
    """Another representation of a tensor for the duration of one call."""

    wants: Callable[[Tensor], bool]
    encode: Callable[[Tensor], Tensor]
    """The tensor's value in a buffer that is the call's own."""
    allocate: Callable[[Tensor], Tensor]
    """Such a buffer without a value, for what is only written."""
    decode: Callable[[Tensor, Tensor], object]
    """From the buffer (first) back into the tensor."""


def substitute(call: Call, rank: int, codec: Codec) -> Step | None:
    """``call`` on the buffers of ``codec``, and the way back for what this rank's call writes."""

    def wants(tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and codec.wants(tensor)

    if not any(wants(t) for t in call.tensors()):
        return None
    written: list[tuple[Tensor, Tensor]] = []
    fresh = codec.encode if call.reads_outputs(rank) else codec.allocate

    def output(tensor: Tensor) -> Tensor:
        if not wants(tensor):
            return tensor
        buffer = fresh(tensor)
        written.append((buffer, tensor))
        return buffer

    outputs = nested_map(output, call.outputs)
    inputs = nested_map(lambda t: codec.encode(t) if wants(t) else t, call.inputs)

    def finish() -> None:
        if call.writes_outputs(rank):
            for buffer, tensor in written:
                codec.decode(buffer, tensor)

    return replace(call, outputs=outputs, inputs=inputs), finish


# --------------------------------------------------------------------------------------------------- movement


def nothing(call: Call, transport: Transport) -> Step | None:
    """A collective of tensors without elements -> a sum of one number, so that ranks still wait for each other."""
    tensors = list(call.tensors())
    if not tensors or any(tensor.numel() for tensor in tensors) or call.op in ("send", "recv"):
        return None
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    options.asyncOp = getattr(call.options, "asyncOp", True)
    return Call("allreduce", [torch.zeros(1, device=tensors[0].device)], options=options), None


def _is_float8(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1


def fp8_bytes(call: Call, transport: Transport) -> Step | None:
    """Any movement of float8 -> the same movement of a uint8 view. A reduction over float8 is refused: bytes
    cannot be added, and a sum in float8 would be rounded at every hop."""
    found = next((t for t in call.tensors() if _is_float8(t)), None)
    if found is None:
        return None
    if call.op in REDUCTIONS:
        raise Unsupported(
            f"asked: {call.op} ({call.reduce_op}) over {found.dtype}; found: float8 can be moved between "
            "ranks but not reduced; do: convert to float32 or bfloat16 first"
        )

    def view(tensor: Tensor) -> Tensor:
        return tensor.view(torch.uint8) if _is_float8(tensor) else tensor

    outputs, inputs = nested_map(view, call.outputs), nested_map(view, call.inputs)
    return replace(call, outputs=outputs, inputs=inputs), None


def list_all_to_all(call: Call, transport: Transport) -> Step | None:
    """all_to_all over lists of tensors -> all_to_all_single over their concatenation, with split sizes."""
    if call.op != "alltoall":
        return None
    sent, received = list(flatten(call.inputs)), list(flatten(call.outputs))
    flat = torch.cat([t.reshape(-1) for t in sent])
    splits = [t.numel() for t in received]
    buffer = flat.new_empty(sum(splits))

    def finish() -> None:
        for tensor, part in zip(received, buffer.split(splits), strict=True):
            tensor.copy_(part.view(tensor.shape))

    extra = (splits, [t.numel() for t in sent])
    return replace(call, op="all_to_all_single", outputs=buffer, inputs=flat, extra=extra), finish


def _may_overlap(tensor: Tensor) -> bool:
    """Whether two elements may share memory: some stride is not larger than all that lies within it."""
    reach = 0
    for stride, size in sorted((st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _store(buffer: Tensor, tensor: Tensor) -> None:
    """Copy into a tensor of any strides; where elements share memory, they must have got the same value."""
    if not tensor.numel() or not _may_overlap(tensor):
        tensor.copy_(buffer)
        return
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    place = torch.arange(reach + 1, device=tensor.device).as_strided(tensor.shape, tensor.stride(), 0)
    memory = tensor.as_strided((reach + 1,), (1,), tensor.storage_offset())
    memory[place.reshape(-1)] = buffer.reshape(-1)
    if not torch.equal(tensor.contiguous().view(torch.uint8), buffer.view(torch.uint8)):
        raise ValueError(
            f"asked: a collective into a tensor of shape {list(tensor.shape)} whose elements share memory "
            f"(strides {list(tensor.stride())}); found: a result that differs between elements that are one; "
            "do: pass a contiguous tensor"
        )


_CONTIGUOUS = Codec(
    wants=lambda t: not t.is_contiguous() or t.is_conj() or t.is_neg(),
    encode=lambda t: t.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg(),
    allocate=lambda t: torch.empty(t.shape, dtype=t.dtype, device=t.device),
    decode=_store,
)


def contiguous(call: Call, transport: Transport) -> Step | None:
    """Strided, transposed, expanded and lazily conjugated tensors -> contiguous copies, written back."""
    return substitute(call, transport.rank, _CONTIGUOUS)


def uneven_all_to_all(call: Call, transport: Transport) -> Step | None:
    """all_to_all_single with split sizes -> one with equal, zero-padded splits.

    The width is the largest split of any rank, which no rank knows alone: it costs a MAX over one integer
    and a wait, on every call that gives split sizes. All ranks must give them, or none.
    """
    if call.op != "all_to_all_single" or not (call.extra[0] or call.extra[1]):
        return None
    output, source = call.outputs, call.inputs
    n = transport.size
    received, sent = ([rows // n] * n for rows in (output.shape[0], source.shape[0]))
    received, sent = call.extra[0] or received, call.extra[1] or sent
    width = torch.tensor([max(*received, *sent, 1)], dtype=torch.int32, device=source.device)
    options: Any = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    transport.issue(Call("allreduce", [width], options=options)).wait()
    rows, rest = int(width.item()), source.shape[1:]
    padded = source.new_zeros((n, rows, *rest))
    for row, part in zip(padded, source.split(sent), strict=True):
        row[: len(part)].copy_(part)
    buffer = torch.empty_like(padded)

    def finish() -> None:
        for row, part in zip(buffer, output.split(received), strict=True):
            part.copy_(row[: len(part)])

    flat = (n * rows, *rest)
    return replace(call, outputs=buffer.view(flat), inputs=padded.view(flat), extra=([], [])), finish


# ------------------------------------------------------------------------------------------------- arithmetic

_HALF = (torch.bfloat16, torch.float16)

_FLOAT32 = Codec(
    wants=lambda t: t.dtype in _HALF,
    encode=lambda t: t.to(torch.float32, memory_format=torch.contiguous_format),
    allocate=lambda t: torch.empty(t.shape, dtype=torch.float32, device=t.device),
    decode=lambda buffer, t: t.copy_(buffer),
)


def float32_reduce(call: Call, transport: Transport) -> Step | None:
    """SUM, AVG, PREMUL_SUM and PRODUCT over bfloat16 and float16 -> the same in float32, rounded once at the
    end. Twice the bytes on the wire."""
    if call.reduce_op not in SUMS | {"PRODUCT"}:
        return None
    return substitute(call, transport.rank, _FLOAT32)


_INT32 = Codec(
    wants=lambda t: t.dtype is torch.int16,
    encode=lambda t: t.to(torch.int32, memory_format=torch.contiguous_format),
    allocate=lambda t: torch.empty(t.shape, dtype=torch.int32, device=t.device),
    decode=lambda buffer, t: t.copy_(buffer),
)


def int16_as_int32(call: Call, transport: Transport) -> Step | None:
    """int16 -> int32, in which every operation is exact; what overflows wraps in the end, as it would have."""
    return substitute(call, transport.rank, _INT32)


def refused_product(call: Call, transport: Transport) -> Step | None:
    """PRODUCT and bitwise operations raise ``Unsupported``, for libraries that have none of them."""
    if call.reduce_op in ("PRODUCT", "BAND", "BOR", "BXOR"):
        raise Unsupported(
            f"asked: {call.op} ({call.reduce_op}); found: the vendor's library has SUM, AVG, MIN and MAX; do: gather "
            "and combine on each rank"
        )
    return None


def premul_as_sum(call: Call, transport: Transport) -> Step | None:
    """PREMUL_SUM -> SUM of copies that have been multiplied with the factor.

    The factor, a number or a tensor, is the second part of the reduce op's state.
    """
    if call.reduce_op != "PREMUL_SUM":
        return None
    factor = call.options.reduceOp.__getstate__()[1]
    codec = Codec(
        wants=lambda t: True,
        encode=lambda t: (t * (factor.to(t.device) if isinstance(factor, Tensor) else factor)).to(t.dtype),
        allocate=torch.empty_like,
        decode=lambda buffer, t: t.copy_(buffer),
    )
    return substitute(call.with_reduce_op(dist.ReduceOp.SUM), transport.rank, codec)


def avg_as_sum(call: Call, transport: Transport) -> Step | None:
    """AVG -> SUM, then divided by the group's size: one rounding more than the sum's (integers truncate)."""
    if call.reduce_op != "AVG":
        return None

    def finish() -> None:
        for tensor in flatten(call.outputs) if call.writes_outputs(transport.rank) else ():
            exact = tensor.is_floating_point() or tensor.is_complex()
            tensor.div_(transport.size, rounding_mode=None if exact else "trunc")

    return call.with_reduce_op(dist.ReduceOp.SUM), finish


def _flip_negative(bits: Tensor) -> Tensor:
    """Sign and magnitude <-> two's complement, its own inverse: integers then order as the floats do."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def nan_minmax(call: Call, transport: Transport) -> Step | None:
    """MIN and MAX over floats -> the same over order-preserving integers, where a NaN beats every number.

    So any NaN gives NaN, on every rank, in any order of reduction; also -0 < +0. Half precision goes through
    float32, which is exact.
    """
    if call.reduce_op not in ("MIN", "MAX"):
        return None
    largest = call.reduce_op == "MAX"

    def integer(t: Tensor) -> torch.dtype:
        return torch.int64 if t.dtype is torch.float64 else torch.int32

    def encode(t: Tensor) -> Tensor:
        wide = t.float() if t.dtype in _HALF else t
        keys = _flip_negative(wide.contiguous().view(integer(t)))
        limits = torch.iinfo(keys.dtype)
        return keys.masked_fill_(wide.isnan(), limits.max if largest else limits.min)

    def decode(buffer: Tensor, t: Tensor) -> None:
        t.copy_(_flip_negative(buffer).view(torch.float64 if t.dtype is torch.float64 else torch.float32))

    def allocate(t: Tensor) -> Tensor:
        return torch.empty(t.shape, dtype=integer(t), device=t.device)

    codec = Codec(lambda t: t.is_floating_point() and not _is_float8(t), encode, allocate, decode)
    return substitute(call, transport.rank, codec)


# ---------------------------------------------------------------------------------------------------- library

LIBRARY: dict[str, Rewrite] = {
    rewrite.__name__: rewrite
    for rewrite in (
        nothing,
        fp8_bytes,
        list_all_to_all,
        contiguous,
        uneven_all_to_all,
        float32_reduce,
        int16_as_int32,
        refused_product,
        premul_as_sum,
        avg_as_sum,
        nan_minmax,
    )
}
"""Every lowering by name, in the order in which they are applied."""


def select(lowerings: Sequence[Lowering]) -> tuple[Rewrite, ...]:
    """The rewrites that ``lowerings`` name, in the library's order."""
    names = [lowering.name for lowering in lowerings]
    if unknown := sorted(set(names) - set(LIBRARY)):
        raise BackendError(f"asked: the lowerings {unknown}; found: only {sorted(LIBRARY)}")
    return tuple(rewrite for name, rewrite in LIBRARY.items() if name in names)


@dataclass
class Plan:
    """One call after all rewrites, with what is left to do once it has completed."""

    call: Call
    finish: list[Finish] = field(default_factory=list)
    """In the order in which they must run: last rewrite first."""


def lower(call: Call, rewrites: Sequence[Rewrite], transport: Transport) -> Plan:
    """Apply every rewrite that has something to say about ``call``."""
    plan = Plan(call)
    for rewrite in rewrites:
        if (step := rewrite(plan.call, transport)) is not None:
            plan.call, finish = step
            if finish is not None:
                plan.finish.insert(0, finish)
    return plan
