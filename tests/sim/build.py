"""Compiling ``csrc`` once per machine, torch version and source.

The result lies in a cache folder of the user (``ACCELBRIDGE_SIM_CACHE``, else ``$XDG_CACHE_HOME`` or
``~/.cache``). A lock lets the processes of a test run share one build; a build appears whole or not at all.
``torch.utils.cpp_extension`` says what to compile against, but does not do it: its own build needs ninja, which
is no dependency of ours.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "csrc"
MODULE = "accelbridge_sim"
CACHE_ENVIRONMENT = "ACCELBRIDGE_SIM_CACHE"
COMPILE_SECONDS = 600
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={MODULE}")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


class CannotBuild(RuntimeError):
    """There is nothing to compile with, or the compiler refused; the message says what to do."""


def library() -> Path:
    """The compiled extension, built now if this machine has none for this torch and these sources."""
    folder = cache_folder() / key()
    built = folder / f"{MODULE}{EXTENSION_SUFFIXES[0]}"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not built.exists():
            _build(built)
    return built


def cache_folder() -> Path:
    """Where builds are kept."""
    if given := os.environ.get(CACHE_ENVIRONMENT):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelbridge-sim"


def key() -> str:
    """Names a build: torch is tied to its exact version, Python to its own, and all of it to the sources."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return f"torch-{torch.__version__}-{python}-{digest.hexdigest()[:16]}"


def _build(target: Path) -> None:
    compiler = _compiler()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        flags = [*FLAGS, *_includes(), f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        header = Path(scratch) / "common.h"
        header.write_text((SOURCES / "common.h").read_text())
        _run([compiler, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
        flags += ["-include", str(header)]  # the compiled one is found beside it
        with ThreadPoolExecutor(min(os.cpu_count() or 1, len(sources))) as pool:
            pairs = zip(sources, objects, strict=True)
            list(pool.map(lambda pair: _run([compiler, *flags, "-c", str(pair[0]), "-o", str(pair[1])]), pairs))
        linked = Path(scratch) / target.name
        paths = [f"-L{path}" for path in cpp_extension.library_paths()]
        libraries = [f"-l{name}" for name in LIBRARIES]
        _run([compiler, "-shared", *map(str, objects), *paths, *libraries, "-o", str(linked)])
        os.replace(linked, target)


def _compiler() -> str:
    asked = os.environ.get("CXX", "g++")
    found = shutil.which(asked)
    if found is None:
        raise CannotBuild(f"the simulated device needs a C++ compiler; found no {asked!r}; install g++ or set CXX")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise CannotBuild("the simulated device needs Python.h; found none; install Python's development files")
    return found


def _includes() -> list[str]:
    # As system headers: their warnings are not ours.
    paths = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    return [part for path in paths for part in ("-isystem", path)]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if done.returncode != 0:
        raise CannotBuild(f"{' '.join(command)}\n{done.stderr[-4000:]}")
