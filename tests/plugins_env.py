"""Plugins as a user would have them: wheels made here, installed by pip into a folder, seen through PYTHONPATH.

``install(folder, plugins)`` builds and installs; ``run_cli`` runs ``python -m accelbridge`` with such folders on
its import path. ``backend_source`` is a complete out-of-tree backend: virtual chips that compute on the host.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

TIMEOUT_S = 120


@dataclass(frozen=True)
class Plugin:
    """One distribution with one backend: ``name`` is the entry point, ``source`` the text of its only module."""

    name: str
    source: str | None
    """None: the entry point names a module that does not exist."""
    distribution: str = ""
    version: str = "1.0"
    value: str = ""
    """What the entry point says; default: the module's name."""

    @property
    def project(self) -> str:
        return self.distribution or f"vendor-{self.name}"

    @property
    def module(self) -> str:
        return self.project.replace("-", "_").replace(".", "_")


def wheel(folder: Path, plugin: Plugin) -> Path:
    """Write the wheel of ``plugin``: a zip with the package and its ``dist-info``."""
    stem = f"{plugin.module}-{plugin.version}"
    path = folder / f"{stem}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {plugin.project}\nVersion: {plugin.version}\n"
    files = {
        "METADATA": metadata,
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": f"[accelbridge.backends]\n{plugin.name} = {plugin.value or plugin.module}\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        if plugin.source is not None:
            archive.writestr(f"{plugin.module}/__init__.py", plugin.source)
        for name, text in files.items():
            archive.writestr(f"{stem}.dist-info/{name}", text)
    return path


def install(folder: Path, plugins: Sequence[Plugin]) -> Path:
    """Install ``plugins`` with pip; returns the folder that goes on the import path."""
    wheels, site = folder / "wheels", folder / "site"
    wheels.mkdir(parents=True)
    paths = [str(wheel(wheels, plugin)) for plugin in plugins]
    flags = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", str(site), *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return site


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that ``make`` has filled, once for all workers of pytest-xdist."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"once-{name}"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "made").exists():
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


def environment(*sites: Path, **extra: str) -> dict[str, str]:
    """This environment without settings of accelbridge or a launcher, with ``sites`` on the import path."""
    drop = ("ACCELBRIDGE_", "TORCHELASTIC_", "SLURM_")
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop) and k not in ranks}
    if sites:
        env["PYTHONPATH"] = os.pathsep.join(map(str, sites))
    return env | {"OMP_NUM_THREADS": "1", "ACCELBRIDGE_PROBE_SECONDS": "60"} | extra


def run_cli(
    *arguments: str, cwd: Path, sites: Sequence[Path] = (), env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``python -m accelbridge ARGUMENTS`` in ``cwd``."""
    return subprocess.run(
        [sys.executable, "-m", "accelbridge", *arguments],
        cwd=cwd,
        env=environment(*sites, **(env or {})),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a command that must have refused: exit code 2, one error, no traceback, nothing printed."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: "), done.stderr
    return done.stderr


def write_tokens(path: Path, vocab_size: int = 64) -> None:
    """A token store of 400 tokens."""
    from accelbridge.data.store import TokenWriter
    from accelbridge.data.tokenizer import IdsOnly

    with TokenWriter(path, IdsOnly(vocab_size, vocab_size - 1)) as writer:
        writer.append([i % 60 for i in range(400)])


# ------------------------------------------------------------------------------------------------ a good backend

_GOOD = """
import sys, time, os, subprocess, threading
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from pydantic import Field

from accelbridge.backend import FULL, Backend, Capabilities, Chip, DeviceInfo, Probe
from accelbridge.config import Section
from accelbridge.hookspecs import hookimpl

OPS = ("linear", "attention", "embedding", "rms_norm", "rope", "swiglu", "dropout", "cross_entropy", "adamw")


class Options(Section):
    level: int = Field(default=1, ge=0)


class Made(Backend):
    name = {name!r}
    api_version = {api}
    device_type = "cpu"
    accelerator = True
    options_model = Options

    @classmethod
    def probe(cls):
        {probe}

    @classmethod
    def capabilities(cls, chip, software):
        table = {{(op, "float32", ""): FULL for op in (*OPS, "all_gather")}}
        table |= {{(op, "float32", "sum"): FULL for op in ("all_reduce", "reduce_scatter")}}
        return Capabilities(Chip(chip), table)

    @cached_property
    def device(self):
        import torch
        from accelbridge.portable.device import TorchDevice

        class VirtualDevice(TorchDevice):
            def count(self):
                return 1

            def bind(self, world):
                return torch.device("cpu")

            def memory(self):
                return {{"allocated": None, "peak": None, "total": None}}

        return VirtualDevice("cpu")

    @cached_property
    def collectives(self):
        from accelbridge.portable.collectives import TorchCollectives

        return _named(TorchCollectives("gloo"))


def _named(collectives):
    collectives.library = "gloo"
    return collectives


{changes}

@hookimpl
def accelbridge_backend():
    {hook}
"""

AVAILABLE = 'return Probe(True, "1 virtual chip", (DeviceInfo(0, "virtual1"),), software={"virtual": "3.2"})'


def backend_source(
    name: str,
    *,
    before: str = "",
    probe: str = AVAILABLE,
    api: str = "(1, 0)",
    changes: str = "",
    hook: str = "return Made",
) -> str:
    """The module of a backend that works, apart from what the arguments replace."""
    return before + _GOOD.format(name=name, probe=probe, api=api, changes=changes, hook=hook)
