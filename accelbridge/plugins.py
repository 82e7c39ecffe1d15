"""Finding backends: discover, probe, choose. A missing, broken, duplicate or outdated plugin has its outcome.

Entry points of the group ``accelbridge.backends`` name modules; each is loaded in its own ``try`` and keeps
its reason: a broken plugin never hurts another backend, and always stops whoever asked for it by name.
(pluggy's own ``load_setuptools_entrypoints`` lets one failing import end discovery, and silently skips a
second distribution with the same name.)

A plugin outside the core package is loaded and probed in a child process with a time limit first: an import
or a driver call that hangs, exits or aborts then costs a reason, not this process. Only the backend that is
chosen is ever imported here. ``ACCELBRIDGE_PROBE_SECONDS`` sets the limit (seconds, shared by all children;
default 10), for example where plugins lie on a slow network file system.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import IO, TYPE_CHECKING, Any

import pluggy

from accelbridge import hookspecs
from accelbridge.backend import API_VERSION, Backend, DeviceInfo, Probe
from accelbridge.errors import AccelbridgeError, BackendError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

ENVIRONMENT = "ACCELBRIDGE_BACKEND"
PROBE_SECONDS_ENVIRONMENT = "ACCELBRIDGE_PROBE_SECONDS"
_OPTION_FAULTS = {"extra_forbidden": "there is no such option"}
"""Our words for pydantic's kinds of errors, where its own say too little."""
OLDEST_API = (1, 0)
"""The oldest interface served: the current and the previous major, of which none precedes 1."""
PROBE_SECONDS = 10.0
_TAIL_BYTES = 1 << 16
"""How much of what a child wrote to stderr is looked at."""


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


def probe_seconds() -> float:
    """The time limit of loading and probing. Raises ConfigError where the environment holds no limit."""
    text = os.environ.get(PROBE_SECONDS_ENVIRONMENT)
    if not text:
        return PROBE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f'{PROBE_SECONDS_ENVIRONMENT}="{text}" asked; it is no positive number; set seconds, such as 30'
        )
    return seconds


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
        name, version = _name_version(dist)
        canonical = re.sub(r"[-_.]+", "-", name).lower()
        if canonical in seen and name != _UNNAMED:
            continue
        seen.add(canonical)
        try:
            for point in dist.entry_points.select(group=hookspecs.ENTRY_POINT_GROUP):
                points.setdefault(point.name, []).append(point)
        except Exception as error:
            why = f"the entry_points.txt of {name} {version} cannot be read ({_say(error)}); install it again"
            unreadable.append(Candidate(name, name, version).unusable(why))
    return _Found(dict(sorted(points.items())), unreadable)


_UNNAMED = "unknown distribution"


def _entry_points_text(dist: Distribution) -> str:
    try:
        return dist.read_text("entry_points.txt") or ""
    except (OSError, ValueError):
        return ""


def _name_version(dist: Distribution | None) -> tuple[str, str]:
    """Name and version; a distribution whose METADATA is missing or damaged is still listed."""
    try:
        assert dist is not None
        return dist.metadata["Name"] or _UNNAMED, dist.metadata["Version"] or ""
    except Exception:
        return _UNNAMED, ""


def _owner(point: EntryPoint) -> str:
    """``"accelbridge-acme 1.0"``."""
    return " ".join(filter(None, _name_version(point.dist)))


def _in_core(point: EntryPoint) -> bool:
    return point.value.partition(":")[0].split(".")[0] == hookspecs.PROJECT


def survey(names: Sequence[str] | None = None) -> list[Candidate]:
    """Probe the backends in ``names`` (default: all that are installed), side by side."""
    found = _discover()
    points = {name: same for name, same in found.points.items() if names is None or name in names}
    limit = probe_seconds()
    children: dict[str, _Child | BackendError] = {}
    try:
        for name, same in points.items():
            if len(same) == 1 and not _in_core(same[0]):
                children[name] = _start_child(same[0])
        deadline = time.monotonic() + limit
        candidates = [_examine(name, same, children.get(name), deadline) for name, same in points.items()]
    finally:
        for child in children.values():
            if isinstance(child, _Child):
                child.stop()
    return candidates + [c for c in found.unreadable if names is None or c.name in names]


def _examine(name: str, same: list[EntryPoint], child: _Child | BackendError | None, deadline: float) -> Candidate:
    distribution, version = _name_version(same[0].dist)
    blank = Candidate(name, distribution, version)
    if len(same) > 1:
        return _duplicate(blank, same)
    if isinstance(child, BackendError):
        return blank.unusable(str(child))
    if child is not None:
        return _read_child(blank, child, deadline)
    try:
        backend = load(same[0])
    except BackendError as error:
        return blank.unusable(str(error))
    return replace(
        blank,
        backend=backend,
        api_version=_api(backend),
        accelerator=backend.accelerator,
        probe=run_probe(backend),
    )


