"""Compiling ``csrc`` once per machine, torch version and source.

The result lies in a cache folder of the user (``ACCELBRIDGE_SIM_CACHE``, else ``$XDG_CACHE_HOME`` or
``~/.cache``). A lock lets the processes of a test run share one build; a build appears whole or not at all.
``torch.utils.cpp_extension`` says what to compile against, but does not do it: its own build needs ninja, which
is no dependency of ours.

``python -m tests.sim.build`` says why this machine cannot build, and nothing where it can.
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
COMPILE_SECONDS = 1200
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={MODULE}")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
UNITS = (
    ("autocast", "group", "c10d_kernels", "module"),
    ("fallback", "math_kernels", "tensor_kernels", "device", "alias"),
    ("memory", "runtime"),
)
"""Sources that are compiled together, slowest first. Parsing torch's headers is nearly all of a build, so those that
include the same ones share it; only the first unit needs the heaviest, ``ATen/ATen.h``."""
SCRATCH = "build-"


class CannotBuild(RuntimeError):
    """There is nothing to compile with or nowhere to write, or the compiler refused; the message says what to do."""


def library() -> Path:
    """The compiled extension, built now if this machine has none for this torch and these sources."""
    folder = cache_folder() / key()
    built = folder / f"{MODULE}{EXTENSION_SUFFIXES[0]}"
    if built.exists():
        return built
    if reason := obstacle():
        raise CannotBuild(reason)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if not built.exists():
                _build(built)
    except OSError as e:
        raise CannotBuild(f"cannot build in {folder}: {e}; set {CACHE_ENVIRONMENT} to a folder to write to") from e
    return built


def obstacle() -> str:
    """Why this machine cannot compile the device, and what to do about it; "" where it can."""
    if shutil.which(_compiler()) is None:
        return f"the simulated device needs a C++ compiler; found no {_compiler()!r}; install g++ or set CXX"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the simulated device needs Python.h; found none; install Python's development files"
    return ""


def cache_folder() -> Path:
    """Where builds are kept."""
    if given := os.environ.get(CACHE_ENVIRONMENT):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelbridge-sim"


def key() -> str:
    """Names a build: torch is tied to its exact version, Python to its own, and all of it to the sources."""
    digest = hashlib.sha256(repr((FLAGS, UNITS)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return f"torch-{torch.__version__}-{python}-{digest.hexdigest()[:16]}"


def _build(target: Path) -> None:
    """Called with the lock held, so what other builds left behind is nobody's: they were killed."""
    for abandoned in target.parent.glob(f"{SCRATCH}*"):
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=SCRATCH) as scratch:
        objects = [Path(scratch) / f"{unit[0]}.o" for unit in UNITS]
        with ThreadPoolExecutor(min(os.cpu_count() or 1, len(UNITS))) as pool:
            list(pool.map(_compile, UNITS, objects))
        linked = Path(scratch) / target.name
        paths = [f"-L{path}" for path in cpp_extension.library_paths()]
        libraries = [f"-l{name}" for name in LIBRARIES]
        _run([_compiler(), "-shared", *map(str, objects), *paths, *libraries, "-o", str(linked)])
        os.replace(linked, target)


def _compile(unit: tuple[str, ...], to: Path) -> None:
    together = "".join(f'#include "{name}.cpp"\n' for name in unit)
    flags = [
        *FLAGS,
        "-iquote",
        str(SOURCES),
        *_includes(),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    _run([_compiler(), *flags, "-x", "c++", "-c", "-", "-o", str(to)], together)


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _includes() -> list[str]:
    # As system headers: their warnings are not ours.
    paths = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    return [part for path in paths for part in ("-isystem", path)]


def _run(command: list[str], source: str = "") -> None:
    try:
        done = subprocess.run(
            command, input=source, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as e:
        raise CannotBuild(f"{' '.join(command)}\ntook more than {COMPILE_SECONDS} s") from e
    if done.returncode != 0:
        raise CannotBuild(f"{' '.join(command)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    print(obstacle(), end="")
