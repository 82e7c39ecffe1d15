"""A host that is not here: ``--assume chip=NAME`` shows the plan that it would get, on any machine.

Nothing is probed or opened. What the backend says of the chip is a pure function of its name and of software versions,
so the plan is the one that such a host resolves, as far as its own probe answers the same; it says "assumed".
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accelbridge.backend import Backend, Probe
from accelbridge.errors import BackendError, ConfigError, did_you_mean
from accelbridge.plugins import ENVIRONMENT, Candidate, Selection, installed, load_named

ASSUMED = "assumed"
"""Who chose the backend of such a plan."""
MOST_DEVICES = 65_536
"""Each is listed in the probe."""


@dataclass(frozen=True)
class Assumption:
    """A host: ``devices`` of one chip, and software that differs from what a usual installation has."""

    chip: str
    devices: int = 1
    software: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Assumption | None:
        """From ``chip=mi325x``, ``devices=8``, ``torch=2.13.0``, each an argument or joined by commas; None without
        any. Raises ConfigError."""
        parts = [part.strip() for text in texts for part in text.split(",")]
        if not parts:
            return None
        given: dict[str, str] = {}
        for part in parts:
            key, _, value = (each.strip() for each in part.partition("="))
            if not (key and value):
                raise ConfigError(f'--assume "{part}" asked; write KEY=VALUE, such as chip=NAME')
            if given.get(key, value) != value:
                raise ConfigError(f"--assume {key}={given[key]} and {key}={value} asked; one plan is for one; name one")
            given[key] = value
        if "chip" not in given:
            raise ConfigError(f"--assume {', '.join(texts)} asked; no chip is named; add --assume chip=NAME")
        count = given.pop("devices", "1")
        if not (count.isascii() and count.isdecimal() and len(count) < 9 and 1 <= int(count) <= MOST_DEVICES):
            raise ConfigError(f"--assume devices={count} asked; write a whole number from 1 to {MOST_DEVICES}")
        return cls(given.pop("chip"), int(count), given)


def select(assumption: Assumption, argument: str | None, recipe: str | None) -> Selection:
    """The backend that is named, else the one that knows the chip; with the probe that such a host would answer.

    Raises BackendError where no backend knows it, or several do; ConfigError where the named one does not.
    """
    named = argument or os.environ.get(ENVIRONMENT) or recipe
    name = named or _who_knows(assumption.chip)
    candidate, backend = load_named(name)
    return selection_of(candidate, backend.assume(assumption.chip, assumption.devices, assumption.software), backend)


def selection_of(candidate: Candidate, probe: Probe, backend: type[Backend]) -> Selection:
    """A backend that is chosen for a host which answers ``probe``."""
    return Selection(backend, _with(candidate, probe, backend), ASSUMED, ())


def _with(candidate: Candidate, probe: Probe, backend: type[Backend]) -> Candidate:
    return Candidate(
        candidate.name,
        candidate.distribution,
        candidate.version,
        ".".join(map(str, backend.api_version)),
        probe,
        backend.accelerator,
        backend,
    )


def _who_knows(chip: str) -> str:
    known: dict[str, list[str]] = {}
    broken: list[str] = []
    for name in installed():
        try:
            _, backend = load_named(name)
        except BackendError as error:
            broken.append(str(error))
            continue
        known[name] = list(backend.chips)
    names = [name for name, chips in known.items() if chip.lower() in chips]
    if len(names) == 1:
        return names[0]
    if names:
        raise BackendError(f"--assume chip={chip} asked; {' and '.join(names)} know such a chip; name one by --backend")
    every = [each for chips in known.values() for each in chips]
    listed = "; ".join(f"{name}: {', '.join(chips)}" for name, chips in known.items() if chips)
    failed = f"; not asked: {'; '.join(broken)}" if broken else ""
    meant = did_you_mean(chip.lower(), every)
    raise BackendError(
        f"--assume chip={chip} asked; no backend knows it{meant}; known are {listed or 'none'}{failed}; choose one of "
        "them, or name a backend by --backend"
    )
