"""Outcomes of a test. More than pass and fail: what did not run, or proved nothing, must not look like either."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Status(StrEnum):
    """From harmless to grave: of several, the last one counts."""

    PASS = "PASS"
    NOT_SUPPORTED = "NOT_SUPPORTED"
    """Declared absent, or without a question under this execution model; the level does not ask for it."""
    WAIVED = "WAIVED"
    """Failed as an approved waiver says it does."""
    XPASS_WAIVER = "XPASS_WAIVER"
    """Waived, but passes: the waiver must go."""
    CAPABILITY_WARNING = "CAPABILITY_WARNING"
    """Declared unsupported, but works."""
    RESOURCE_ERROR = "RESOURCE_ERROR"
    """Too few devices or too little memory."""
    MISTRUSTED = "MISTRUSTED"
    """Ran and compared nothing that could have differed, or stayed green on falsified outputs."""
    DIVERGENT = "DIVERGENT"
    """Ranks came to different conclusions, none of them a failure."""
    FAIL = "FAIL"
    TIMEOUT = "TIMEOUT"
    CRASH = "CRASH"
    DEVICE_LOST = "DEVICE_LOST"
    INTERNAL_ERROR = "INTERNAL_ERROR"
    """A bug of the suite."""
    MISSING = "MISSING"
    """In the must-pass list, but nothing was heard of it."""


_ORDER = list(Status)
HOLDS = frozenset({Status.PASS, Status.WAIVED, Status.NOT_SUPPORTED})
"""What a mandatory test may end with. NOT_SUPPORTED comes only of what a test may do without: an absent cell that its
level demands is a failure (:meth:`Bench.require`, INF-004, INF-013)."""


def worst(statuses: Iterable[Status]) -> Status:
    """The gravest of ``statuses``; MISSING where there is none."""
    return max(statuses, key=_ORDER.index, default=Status.MISSING)


def merge_ranks(statuses: Iterable[Status]) -> Status:
    """What several ranks make together: the gravest, or DIVERGENT where some passed and others did not run."""
    found = set(statuses)
    if len(found) > 1 and found <= {Status.PASS, Status.NOT_SUPPORTED, Status.CAPABILITY_WARNING}:
        return Status.DIVERGENT
    return worst(found)
