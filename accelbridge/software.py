"""Versions of software that a plan is asked for (``--assume torch=2.13.0``). No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packaging.version import InvalidVersion, Version

from accelbridge.errors import ConfigError, did_you_mean

OLDEST_TORCH = "2.9"
"""As in pyproject.toml, which tests compare."""


def check_versions(backend: str, known: Sequence[str], software: Mapping[str, str]) -> None:
    """Raise ConfigError for software of which no claim of ``backend`` depends, for what is no version, and for a torch
    that this package does not run with: each would be passed over in silence."""
    for name, text in software.items():
        if name not in known:
            raise ConfigError(
                f'software "{name}" asked of backend "{backend}"; its claims depend on {", ".join(known)}'
                f"{did_you_mean(name, list(known))}; name one of them"
            )
        try:
            version = Version(text)
        except InvalidVersion:
            raise ConfigError(f'{name} "{text}" asked; that is no version; write numbers, such as 2.13.0') from None
        if name == "torch" and version < Version(OLDEST_TORCH):
            raise ConfigError(f"torch {text} asked; accelbridge needs {OLDEST_TORCH} or later; assume one of them")
