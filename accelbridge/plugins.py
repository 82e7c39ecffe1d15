"""Finding backends: discover, survey, choose. A missing, broken, duplicate or outdated plugin has its outcome.

Entry points of the group ``accelbridge.backends`` name modules; each is loaded in its own ``try`` and keeps
its reason: a broken plugin never hurts another backend, and always stops whoever asked for it by name.
(pluggy's own ``load_setuptools_entrypoints`` lets one failing import end discovery, and silently skips a
second distribution with the same name.) Only the backend that is chosen is imported here, the others are asked
in child processes: see ``accelbridge.probing``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import TYPE_CHECKING, Any

from accelbridge import hookspecs
from accelbridge.backend import Backend, Probe
from accelbridge.errors import AccelbridgeError, BackendError, ConfigError, did_you_mean
from accelbridge.probing import (
    UNNAMED,
    Answer,
    Child,
    ask,
    load,
    name_version,
    owner_of,
    probe_seconds,
    say,
    show,
    start_child,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

ENVIRONMENT = "ACCELBRIDGE_BACKEND"
_OPTION_FAULTS = {"extra_forbidden": "there is no such option"}
"""Our words for pydantic's kinds of errors, where its own say too little."""


@dataclass(frozen=True)
class Candidate:
    """One backend name and everything known of it."""

    name: str
    distribution: str = ""
    version: str = ""
    api_version: str = ""
    probe: Probe = field(default_factory=lambda: Probe(False, "not probed"))
    accelerator: bool = False
    """Whether automatic choice prefers it; known once it was loaded, here or in a child."""
    backend: type[Backend] | None = None
    """The class, where it was loaded in this process."""

    @property
    def available(self) -> bool:
        return self.probe.available

    def unusable(self, reason: str) -> Candidate:
        """This candidate with a reason why it cannot be used."""
        return replace(self, probe=Probe(False, reason), backend=None)

    def as_dict(self) -> dict[str, Any]:
        """The row of ``accelbridge devices --json``."""
        return {
            "name": self.name,
            "available": self.available,
            "reason": self.probe.reason,
            "distribution": self.distribution,
            "version": self.version,
            "api_version": self.api_version,
            "devices": [asdict(device) for device in self.probe.devices],
        }


@dataclass(frozen=True)
class Selection:
    """The backend of a run, and who chose it: "argument", "environment", "recipe" or "automatic"."""

    backend: type[Backend]
    candidate: Candidate
    selected_by: str
    candidates: tuple[Candidate, ...]

    @property
    def probe(self) -> Probe:
        return self.candidate.probe


# --------------------------------------------------------------------------------------------------- discover


@dataclass(frozen=True)
class _Found:
    """What is installed: entry points by name (several under one name: a duplicate), and broken metadata."""

    points: dict[str, list[EntryPoint]]
    unreadable: list[Candidate]


def _discover() -> _Found:
    """Look through every installed distribution; the first of a name on the path hides the others.

    ``importlib.metadata.entry_points`` does the same, but ends at the first distribution that it cannot read.
    """
    points: dict[str, list[EntryPoint]] = {}
    unreadable: list[Candidate] = []
    seen: set[str] = set()
    for dist in distributions():
        if hookspecs.ENTRY_POINT_GROUP not in _entry_points_text(dist):
            continue
        name, version = name_version(dist)
        canonical = re.sub(r"[-_.]+", "-", name).lower()
        if canonical in seen and name != UNNAMED:
            continue
        seen.add(canonical)
        try:
            for point in dist.entry_points.select(group=hookspecs.ENTRY_POINT_GROUP):
                points.setdefault(point.name, []).append(point)
        except Exception as error:
            why = f"the entry_points.txt of {name} {version} cannot be read ({say(error)}); install it again"
            unreadable.append(Candidate(name, name, version).unusable(why))
    return _Found(dict(sorted(points.items())), unreadable)


def _entry_points_text(dist: Distribution) -> str:
    try:
        return dist.read_text("entry_points.txt") or ""
    except (OSError, ValueError):
        return ""


def _in_core(point: EntryPoint) -> bool:
    return point.value.partition(":")[0].split(".")[0] == hookspecs.PROJECT


