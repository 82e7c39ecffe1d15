"""The project's exceptions. Every message says what was asked, what was found and what to do.

``AccelbridgeError`` and its children are the user's to fix: the command line prints the message without a
traceback and exits with ``exit_code``. A bug of ours stays an ``AssertionError`` or whatever Python raised.

Exit code 2 says that the same command would fail again, so a launcher that restarts ranks ends the run; an error that
may be gone at the next start has another ``exit_code``.
"""

from __future__ import annotations

from collections.abc import Mapping


class AccelbridgeError(Exception):
    """Base of all errors a user can act upon."""

    exit_code = 2


class ConfigError(AccelbridgeError, ValueError):
    """A recipe, argument or combination of settings that cannot work."""


class NotSupportedYet(ConfigError):
    """Asked for something the design names but no release implements yet."""


class BackendError(AccelbridgeError):
    """A backend that is unknown, broken, duplicate, too old, too new, or unusable on this machine."""


class Unsupported(AccelbridgeError):
    """An operation that the chosen backend's capabilities declare unsupported."""


class AgreementError(AccelbridgeError):
    """Ranks that resolved different plans, or a rank that never arrived."""


class CollectiveMismatch(AccelbridgeError):
    """A collective that ranks called differently (shape, dtype, root, reduce op, or order)."""


class RunFailed(AccelbridgeError):
    """The run cannot go on for a reason that this rank did not cause alone; all ranks raise it with the same text.

    ``last_seen`` says where ranks were that give no sign of life any more, by rank.
    """

    exit_code = 69  # EX_UNAVAILABLE of sysexits.h

    def __init__(self, text: str, last_seen: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.last_seen = dict(last_seen or {})


class CollectiveTimeout(RunFailed):
    """A collective that did not finish within ``parallel.timeout``: who had arrived, and what the others did."""


class RankFailed(RunFailed):
    """Another rank of the run has failed, ended, or given no sign of life."""


class DataError(AccelbridgeError):
    """Training data that is missing, truncated, or does not fit the model."""


class CheckpointError(AccelbridgeError):
    """A checkpoint that is missing, incomplete, damaged, or belongs to another model."""


class NonFiniteError(AccelbridgeError):
    """A loss or a gradient that is not a finite number, where ``guards.nonfinite`` says to stop."""

    exit_code = 3


class LossSpikeError(AccelbridgeError):
    """A loss far above those before it, where ``guards.spike`` says to stop or cannot roll back any more."""

    exit_code = 4


class OutOfMemoryError(AccelbridgeError):
    """Memory that ran out, with what takes it and what would save some."""

    exit_code = 5


class DesynchronisedError(AccelbridgeError):
    """Ranks that have come to hold different numbers where all must hold the same."""

    exit_code = 6


def did_you_mean(word: str, known: list[str]) -> str:
    """Return ``'; did you mean "x"?'`` for the closest of ``known``, or an empty string."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""
