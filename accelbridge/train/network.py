"""The network profile of a run: environment variables that a backend states for one kind of network, as data.

Off unless a recipe names one. Its variables are set before the vendor's library is loaded, a value that the user has
set wins and is said, and the values in force are part of the plan's contract: they must be equal on all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from accelbridge.backend import Collectives, Profile
from accelbridge.errors import ConfigError, did_you_mean
from accelbridge.plan import ExecutionPlan

_SET: dict[str, str] = {}
"""Variables that this process has set for a profile: they are no choice of the user's when a second run begins."""


@dataclass(frozen=True)
class Network:
    """A profile as a run meets it."""

    name: str
    profile: Profile
    variables: Mapping[str, str]
    """The values in force."""
    notes: tuple[str, ...]


def find_profile(name: str, backend: str, collectives: Collectives) -> Profile:
    """The profile called ``name``. Raises ConfigError, which lists those that there are."""
    profiles = collectives.profiles()
    if not profiles:
        raise ConfigError(f'backend.profile "{name}" asked; this backend has no network profiles; remove it')
    if name not in profiles:
        raise ConfigError(
            f'backend.profile "{name}" asked; backend {backend} has {", ".join(profiles)}'
            f"{did_you_mean(name, list(profiles))}; choose one of them, or remove it"
        )
    return profiles[name]


def resolve_network(
    name: str | None, backend: str, collectives: Collectives, environment: Mapping[str, str] | None = None
) -> Network | None:
    """What ``backend.profile`` comes to where the environment holds ``environment``, by default this process's; None
    without a profile. Raises ConfigError for an unknown one."""
    if name is None:
        return None
    profile = find_profile(name, backend, collectives)
    theirs = _of_the_user() if environment is None else environment
    values = {key: theirs.get(key, value) for key, value in profile.variables.items()}
    shown = " ".join(f"{key}={value}" for key, value in profile.variables.items()) or "no variables"
    notes = [f"network profile {name} ({profile.summary}): {shown}; source: {profile.source}"]
    notes += [f"network profile {name} needs {profile.needs}"] if profile.needs else []
    notes += [
        f"{key}={values[key]} is set in the environment, and wins over {value} of network profile {name}"
        for key, value in profile.variables.items()
        if values[key] != value
    ]
    return Network(name, profile, values, tuple(notes))


def with_network(plan: ExecutionPlan, network: Network | None) -> ExecutionPlan:
    """The plan, whose contract holds the values in force."""
    if network is None:
        return plan
    contract = {**plan.contract, "network": {"profile": network.name, **network.variables}}
    return replace(plan, contract=contract, notes=(*plan.notes, *network.notes))


def apply_profile(profile: Profile | None) -> None:
    """Set the variables of ``profile`` that the user has not set, and take back those of a run before this one."""
    theirs = _of_the_user()
    for key in list(_SET):
        if os.environ.get(key) == _SET.pop(key):
            del os.environ[key]
    for key, value in (profile.variables if profile else {}).items():
        if key not in theirs:
            os.environ[key] = _SET[key] = value


def _of_the_user() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if _SET.get(key) != value}
