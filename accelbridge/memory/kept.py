"""Selective recomputation at the level of semantic ops: a record of what the ops of one unit put out.

A unit runs under ``torch.utils.checkpoint``, which drops every tensor that autograd would keep and runs the unit
again when the backward pass asks for one of them. Inside, an op that is not to be recomputed is called through
:func:`keep`: in the forward pass the record keeps its outputs, and autograd keeps what its own backward needs;
when the unit runs again the op is not called, its outputs come from the record. What an op merely received (its
arguments, or views of them) is left to the checkpoint, so it can be dropped and recomputed.

Policies that select single kernels (``create_selective_checkpoint_contexts``) cannot say that: for an op of several
kernels they either keep intermediate results that nobody needs, or run the op in part again. They serve under
torch.compile, where the partitioner drops what is not needed (:mod:`accelbridge.memory.recompute`).
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

Op = Callable[..., Any]
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack of torch.autograd.graph.saved_tensors_hooks."""


@dataclass(frozen=True)
class Alias:
    """A tensor that lies in the storage of an op's argument."""

    argument: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    shift: int
    """Elements from where the argument begins."""

    def of(self, arguments: Sequence[Tensor]) -> Tensor:
        """The same part of this call's argument."""
        argument = arguments[self.argument].detach()
        return argument.as_strided(self.size, self.stride, argument.storage_offset() + self.shift)


@dataclass(frozen=True)
class Output:
    """A tensor that an op put out, as kept."""

    value: Any
    """The tensor, or what a hook of the caller has made of it."""
    version: int
    requires_grad: bool

    def again(self, load: Callable[[Any], Tensor]) -> Tensor:
        """The tensor as the second run needs it. Raises RuntimeError if it has been written to."""
        if isinstance(self.value, Tensor) and self.value._version != self.version:
            raise RuntimeError(
                "recompute: an output that was kept for the backward pass has been changed in place since; "
                "write the change as a new tensor, or set memory.recompute: full"
            )
        return load(self.value).detach().requires_grad_(self.requires_grad)


@dataclass
class Call:
    """One call of an op that is not recomputed."""

    name: str
    received: list[Alias] = field(default_factory=list)
    """What autograd wanted kept of the arguments, in its order."""
    inner: list[Tensor] = field(default_factory=list)
    """What it keeps besides, for measuring; filled where the record was asked to."""
    outputs: list[Any] = field(default_factory=list)
    """Output, Alias, or a value that is no tensor."""
    structure: TreeSpec | None = None
    wanted: int = 0
    """How many tensors autograd had wanted kept, of the whole unit, when this call was done."""


class Record:
    """The calls of one unit's forward pass, in order. ``hooks`` are those of saved tensors around the unit: what is
    kept passes them as well."""

    def __init__(self, note_inner: bool = False, hooks: Hooks | None = None) -> None:
        self.calls: list[Call] = []
        self._note_inner = note_inner
        self._store, self._load = hooks or (_same, _same)
        self._wanted = 0
        self._next = 0
        self._replaying = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the forward pass."""
        pack, unpack = _outer_hooks()

        def count(tensor: Tensor) -> Any:
            self._wanted += 1
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(count, unpack), _active(self):
            yield
        for call in self.calls:
            if call.wanted == self._wanted:  # the second run ends before it comes to these outputs
                call.structure = None
                call.outputs.clear()

    def replay(self) -> None:
        """Begin a second run of the unit."""
        self._next, self._replaying = 0, True

    def call(self, name: str, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``op(*args, **kwargs)`` returns; the second time without calling it."""
        arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not self._replaying:
            return self._record(name, op, arguments, args, kwargs)
        call = self._replay(name, arguments)
        if call.structure is None:  # only where torch was told not to stop early
            with torch.no_grad():
                return op(*args, **kwargs)
        return tree_unflatten([self._again(output, arguments) for output in call.outputs], call.structure)

    def _record(self, name: str, op: Op, arguments: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call(name)
        self.calls.append(call)
        places = {argument.untyped_storage()._cdata: index for index, argument in reversed([*enumerate(arguments)])}
        outer_pack, outer_unpack = _outer_hooks()

        def alias(tensor: Tensor) -> Alias | None:
            index = places.get(tensor.untyped_storage()._cdata)
            if index is None or tensor.dtype != arguments[index].dtype:
                return None
            shift = int(tensor.storage_offset() - arguments[index].storage_offset())
            return Alias(index, tuple(tensor.size()), tuple(tensor.stride()), shift)

        def pack(tensor: Tensor) -> tuple[bool, Any]:
            found = alias(tensor)
            if found is not None:
                call.received.append(found)
                return True, outer_pack(tensor)
            kept = tensor.detach()  # an output itself would hold its own graph, and never be freed
            if self._note_inner:
                call.inner.append(kept)
            return False, self._store(kept)

        def unpack(packed: tuple[bool, Any]) -> Tensor:
            return outer_unpack(packed[1]) if packed[0] else self._load(packed[1])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = op(*args, **kwargs)
        leaves, call.structure = tree_flatten(result)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                leaf = alias(leaf) or Output(self._store(leaf.detach()), leaf._version, leaf.requires_grad)
            call.outputs.append(leaf)
        call.wanted = self._wanted
        arguments.clear()  # autograd holds on to our hooks, and they to this list
        return result

    def _again(self, output: Any, arguments: Sequence[Tensor]) -> Any:
        if isinstance(output, Alias):
            return output.of(arguments).requires_grad_(arguments[output.argument].requires_grad)
        return output.again(self._load) if isinstance(output, Output) else output

    def _replay(self, name: str, arguments: list[Tensor]) -> Call:
        call = self.calls[self._next] if self._next < len(self.calls) else None
        self._next += 1
        if call is None or call.name != name:
            raise RuntimeError(
                f"recompute: run again, a unit called {name} where it had called {call.name if call else 'no op'}; "
                "its forward must depend on its inputs and parameters only"
            )
        pack, _ = _outer_hooks()
        for alias in call.received:
            pack(alias.of(arguments))  # ends the second run by an exception once the backward pass has all it needs
        return call


class Replay:
    """Context of running the unit again; entered once per backward pass."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._tokens: list[Any] = []

    def __enter__(self) -> None:
        self._record.replay()
        self._tokens.append(_record.set(self._record))

    def __exit__(self, *_: object) -> None:
        _record.reset(self._tokens.pop())


_record: ContextVar[Record | None] = ContextVar("accelbridge_record", default=None)


@contextmanager
def _active(record: Record) -> Iterator[None]:
    token = _record.set(record)
    try:
        yield
    finally:
        _record.reset(token)


def keep(name: str, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``op``, inside a recomputed unit so that it is not called again; elsewhere as it is."""
    record = _record.get()
    if record is None or not torch.is_grad_enabled() or not _plain(args, kwargs):
        return op(*args, **kwargs)
    return record.call(name, op, args, kwargs)


def _plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Wrapper subclasses have no storage of their own to compare; a call with one is recomputed."""
    return not any(is_traceable_wrapper_subclass(leaf) for leaf in tree_leaves((args, kwargs)))


def _same(x: Any) -> Any:
    return x


def current_hooks() -> Hooks | None:
    """The innermost hooks of saved tensors that are active; torch has no public way to ask."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]


def _outer_hooks() -> Hooks:
    """Those of the checkpoint around us; where there are none, a bug."""
    hooks = current_hooks()
    assert hooks is not None, "a record is active inside a checkpoint only"
    return hooks