def _duplicate(blank: Candidate, same: list[EntryPoint]) -> Candidate:
    """Nobody can say which one was meant, so neither is used."""
    owners = " and ".join(f"{_owner(point)} ({point.value})" for point in same)
    names = list(dict.fromkeys(_name_version(point.dist)[0] for point in same))
    several = f"{len(same)} distributions provide" if len(names) > 1 else "one distribution twice provides"
    both = replace(blank, distribution=" and ".join(names), version="" if len(names) > 1 else blank.version)
    return both.unusable(f'{several} a backend named "{blank.name}": {owners}; uninstall all but one')


def _api(backend: type[Backend]) -> str:
    return ".".join(map(str, backend.api_version))


def _say(error: BaseException) -> str:
    """Class and message of an error, also of one that cannot be turned into text."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _show(value: object) -> str:
    """A short repr, also of an object that has none."""
    try:
        return repr(value)[:80]
    except Exception:
        return f"an object of {type(value).__name__} that cannot be shown"


# ------------------------------------------------------------------------------------------------ load, probe


def load(point: EntryPoint) -> type[Backend]:
    """Import one plugin and return its class. Raises BackendError with distribution and cause."""
    return _load(point, _owner(point))


def _load(point: EntryPoint, owner: str) -> type[Backend]:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        # What a plugin prints must not mix with our own output, which may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            manager.register(point.load(), name=point.name)
            backend = manager.hook.accelbridge_backend()
    except (Exception, SystemExit) as error:
        raise BackendError(f"{owner} failed to load: {_say(error)}; install or update it") from error
    if not manager.hook.accelbridge_backend.get_hookimpls():
        raise BackendError(
            f"{owner}: {point.value} has no hook; "
            "its author adds a function accelbridge_backend() marked @accelbridge.hookimpl"
        )
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        found = "nothing" if backend is None else _show(backend)
        raise BackendError(
            f"{owner}: the hook accelbridge_backend must return a subclass of accelbridge.Backend; it returned {found}"
        )
    _check_class(owner, point.name, backend)
    return backend


def _check_class(owner: str, name: str, backend: type[Backend]) -> None:
    theirs = getattr(backend, "name", None)
    if theirs != name:
        raise BackendError(
            f'{owner}: entry point "{name}" returned a backend named {_show(theirs)}; the two must be equal'
        )
    _check_api(owner, getattr(backend, "api_version", None))
    if missing := sorted(getattr(backend, "__abstractmethods__", ())):
        raise BackendError(f"{owner}: {backend.__name__} lacks {', '.join(missing)}; its author adds them")
    for attribute, kind, what in (("device_type", str, "text"), ("accelerator", bool, "True or False")):
        value = getattr(backend, attribute, None)
        if not isinstance(value, kind):
            where = f"{backend.__name__}.{attribute}"
            raise BackendError(f"{owner}: {where} must be {what}; it is {_show(value)}")
    if not _is_model(backend.options_model):
        raise BackendError(
            f"{owner}: {backend.__name__}.options_model must be a pydantic model or None; "
            f"it is {_show(backend.options_model)}"
        )


def _check_api(owner: str, api: object) -> None:
    if not (isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)):
        raise BackendError(f"{owner}: api_version must be (major, minor), such as (1, 0); it is {_show(api)}")
    theirs = f"{api[0]}.{api[1]}"
    served = f"this accelbridge serves {OLDEST_API[0]}.{OLDEST_API[1]} to {API_VERSION[0]}.{API_VERSION[1]}"
    if api < OLDEST_API:
        raise BackendError(f"{owner} was written for interface {theirs}, too old: {served}; update {owner}")
    if api > API_VERSION:
        raise BackendError(f"{owner} needs interface {theirs}, too new: {served}; update accelbridge")


def _is_model(model: object) -> bool:
    if model is None:
        return True
    from pydantic import BaseModel

    return isinstance(model, type) and issubclass(model, BaseModel)


def run_probe(backend: type[Backend]) -> Probe:
    """Call ``probe``; one that raises or returns something else makes an unavailable backend."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            probe = backend.probe()
    except (Exception, SystemExit) as error:
        return Probe(False, f"its probe raised {_say(error)} (a probe must never raise)")
    if not isinstance(probe, Probe):
        return Probe(False, f"its probe returned {_show(probe)}, not an accelbridge.backend.Probe")
    if problem := _not_plain(probe):
        return Probe(False, f"its probe holds values that are not plain data: {problem}")
    reason = probe.reason or "its probe gives no reason"
    return replace(probe, reason=reason, devices=tuple(probe.devices))


