"""One phase on all ranks: everybody learns how it went for everybody before anybody raises.

A rank that raised alone would leave, and the others would see a lost connection instead of the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from accelbridge.errors import CheckpointError

T = TypeVar("T")


def together(group: dist.ProcessGroup | None, action: Callable[[], T]) -> list[T]:
    """What ``action`` returned on each rank, by rank; every rank of ``group`` has to call this. None: one process.

    Raises the same CheckpointError on all ranks where ``action`` raised on any. A bug (what is neither a
    CheckpointError nor an OSError) stays what it is on the rank that has it.
    """
    value: Any = None
    fault, raised = None, None
    try:
        value = action()
    except (CheckpointException, Exception) as error:  # DCP's exception derives from BaseException
        fault, raised = describe(error), error
    outcomes = gathered(group, (value, fault))
    faults = [(rank, text) for rank, (_, text) in enumerate(outcomes) if text is not None]
    if not faults:
        return [result for result, _ in outcomes]
    if raised is not None and not isinstance(raised, (CheckpointError, OSError, CheckpointException)):
        raise raised
    raise CheckpointError(_joined(faults, len(outcomes))) from raised


def gathered(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """``value`` of every rank of ``group``, by rank; None: one process."""
    if group is None:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def _joined(faults: list[tuple[int, str]], size: int) -> str:
    """One text: the ranks that say a thing, and what they say."""
    saying: dict[str, list[int]] = {}
    for rank, text in faults:
        saying.setdefault(text, []).append(rank)
    if len(saying) == 1 and (size == 1 or len(faults) == size):
        return next(iter(saying))
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in saying.items())


def describe(error: BaseException) -> str:
    """What a user needs of ``error``: the message alone where it is ours or the system's."""
    if isinstance(error, CheckpointException):
        return _joined([(rank, describe(wrapped[0])) for rank, wrapped in error.failures.items()], 0)
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
