"""Loading one plugin and asking what it finds here: in this process, or in a child that may hang, exit or abort.

A plugin outside the core package is probed in a child with a time limit: an import or a driver call that never
returns then costs a reason, not this process. Plugins of one distribution share a child, since every start costs;
where one ends it or hangs, a new child goes on after it. ``ACCELBRIDGE_PROBE_SECONDS`` sets the limit of a child
(seconds; default 10), for example where plugins lie on a slow network file system.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import Distribution, EntryPoint
from typing import IO, Any

import pluggy

from accelbridge import hookspecs
from accelbridge.backend import API_VERSION, Backend, DeviceInfo, Probe
from accelbridge.errors import BackendError, ConfigError

PROBE_SECONDS_ENVIRONMENT = "ACCELBRIDGE_PROBE_SECONDS"
PROBE_SECONDS = 10.0
OLDEST_API = (1, 0)
"""The oldest interface served: the current and the previous major, of which none precedes 1."""
UNNAMED = "unknown distribution"
_TAIL_BYTES = 1 << 16
"""How much of what a child wrote to stderr is looked at."""


@dataclass(frozen=True)
class Answer:
    """What a plugin says of itself."""

    probe: Probe
    api_version: str = ""
    accelerator: bool = False


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


def name_version(dist: Distribution | None) -> tuple[str, str]:
    """Name and version; a distribution whose METADATA is missing or damaged is still listed."""
    try:
        assert dist is not None
        return dist.metadata["Name"] or UNNAMED, dist.metadata["Version"] or ""
    except Exception:
        return UNNAMED, ""


def owner_of(point: EntryPoint) -> str:
    """``"accelbridge-acme 1.0"``."""
    return " ".join(filter(None, name_version(point.dist)))


def say(error: BaseException) -> str:
    """Class and message of an error, also of one that cannot be turned into text."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def show(value: object) -> str:
    """A short repr, also of an object that has none."""
    try:
        return repr(value)[:80]
    except Exception:
        return f"an object of {type(value).__name__} that cannot be shown"


def load(point: EntryPoint, owner: str = "") -> type[Backend]:
    """Import one plugin and return its class. Raises BackendError with distribution and cause."""
    owner = owner or owner_of(point)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        # What a plugin prints must not mix with our own output, which may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            manager.register(point.load(), name=point.name)
            backend = manager.hook.accelbridge_backend()
    except (Exception, SystemExit) as error:
        raise BackendError(f"{owner} failed to load: {say(error)}; install or update it") from error
    if not manager.hook.accelbridge_backend.get_hookimpls():
        raise BackendError(
            f"{owner}: {point.value} has no hook; "
            "its author adds a function accelbridge_backend() marked @accelbridge.hookimpl"
        )
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        found = "nothing" if backend is None else show(backend)
        raise BackendError(
            f"{owner}: the hook accelbridge_backend must return a subclass of accelbridge.Backend; it returned {found}"
        )
    _check_class(owner, point.name, backend)
    return backend


def _check_class(owner: str, name: str, backend: type[Backend]) -> None:
    theirs = getattr(backend, "name", None)
    if theirs != name:
        raise BackendError(
            f'{owner}: entry point "{name}" returned a backend named {show(theirs)}; the two must be equal'
        )
    _check_api(owner, getattr(backend, "api_version", None))
    if missing := sorted(getattr(backend, "__abstractmethods__", ())):
        raise BackendError(f"{owner}: {backend.__name__} lacks {', '.join(missing)}; its author adds them")
    for attribute, kind, what in (("device_type", str, "text"), ("accelerator", bool, "True or False")):
        value = getattr(backend, attribute, None)
        if not isinstance(value, kind):
            where = f"{backend.__name__}.{attribute}"
            raise BackendError(f"{owner}: {where} must be {what}; it is {show(value)}")
    if not _is_model(backend.options_model):
        raise BackendError(
            f"{owner}: {backend.__name__}.options_model must be a pydantic model or None; "
            f"it is {show(backend.options_model)}"
        )


def _check_api(owner: str, api: object) -> None:
    if not (isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)):
        raise BackendError(f"{owner}: api_version must be (major, minor), such as (1, 0); it is {show(api)}")
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


def ask(backend: type[Backend]) -> Answer:
    """Probe a loaded backend in this process."""
    return Answer(run_probe(backend), ".".join(map(str, backend.api_version)), backend.accelerator)