def _not_plain(probe: Probe) -> str | None:
    """Which value of ``probe`` is not what its annotation says; None where all are."""
    fields: list[tuple[str, object, type | tuple[type, ...], str]] = [
        ("available", probe.available, bool, "True or False"),
        ("reason", probe.reason, str, "text"),
        ("devices", probe.devices, (tuple, list), "a tuple of DeviceInfo"),
        ("software", probe.software, Mapping, "a mapping of text to text"),
        ("facts", probe.facts, Mapping, "a mapping of text to text"),
    ]
    for name, value, kind, what in fields:
        if not isinstance(value, kind):
            return f"{name} must be {what}; it is {_show(value)}"
    for index, device in enumerate(probe.devices):
        if not _plain_device(device):
            return f"devices[{index}] must be a DeviceInfo of plain numbers and text; it is {_show(device)}"
    for name, mapping in (("software", probe.software), ("facts", probe.facts)):
        for item in mapping.items():
            if not all(isinstance(part, str) for part in item):
                return f"{name} must map text to text; it holds {_show(item)}"
    return None


def _plain_device(device: object) -> bool:
    return (
        isinstance(device, DeviceInfo)
        and type(device.index) is int
        and isinstance(device.chip, str)
        and (device.memory_bytes is None or type(device.memory_bytes) is int)
    )


@dataclass(frozen=True)
class _Child:
    """A process that loads and probes one plugin. Its output goes to files: a pipe could be held open by its
    own children, or fill up while another child is read."""

    process: subprocess.Popen[bytes]
    answer: IO[bytes]
    errors: IO[bytes]

    def wait(self, deadline: float) -> bool:
        """Whether it ended in time."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self) -> None:
        """End it with everything it started; one that hangs inside a driver cannot be waited for."""
        if self.process.poll() is None:
            if os.name == "posix":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        self.answer.close()
        self.errors.close()

    def last_words(self) -> str:
        """How it ended, and the last line it wrote to stderr."""
        code = self.process.returncode
        how = f"exit code {code}"
        if code < 0:
            how = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1]}" if lines else how


def _start_child(point: EntryPoint) -> _Child | BackendError:
    """Load and probe ``point`` in a child, with the import path of this process."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    answer = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _Child.stop)
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "accelbridge.plugins", point.name, point.value, _owner(point)],
            stdin=subprocess.DEVNULL,
            stdout=answer,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        answer.close()
        errors.close()
        return BackendError(f"no process could be started to probe it: {_say(error)}")
    return _Child(process, answer, errors)


def _read_child(blank: Candidate, child: _Child, deadline: float) -> Candidate:
    if not child.wait(deadline):
        return blank.unusable(
            f"loading or probing it did not finish in {probe_seconds():g} s; update it, "
            f"or set {PROBE_SECONDS_ENVIRONMENT} where this machine is slow"
        )
    child.answer.seek(0)
    try:
        data = json.loads(child.answer.read())
    except ValueError:
        return blank.unusable(f"loading or probing it ended its process ({child.last_words()})")
    if failure := data.get("failure"):
        return blank.unusable(failure)
    devices = tuple(DeviceInfo(**device) for device in data["probe"].pop("devices"))
    return replace(
        blank,
        api_version=data["api_version"],
        accelerator=data["accelerator"],
        probe=Probe(devices=devices, **data["probe"]),
    )


def _child(name: str, value: str, owner: str) -> None:
    """Body of the child process: one JSON document on stdout, whatever the plugin prints."""
    ours = os.dup(1)
    os.dup2(2, 1)
    point = EntryPoint(name, value, hookspecs.ENTRY_POINT_GROUP)
    try:
        backend = _load(point, owner)
        answer = {"api_version": _api(backend), "accelerator": backend.accelerator} | _probed(backend)
    except BackendError as error:
        answer = {"failure": str(error)}
    with open(ours, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os._exit(0)  # the answer is given: the plugin's threads, exit handlers and teardown no longer matter


def _probed(backend: type[Backend]) -> dict[str, Any]:
    probe = run_probe(backend)
    plain = {"available": probe.available, "reason": probe.reason}
    plain |= {"devices": [asdict(device) for device in probe.devices]}
    return {"probe": plain | {"software": dict(probe.software), "facts": dict(probe.facts)}}


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
        installed = _discover()
        known = [*installed.points, *(c.name for c in installed.unreadable)]
        raise BackendError(
            f'backend "{name}" asked by {_ASKED[selected_by]}; no installed distribution provides it'
            f"{did_you_mean(name, known)}; installed: {', '.join(known) or 'none'}; see 'accelbridge devices'"
        )
    if not found.available:
        raise _refused(name, selected_by, found.probe.reason)
    return found


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
        return selection.backend(checked)
    except AccelbridgeError:
        raise
    except Exception as error:
        owner = f"{selection.candidate.distribution} {selection.candidate.version}".strip()
        raise BackendError(f"{owner} failed to start: {_say(error)}; update it") from error


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
            f"{'.'.join(['backend.options', *map(str, problem['loc'])])} asked as {_show(problem['input'])}; "
            f"{_OPTION_FAULTS.get(problem['type'], problem['msg'])}; known: {known}"
            for problem in error.errors(include_url=False)
        ]
        raise ConfigError("\n".join(lines)) from None


if __name__ == "__main__":
    _child(*sys.argv[1:])
