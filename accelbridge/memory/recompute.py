"""Recomputation of shard units, on ``torch.utils.checkpoint`` (Chen et al., arXiv:1604.06174).

Only ``unit.forward`` is replaced, on the instance, so that names of parameters and of state stay what they are, and
hooks of the unit (sharding's among them) run once, around both passes. Without gradients nothing is checkpointed.

Generator states are restored for the second run, so that a module such as ``nn.Dropout`` draws the same; the semantic
ops themselves never draw from generators.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accelbridge import ops
from accelbridge.errors import ConfigError
from accelbridge.memory.choice import Recompute
from accelbridge.memory.kept import Hooks, Op, Record, Replay, current_hooks, keep

_KEPT = "accelbridge_kept"
"""Annotation of graph nodes that an op which is not recomputed has made."""


def bind(recompute: Recompute, compiled: bool) -> None:
    """Wrap the ops that are bound now and whose outputs are kept; call it right after ``plan.bind()``.

    Raises ConfigError where this torch cannot compile selective recomputation.
    """
    if recompute.kind != "selective":
        return
    if compiled and not hasattr(traceback, "annotate"):
        raise ConfigError(
            f"memory.recompute selective with train.compile asked; torch {torch.__version__} cannot tell a compiler "
            "which op made a kernel (torch.fx.traceback.annotate); set memory.recompute to full or none"
        )
    listed = {*recompute.ops, *(["fp8_linear"] if "linear" in recompute.ops else [])}  # linear, whatever its precision
    ops.bind({name: kept(name, op) for name, op in ops.bound().items() if name not in listed})


def kept(name: str, op: Op) -> Op:
    """``op``, which inside a recomputed unit runs once; it may be any function of tensors, also a collective."""

    @wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with traceback.annotate({_KEPT: name}):
                return op(*args, **kwargs)
        return keep(name, op, args, kwargs)

    return call


def apply(recompute: Recompute, unit: nn.Module) -> None:
    """Let ``unit`` drop its activations and compute them again in the backward pass. In place."""
    if recompute.kind == "none":
        return
    forward = unit.forward
    selective = recompute.kind == "selective"

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        contexts = partial(_contexts, _hooks()) if selective else None
        return _checkpointed(forward, contexts, args, kwargs)

    unit.forward = recomputed


_Contexts = Callable[[], Any]


def _checkpointed(forward: Op, contexts: _Contexts | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(*args: Any) -> Any:  # keywords of ours would meet those of checkpoint
        return forward(*args, **kwargs)

    if torch.compiler.is_compiling():
        if contexts is None:
            return checkpoint(run, *args, use_reentrant=False)
        return checkpoint(run, *args, use_reentrant=False, context_fn=_compiled_contexts)
    if _inside.get():  # a unit in a unit: the outer one drops and recomputes all of it
        return run(*args)
    if contexts is None:
        return checkpoint(_flagged(run), *args, use_reentrant=False)
    return checkpoint(_flagged(run), *args, use_reentrant=False, context_fn=contexts)


_inside: ContextVar[bool] = ContextVar("accelbridge_inside_recomputed", default=False)


def _flagged(run: Op) -> Op:
    def flagged(*args: Any) -> Any:
        token = _inside.set(True)
        try:
            return run(*args)
        finally:
            _inside.reset(token)

    return flagged


def _hooks() -> Hooks | None:
    return None if torch.compiler.is_compiling() else current_hooks()


def _contexts(hooks: Hooks | None) -> tuple[Any, Any]:
    record = Record(hooks=hooks)
    return record.recording(), Replay(record)


def _policy(_: Any, kernel: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Under torch.compile: keep what a kernel of a kept op made, as far as it is no view and is needed."""
    named = _KEPT in traceback.current_meta.get("custom", {})
    is_view = any(result.alias_info is not None for result in kernel._schema.returns)
    return CheckpointPolicy.MUST_SAVE if named and not is_view else CheckpointPolicy.PREFER_RECOMPUTE


_compiled_contexts: _Contexts = partial(create_selective_checkpoint_contexts, _policy)


def finisher(recompute: Recompute, compile_unit: Callable[[nn.Module], None] | None) -> Callable[..., None]:
    """A function ``finish(name, unit)`` for :meth:`accelbridge.backend.Execution.realise`.

    It is called once per shard unit, in the order of the model; the first ``recompute.units`` of them are
    recomputed, and all compiled where ``compile_unit`` is given.
    """
    done: list[str] = []

    def finish(name: str, unit: nn.Module) -> None:
        if recompute.units is None or len(done) < recompute.units:
            apply(recompute, unit)
        if compile_unit is not None:
            compile_unit(unit)
        done.append(name)

    return finish