def run_probe(backend: type[Backend]) -> Probe:
    """Call ``probe``; one that raises or returns something else makes an unavailable backend."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            probe = backend.probe()
    except (Exception, SystemExit) as error:
        return Probe(False, f"its probe raised {say(error)} (a probe must never raise)")
    if not isinstance(probe, Probe):
        return Probe(False, f"its probe returned {show(probe)}, not an accelbridge.backend.Probe")
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
            return f"{name} must be {what}; it is {show(value)}"
    for index, device in enumerate(probe.devices):
        if not _plain_device(device):
            return f"devices[{index}] must be a DeviceInfo of plain numbers and text; it is {show(device)}"
    for name, mapping in (("software", probe.software), ("facts", probe.facts)):
        for item in mapping.items():
            if not all(isinstance(part, str) for part in item):
                return f"{name} must map text to text; it holds {show(item)}"
    return None


def _plain_device(device: object) -> bool:
    return (
        isinstance(device, DeviceInfo)
        and type(device.index) is int
        and isinstance(device.chip, str)
        and (device.memory_bytes is None or type(device.memory_bytes) is int)
        and isinstance(device.path, str)
    )


@dataclass(frozen=True)
class Child:
    """A process that loads and probes plugins, one after the other. Its output goes to files: a pipe could be held
    open by its own children, or fill up while another child is read."""

    points: Sequence[EntryPoint]
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

    def read(self, deadline: float) -> list[Answer | BackendError]:
        """What it found, in the order of its points, as far as it came: the last is what stopped it, if anything."""
        in_time = self.wait(deadline)
        self.answer.seek(0)
        found: list[Answer | BackendError] = []
        with contextlib.suppress(ValueError):  # from a line that was being written, or that a plugin wrote into
            found.extend(map(_answer, self.answer.read().splitlines()))  # as far as it comes
        if len(found) < len(self.points):
            found.append(
                BackendError(
                    f"loading or probing it ended its process ({self.last_words()})"
                    if in_time
                    else f"loading or probing it did not finish in {probe_seconds():g} s; update it, "
                    f"or set {PROBE_SECONDS_ENVIRONMENT} where this machine is slow"
                )
            )
        return found


def _answer(line: bytes) -> Answer | BackendError:
    data = json.loads(line)
    if failure := data.get("failure"):
        return BackendError(failure)
    devices = tuple(DeviceInfo(**device) for device in data["probe"].pop("devices"))
    return Answer(Probe(devices=devices, **data["probe"]), data["api_version"], data["accelerator"])


def start_child(points: Sequence[EntryPoint]) -> Child:
    """Load and probe ``points`` in a child, with the import path of this process. Raises BackendError."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    answer = tempfile.TemporaryFile()  # noqa: SIM115 (closed by Child.stop)
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    asked = [text for point in points for text in (point.name, point.value, owner_of(point))]
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "accelbridge.probing", *asked],
            stdin=subprocess.DEVNULL,
            stdout=answer,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        answer.close()
        errors.close()
        raise BackendError(f"no process could be started to probe it: {say(error)}") from error
    return Child(points, process, answer, errors)


def _child(asked: Sequence[str]) -> None:
    """Body of the child process: one JSON document per line on stdout for each name, value and owner in ``asked``,
    whatever the plugins print."""
    ours = os.dup(1)
    os.dup2(2, 1)
    with open(ours, "w", encoding="utf-8", buffering=1) as file:
        for name, value, owner in zip(asked[::3], asked[1::3], asked[2::3], strict=True):
            point = EntryPoint(name, value, hookspecs.ENTRY_POINT_GROUP)
            try:
                found = ask(load(point, owner))
                probe = _plain(found.probe)
                answer = {"api_version": found.api_version, "accelerator": found.accelerator, "probe": probe}
            except BackendError as error:
                answer = {"failure": str(error)}
            file.write(json.dumps(answer) + "\n")
    os._exit(0)  # the answer is given: the plugins' threads, exit handlers and teardown no longer matter


def _plain(probe: Probe) -> dict[str, Any]:
    plain = {"available": probe.available, "reason": probe.reason}
    plain |= {"devices": [asdict(device) for device in probe.devices]}
    return plain | {"software": dict(probe.software), "facts": dict(probe.facts)}


if __name__ == "__main__":
    _child(sys.argv[1:])
