"""Combinations that are known to give wrong results, as dated data, and the one function that reads them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from accelbridge.backend import Request, Support, unsupported


@dataclass(frozen=True)
class KnownBad:
    """One combination that must not be chosen. A rule may refuse more than its source shows; it never refuses less."""

    issue: str
    """Where it is reported, as "owner/repository#number"."""
    reported: date
    """Of the report, or of the oldest word on it that was read."""
    read: date
    """When its state was last looked up."""
    implementations: tuple[str, ...]
    """Names of the candidates that it is about."""
    architectures: tuple[str, ...]
    software: Mapping[str, str] = field(default_factory=dict)
    """PEP 440 specifiers of the versions that are affected, by name as in ``Probe.software``; all must hold. A version
    that is not known counts as affected."""
    applies: Callable[[Request], bool] = lambda request: True
    what: str = ""
    lifted: str = ""
    """The version from which on it is mended; "" where none is known."""

    @property
    def reason(self) -> str:
        mended = f"mended in {self.lifted}" if self.lifted else "no version is known that mends it"
        return f"{self.issue}: {self.what} (reported {self.reported}; {mended})"


def refusal(
    rules: Sequence[KnownBad], name: str, request: Request, architecture: str, software: Mapping[str, str]
) -> Support | None:
    """Why candidate ``name`` must not serve ``request`` on this architecture with this software; None where nothing is
    known against it."""
    for rule in rules:
        concerned = name in rule.implementations and architecture in rule.architectures
        if concerned and _affected(rule.software, software) and rule.applies(request):
            return unsupported(rule.reason)
    return None


def _affected(affected: Mapping[str, str], software: Mapping[str, str]) -> bool:
    return all(version_in(software.get(name), specifier) for name, specifier in affected.items())


def version_in(version: str | None, specifier: str) -> bool:
    """Whether ``version`` ("2.13.0+cu130", "9.20.0.48") is one of ``specifier``; True where it is not known or not a
    version, as what guards against a defect must."""
    try:
        return version is None or SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def at_least(version: str | None, minimum: str) -> bool:
    """Whether ``version`` is known to be ``minimum`` or later: False where it is not known, as a claim must."""
    try:
        return version is not None and Version(version) >= Version(minimum)
    except InvalidVersion:
        return False
