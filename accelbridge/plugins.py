"""Finding backends: discover, probe, choose. Missing, broken, duplicate and too-old plugins each get their outcome.

Entry points of the group ``accelbridge.backends`` name modules; each is loaded inside its own ``try`` and keeps
its reason, so that a broken plugin never hurts another backend, and always stops whoever asked for it by name.
(pluggy's own ``load_setuptools_entrypoints`` lets one failing import end discovery, and silently skips a second
distribution with the same name.)

A plugin outside the core package is loaded and probed in a child process with a time limit first: an import or a
driver call that hangs, exits or aborts then costs a reason, not this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from accelbridge import hookspecs
from accelbridge.backend import API_VERSION, Backend, DeviceInfo, Probe
from accelbridge.errors import BackendError, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

ENVIRONMENT = "ACCELBRIDGE_BACKEND"
OLDEST_API = (1, 0)
"""The oldest interface served: the current and the previous major, of which none precedes 1."""
PROBE_SECONDS = 10.0
_MARK = "accelbridge-probe:"


@dataclass(frozen=True)
class Candidate:
    """One backend name and everything known of it."""

    name: str
    distribution: str = ""
    version: str = ""
    api_version: str = ""
    probe: Probe = field(default_factory=lambda: Probe(False, "not probed"))
    backend: type[Backend] | None = None
    """The class, where it was loaded in this process."""

    @property
    def available(self) -> bool:
        return self.probe.available

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


# ---------------------------------------------------------------------------------------------------- discover


def _points() -> dict[str, list[EntryPoint]]:
    """Entry points by name; more than one under a name means a duplicate."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=hookspecs.ENTRY_POINT_GROUP):
        same = found.setdefault(point.name, [])
        if all((p.value, _dist(p)) != (point.value, _dist(point)) for p in same):
            same.append(point)
    return dict(sorted(found.items()))


def _dist(point: EntryPoint) -> tuple[str, str]:
    return (point.dist.name, point.dist.version) if point.dist else ("", "")


def _in_core(point: EntryPoint) -> bool:
    return point.value.partition(":")[0].split(".")[0] == hookspecs.PROJECT


def survey(names: Sequence[str] | None = None) -> list[Candidate]:
    """Probe the backends in ``names`` (default: all that are installed), side by side."""
    points = {name: same for name, same in _points().items() if names is None or name in names}
    children = {
        name: _start_child(same[0])
        for name, same in points.items()
        if len(same) == 1 and not _in_core(same[0])
    }
    return [_examine(name, same, children.get(name)) for name, same in points.items()]


def _examine(name: str, same: list[EntryPoint], child: subprocess.Popen[str] | None) -> Candidate:
    distribution, version = _dist(same[0])
    blank = Candidate(name, distribution, version)
    if len(same) > 1:
        owners = " and ".join(f"{d} {v}" for d, v in map(_dist, same))
        return replace(
            blank,
            distribution=" and ".join(_dist(p)[0] for p in same),
            version="",
            probe=Probe(False, f'two distributions provide a backend named "{name}": {owners}; uninstall one'),
        )
    try:
        if child is not None:
            return _read_child(blank, child)
        backend = load(same[0])
        return replace(blank, backend=backend, api_version=_api(backend), probe=run_probe(backend))
    except BackendError as error:
        return replace(blank, probe=Probe(False, str(error)))


def _api(backend: type[Backend]) -> str:
    return ".".join(map(str, backend.api_version))


# -------------------------------------------------------------------------------------------------- load, probe