def survey(names: Sequence[str] | None = None) -> list[Candidate]:
    """Probe the backends in ``names`` (default: all that are installed), side by side."""
    found = _discover()
    points = {name: same for name, same in found.points.items() if names is None or name in names}
    probe_seconds()  # raises at once where it is set to nonsense
    outside = [same[0] for same in points.values() if len(same) == 1 and not _in_core(same[0])]
    answers = _ask_in_children(outside)
    candidates = [_examine(name, same, answers.get(name)) for name, same in points.items()]
    return candidates + [c for c in found.unreadable if names is None or c.name in names]


def _ask_in_children(points: Sequence[EntryPoint]) -> dict[str, Answer | BackendError]:
    """What each plugin says, by name: a child per distribution, side by side, and further ones for those that come
    after a plugin that ended its child."""
    owners = {owner_of(point): None for point in points}
    waiting = [[point for point in points if owner_of(point) == owner] for owner in owners]
    answers: dict[str, Answer | BackendError] = {}
    while waiting:
        with ExitStack() as resources:
            children: list[Child | BackendError] = []
            for group in waiting:
                children.append(child := _start(group))
                if isinstance(child, Child):
                    resources.callback(child.stop)
            deadline = time.monotonic() + probe_seconds()
            for group, child in zip(waiting, children, strict=True):
                found = child.read(deadline) if isinstance(child, Child) else [child] * len(group)
                answers |= {point.name: answer for point, answer in zip(group, found, strict=False)}
        waiting = [rest for group in waiting if (rest := [point for point in group if point.name not in answers])]
    return answers


def _start(points: Sequence[EntryPoint]) -> Child | BackendError:
    try:
        return start_child(points)
    except BackendError as error:
        return error


def _examine(name: str, same: list[EntryPoint], answer: Answer | BackendError | None) -> Candidate:
    """``answer`` is that of a child; None where it is to be asked here."""
    distribution, version = name_version(same[0].dist)
    blank = Candidate(name, distribution, version)
    if len(same) > 1:
        return _duplicate(blank, same)
    backend = None
    try:
        if isinstance(answer, BackendError):
            raise answer
        if answer is None:
            backend = load(same[0])
            answer = ask(backend)
    except BackendError as error:
        return blank.unusable(str(error))
    return replace(
        blank,
        backend=backend,
        api_version=answer.api_version,
        accelerator=answer.accelerator,
        probe=answer.probe,
    )


def _duplicate(blank: Candidate, same: list[EntryPoint]) -> Candidate:
    """Nobody can say which one was meant, so neither is used."""
    owners = " and ".join(f"{owner_of(point)} ({point.value})" for point in same)
    names = list(dict.fromkeys(name_version(point.dist)[0] for point in same))
    several = f"{len(same)} distributions provide" if len(names) > 1 else "one distribution twice provides"
    both = replace(blank, distribution=" and ".join(names), version="" if len(names) > 1 else blank.version)
    return both.unusable(f'{several} a backend named "{blank.name}": {owners}; uninstall all but one')


# ----------------------------------------------------------------------------------------------------- choose


def choose(argument: str | None = None, recipe: str | None = None, *, everything: bool = False) -> Selection:
    """Choose the backend: argument > ``ACCELBRIDGE_BACKEND`` > recipe > automatic.

    An explicit choice that cannot be honoured raises BackendError with its reason; automatic takes the one
    accelerator that is available, else the embedded default. ``everything`` probes all backends even where
    one is named, so that they can be listed.
    """
    asked = [("argument", argument), ("environment", os.environ.get(ENVIRONMENT)), ("recipe", recipe)]
    selected_by, name = next(((by, name) for by, name in asked if name), ("automatic", None))
    candidates = survey(None if everything or name is None else [name])
    if name is None:
        return _automatic(candidates)
    chosen = _named(name, selected_by, candidates)
    try:
        backend = _loaded(chosen)
    except BackendError as error:
        raise _refused(name, selected_by, str(error)) from error
    return Selection(backend, chosen, selected_by, tuple(candidates))


def _loaded(candidate: Candidate) -> type[Backend]:
    """The class of ``candidate``, imported now if it has only been probed in a child."""
    return candidate.backend or load(_discover().points[candidate.name][0])


def _named(name: str, selected_by: str, candidates: Sequence[Candidate]) -> Candidate:
    found = next((c for c in candidates if c.name == name), None)
    if found is None:
        raise _unknown(name, _ASKED[selected_by])
    if not found.available:
        raise _refused(name, selected_by, found.probe.reason)
    return found


