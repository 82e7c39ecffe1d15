"""Activations on the host: what autograd saves in a shard unit waits in host memory until its backward pass.

    forward    unit 0 | unit 1 | unit 2 | ...     what unit 0 saved goes out beside unit 1
    backward   ... | unit 2 | unit 1 | unit 0     what unit 1 saved comes back beside the backward pass of unit 2

Two units' tensors are on the device at a time. What moves is the memory that saved tensors lie in, each piece once,
whatever views of it were saved; views come back with their strides, so kernels get what they would have got. Parameters
and buffers stay, and so do tensors below SMALLEST. Recomputation fits in: a unit that is recomputed saves its inputs
alone. torch.compile, too: what its graphs save passes the same hooks (torch.autograd.graph.saved_tensors_hooks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accelbridge.backend import Offload, Transfer
from accelbridge.memory.host_pool import HostPool
from accelbridge.portable.sharded_adamw import local

SMALLEST = 1 << 14
"""Bytes below which a copy would cost more than it frees."""


class ActivationOffload:
    """Moves what :meth:`apply`'s units save between the device and ``pool``, over two lanes of ``offload``."""

    def __init__(self, offload: Offload, device_type: str, pool: HostPool) -> None:
        self.pool = pool
        self._out, self._back = offload.lane(), offload.lane()
        self._device_type = device_type
        self._last: ref[_Run] | None = None
        self._leaving: _Run | None = None

    def apply(self, unit: nn.Module) -> None:
        """Let ``unit`` keep on the host what its forward pass saves. In place; last, around whatever else wraps it."""
        forward = unit.forward

        @wraps(forward)
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            run = self._begin(unit)
            with torch.autograd.graph.saved_tensors_hooks(run.pack, _unpack):
                return forward(*args, **kwargs)

        unit.forward = offloaded

    def _begin(self, unit: nn.Module) -> _Run:
        before = self._last() if self._last is not None else None
        run = _Run(self, _memory_of(unit), before)
        self._last = ref(run)
        if self._leaving is not None:
            self._leaving.left()
        self._leaving = run
        return run

    def moves(self, x: Tensor, staying: set[int]) -> bool:
        """Whether ``x``, a saved tensor, goes to the host."""
        storage = x.untyped_storage()
        return (
            x.device.type == self._device_type
            and storage.nbytes() >= SMALLEST
            and storage._cdata not in staying
            and x.layout is torch.strided
        )

    def send(self, whole: Tensor) -> tuple[Tensor, Transfer]:
        """Start copying ``whole`` out: where it goes, and the copy."""
        host = self.pool.take(whole.nbytes)[: whole.nbytes].view(whole.dtype)
        return host, self._out.to_host(whole, host)

    def fetch(self, host: Tensor) -> Transfer:
        """Start bringing it back."""
        return self._back.to_device(host)


class _Run:
    """One forward pass of one unit: what it saved."""

    def __init__(self, owner: ActivationOffload, staying: set[int], before: _Run | None) -> None:
        self.owner = owner
        self._staying = staying
        self._before = before and ref(before)
        self._pieces: dict[tuple[int, int, torch.dtype], _Piece] = {}
        """By memory, version and dtype while the memory is held here, so that none of these can mean another."""
        self._alive: WeakSet[_Piece] = WeakSet()

    def pack(self, x: Tensor) -> Any:
        part = local(x)
        if type(part) is not Tensor or not self.owner.moves(part, self._staying):
            return x.detach()  # an output itself would hold its own graph, and never be freed
        key = (part.untyped_storage()._cdata, part._version, part.dtype)
        piece = self._pieces.get(key)
        if piece is None:
            whole = _whole(part)
            piece = self._pieces[key] = _Piece(self, whole, *self.owner.send(whole))
            self._alive.add(piece)
        return _Saved(piece, x)

    def left(self) -> None:
        """Free the device's memory: work that is queued from now on comes after the copies."""
        for piece in self._pieces.values():
            piece.left()
        self.forget()

    def forget(self) -> None:
        """From now on pieces live as long as autograd holds them."""
        self._pieces.clear()

    def fetch(self) -> None:
        """Start bringing everything back that is still needed."""
        for piece in list(self._alive):
            piece.fetch()

    def fetch_before(self) -> None:
        """The same for the unit whose backward pass comes next."""
        before = self._before() if self._before is not None else None
        if before is not None:
            self._before = None
            before.fetch()


class _Piece:
    """The memory of saved tensors, on its way to the host, there, or on its way back."""

    def __init__(self, run: _Run, whole: Tensor, host: Tensor, going: Transfer) -> None:
        self._run = run
        self._source: Tensor | None = whole
        self._version = whole._version
        self._host, self._going = host, going
        self._coming: Transfer | None = None

    def left(self) -> None:
        """The copy to the host is done for all that is queued from now on."""
        self._unchanged()
        self._going.order()
        self._source = None

    def _unchanged(self) -> Tensor | None:
        if self._source is not None and self._source._version != self._version:
            raise RuntimeError(
                "a tensor that autograd saved was changed in place while it was on its way to the host; change a copy "
                "of it, or set memory.activations: device"
            )
        return self._source

    def fetch(self) -> None:
        """Start bringing it back, unless it is still here or on its way."""
        if self._source is None and self._coming is None:
            self._coming = self._run.owner.fetch(self._host)

    def here(self) -> Tensor:
        """The memory on the device, flat; what is queued from now on may read it."""
        self._run.forget()
        self._run.fetch_before()
        source = self._unchanged()
        if source is not None:  # of the last unit, whose backward pass comes at once
            return source
        self.fetch()
        assert self._coming is not None
        return self._coming.order()

    def __del__(self) -> None:
        # Whoever gets the buffer next copies after these.
        (self._coming or self._going).order()
        self._run.owner.pool.give(self._host)


class _Saved:
    """One saved tensor: a view of a piece."""

    def __init__(self, piece: _Piece, x: Tensor) -> None:
        part = local(x)
        self.piece = piece
        self.view = part.shape, part.stride(), part.storage_offset()
        self.placed = (x.device_mesh, x.placements, x.shape, x.stride()) if isinstance(x, DTensor) else None


def _unpack(saved: Any) -> Tensor:
    if not isinstance(saved, _Saved):
        return saved
    part = saved.piece.here().as_strided(*saved.view)
    if saved.placed is None:
        return part
    mesh, placements, shape, stride = saved.placed
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def _whole(x: Tensor) -> Tensor:
    """All of the memory that ``x`` is a view of, flat, in the dtype of ``x``."""
    return x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


def _memory_of(unit: nn.Module) -> set[int]:
    """Where its parameters and buffers lie now."""
    return {local(t).untyped_storage()._cdata for t in _held(unit)}


def _held(unit: nn.Module) -> Iterator[Tensor]:
    yield from unit.parameters()
    yield from unit.buffers()


def finisher(offload: ActivationOffload, inner: Callable[[str, nn.Module], None]) -> Callable[..., None]:
    """``inner``, a function for :meth:`accelbridge.backend.Execution.realise`, and then offloading of each unit."""

    def finish(name: str, unit: nn.Module) -> None:
        inner(name, unit)
        offload.apply(unit)

    return finish