def load(point: EntryPoint) -> type[Backend]:
    """Import one plugin and return its class. Raises BackendError that names the distribution and the cause."""
    owner = "{} {}".format(*_dist(point))
    try:
        module = point.load()
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(module, name=point.name)
        backend = manager.hook.accelbridge_backend()
    except (Exception, SystemExit) as error:
        raise BackendError(f"{owner} failed to load: {type(error).__name__}: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        found = "nothing" if backend is None else repr(backend)[:80]
        raise BackendError(
            f"{owner}: the hook accelbridge_backend must return a subclass of accelbridge.Backend; it returned {found}"
        )
    _check_class(owner, point.name, backend)
    return backend


def _check_class(owner: str, name: str, backend: type[Backend]) -> None:
    if getattr(backend, "name", None) != name:
        raise BackendError(
            f'{owner}: entry point "{name}" returned a backend named "{getattr(backend, "name", None)}"; '
            "the two must be equal"
        )
    api = backend.api_version
    if not (isinstance(api, tuple) and len(api) == 2 and all(isinstance(part, int) for part in api)):
        raise BackendError(f"{owner}: api_version must be (major, minor); it is {api!r}")
    served = f"this accelbridge serves {OLDEST_API[0]}.{OLDEST_API[1]} to {API_VERSION[0]}.{API_VERSION[1]}"
    if api < OLDEST_API:
        raise BackendError(f"{owner} was written for interface {api[0]}.{api[1]}, too old: {served}; update {owner}")
    if api > API_VERSION:
        raise BackendError(f"{owner} needs interface {api[0]}.{api[1]}, too new: {served}; update accelbridge")
    if missing := sorted(getattr(backend, "__abstractmethods__", ())):
        raise BackendError(f"{owner}: {backend.__name__} lacks {', '.join(missing)}")


def run_probe(backend: type[Backend]) -> Probe:
    """Call ``probe``; one that raises or returns something else is an unavailable backend with that reason."""
    try:
        probe = backend.probe()
    except (Exception, SystemExit) as error:
        return Probe(False, f"its probe raised {type(error).__name__}: {error} (a probe must never raise)")
    if not isinstance(probe, Probe):
        return Probe(False, f"its probe returned {probe!r:.80}, not an accelbridge.backend.Probe")
    return probe


def _start_child(point: EntryPoint) -> subprocess.Popen[str]:
    """Load and probe ``point`` in a child; its answer is the line that starts with a mark."""
    return subprocess.Popen(
        [sys.executable, "-m", "accelbridge.plugins", point.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )


def _read_child(blank: Candidate, child: subprocess.Popen[str]) -> Candidate:
    try:
        out, err = child.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return replace(blank, probe=Probe(False, f"loading or probing it did not finish in {PROBE_SECONDS:.0f} s"))
    answer = next((line for line in out.splitlines() if line.startswith(_MARK)), None)
    if answer is None:
        last = (err.strip().splitlines() or ["no message"])[-1]
        return replace(blank, probe=Probe(False, f"loading or probing it ended the process ({child.returncode}): {last}"))
    data = json.loads(answer.removeprefix(_MARK))
    devices = tuple(DeviceInfo(**device) for device in data["probe"].pop("devices"))
    return replace(blank, api_version=data["api_version"], probe=Probe(devices=devices, **data["probe"]))


def _child(name: str) -> None:
    """Body of the child process: one JSON line, whatever happens."""
    point = _points()[name][0]
    try:
        backend = load(point)
        api, probe = _api(backend), run_probe(backend)
        answer = json.dumps({"api_version": api, "probe": asdict(probe)})
    except BackendError as error:
        answer = json.dumps({"api_version": "", "probe": asdict(Probe(False, str(error)))})
    except (TypeError, ValueError) as error:
        probe = Probe(False, f"its probe holds values that are not plain data: {error}")
        answer = json.dumps({"api_version": api, "probe": asdict(probe)})
    print(f"\n{_MARK}{answer}", flush=True)


# ------------------------------------------------------------------------------------------------------ choose


def choose(argument: str | None = None, recipe: str | None = None, *, everything: bool = False) -> Selection:
    """Choose the backend: argument > ``ACCELBRIDGE_BACKEND`` > recipe > automatic.

    An explicit choice that cannot be honoured raises BackendError with its reason; automatic takes the one
    accelerator that is available, else the embedded default. ``everything`` probes all backends even where one
    is named, so that they can be listed.
    """
    asked = [("argument", argument), ("environment", os.environ.get(ENVIRONMENT)), ("recipe", recipe)]
    selected_by, name = next(((by, name) for by, name in asked if name), ("automatic", None))
    candidates = survey(None if everything or name is None else [name])
    if name is None:
        chosen = _automatic(candidates)
    else:
        chosen = _named(name, selected_by, candidates)
    backend = chosen.backend or load(_points()[chosen.name][0])
    return Selection(backend, chosen, selected_by, tuple(candidates))


def _named(name: str, selected_by: str, candidates: Sequence[Candidate]) -> Candidate:
    by = {"argument": "argument", "environment": ENVIRONMENT, "recipe": "recipe (backend.name)"}[selected_by]
    found = next((c for c in candidates if c.name == name), None)
    if found is None:
        known = list(_points())
        raise BackendError(
            f'backend "{name}" asked by {by}; no installed distribution provides it'
            f"{did_you_mean(name, known)}; installed: {', '.join(known) or 'none'}; see 'accelbridge devices'"
        )
    if not found.available:
        raise BackendError(
            f'backend "{name}" asked by {by}; it cannot be used here: {found.probe.reason}; '
            "see 'accelbridge devices' for what can"
        )
    return found


def _automatic(candidates: Sequence[Candidate]) -> Candidate:
    usable = [replace(c, backend=c.backend or load(_points()[c.name][0])) for c in candidates if c.available]
    accelerators = [c for c in usable if c.backend is not None and c.backend.accelerator]
    if len(accelerators) > 1:
        names = " and ".join(f'"{c.name}" ({c.probe.reason})' for c in accelerators)
        raise BackendError(
            f"no backend asked; {names} are available; name one by argument, {ENVIRONMENT} or backend.name"
        )
    for candidate in [*accelerators, *usable]:
        return candidate
    reasons = "; ".join(f"{c.name}: {c.probe.reason}" for c in candidates) or "none is installed"
    raise BackendError(f"no backend asked; none can be used here ({reasons})")


def load_backend(name: str | None = None, options: Mapping[str, Any] | None = None) -> Backend:
    """Choose as :func:`choose` does and return an instance, for use in a loop of your own.

    Raises BackendError where the backend cannot be used, ConfigError where ``options`` are not its options.
    """
    return instantiate(choose(name), options or {})


def instantiate(selection: Selection, options: Mapping[str, Any]) -> Backend:
    """Make the backend's instance with validated options."""
    return selection.backend(_options(selection.backend, options))


def _options(backend: type[Backend], options: Mapping[str, Any]) -> BaseModel | None:
    from pydantic import ValidationError

    from accelbridge.errors import ConfigError

    model = backend.options_model
    if model is None:
        if options:
            raise ConfigError(f'backend.options {dict(options)} asked; backend "{backend.name}" has no options')
        return None
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(["backend.options", *map(str, first["loc"])])
        raise ConfigError(f"{where}: {first['msg']}; known: {', '.join(model.model_fields)}") from None


if __name__ == "__main__":
    _child(sys.argv[1])