def installed() -> list[str]:
    """Names of the backends that are installed, whether they work or not."""
    return list(_discover().points)


def load_named(name: str) -> tuple[Candidate, type[Backend]]:
    """The class of the backend called ``name``, imported here and not probed. Raises BackendError."""
    check_known(name)
    found = _discover()
    same = found.points.get(name)
    if same is None:
        broken = next(candidate for candidate in found.unreadable if candidate.name == name)
        raise _refused(name, "argument", broken.probe.reason)
    blank = Candidate(name, *name_version(same[0].dist))
    if len(same) > 1:
        raise _refused(name, "argument", _duplicate(blank, same).probe.reason)
    return blank, load(same[0])


def check_known(name: str) -> None:
    """Raise BackendError where no installed distribution provides a backend called ``name``. Loads nothing."""
    found = _discover()
    if name not in found.points and all(name != candidate.name for candidate in found.unreadable):
        raise _unknown(name, _ASKED["argument"])


def _unknown(name: str, asked_by: str) -> BackendError:
    installed = _discover()
    known = [*installed.points, *(c.name for c in installed.unreadable)]
    return BackendError(
        f'backend "{name}" asked by {asked_by}; no installed distribution provides it'
        f"{did_you_mean(name, known)}; installed: {', '.join(known) or 'none'}; see 'accelbridge devices'"
    )


_ASKED = {"argument": "argument", "environment": ENVIRONMENT, "recipe": "recipe (backend.name)"}


def _refused(name: str, selected_by: str, reason: str) -> BackendError:
    return BackendError(
        f'backend "{name}" asked by {_ASKED[selected_by]}; it cannot be used here: {reason}; '
        "see 'accelbridge devices' for what can"
    )


def _automatic(candidates: Sequence[Candidate]) -> Selection:
    """Take the preferred candidate; one that works in a child but cannot be imported here is out as well."""
    chosen = _preferred(candidates)
    try:
        return Selection(_loaded(chosen), chosen, "automatic", tuple(candidates))
    except BackendError as error:
        rest = [c.unusable(str(error)) if c is chosen else c for c in candidates]
    return _automatic(rest)


def _preferred(candidates: Sequence[Candidate]) -> Candidate:
    usable = [c for c in candidates if c.available]
    accelerators = [c for c in usable if c.accelerator]
    if len(accelerators) > 1:
        names = " and ".join(f'"{c.name}" ({c.probe.reason})' for c in accelerators)
        raise BackendError(
            f"no backend asked; {names} are available; name one by argument, {ENVIRONMENT} or backend.name"
        )
    for candidate in [*accelerators, *usable]:
        return candidate
    reasons = "; ".join(f"{c.name}: {c.probe.reason}" for c in candidates) or "none is installed"
    raise BackendError(f"no backend asked; none can be used here ({reasons}); see 'accelbridge devices'")


def load_backend(name: str | None = None, options: Mapping[str, Any] | None = None) -> Backend:
    """Choose as :func:`choose` does and return an instance, for use in a loop of your own.

    Raises BackendError where the backend cannot be used, ConfigError where ``options`` are not its options.
    """
    return instantiate(choose(name), options or {})


def instantiate(selection: Selection, options: Mapping[str, Any]) -> Backend:
    """Make the backend's instance with validated options."""
    checked = _options(selection.backend, options)
    try:
        backend = selection.backend(checked)
        backend.host = selection.probe
        return backend
    except AccelbridgeError:
        raise
    except Exception as error:
        owner = f"{selection.candidate.distribution} {selection.candidate.version}".strip()
        raise BackendError(f"{owner} failed to start: {say(error)}; update it") from error


def _options(backend: type[Backend], options: Mapping[str, Any]) -> BaseModel | None:
    from pydantic import ValidationError

    model = backend.options_model
    if model is None:
        if options:
            raise ConfigError(f'backend.options {dict(options)} asked; backend "{backend.name}" has no options')
        return None
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        known = ", ".join(model.model_fields)
        lines = [
            f"{'.'.join(['backend.options', *map(str, problem['loc'])])} asked as {show(problem['input'])}; "
            f"{_OPTION_FAULTS.get(problem['type'], problem['msg'])}; known: {known}"
            for problem in error.errors(include_url=False)
        ]
        raise ConfigError("\n".join(lines)) from None
