"""``Execution.compile_ahead`` of this backend: two children, each within what is left of the limit.

The first records the step under torch_xla on as many virtual devices as the target has chips; the second, in an
environment with jax and libtpu, compiles it. Neither needs a TPU, and no array of the model exists in either.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelbridge.backend import Compiled, CompileTimeout, Execution, Support, unsupported
from accelbridge.errors import AccelbridgeError, BackendError, ConfigError
from accelbridge_xla.ahead import hlo
from accelbridge_xla.ahead.products import repeated_flops
from accelbridge_xla.ahead.targets import GIB, Target, parse
from accelbridge_xla.ahead.traffic import traffic
from accelbridge_xla.hardware import PLATFORM_VARIABLE, VIRTUAL_VARIABLE
from accelbridge_xla.runtimes import SPMD, mismatch, version_of

COMPILER = "ACCELBRIDGE_TPU_COMPILER_PYTHON"
"""The interpreter of the environment with jax and libtpu; unset: this one, where it has both."""
_INSTALL = (
    "'make .venv-tpu/installed' makes an environment with it (pip install 'jax[tpu]==0.10.2'); "
    f"then set {COMPILER} to its python"
)
_NO_TORCH_XLA = (
    "recording a step takes torch_xla, which is not installed here; 'make .venv-xla/installed' makes an environment "
    "with it: run .venv-xla/bin/accelbridge"
)
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", re.ASCII)
_TEMPORARIES = re.compile(
    r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)", re.ASCII
)
"""The two forms in which libtpu 0.0.42.1 refuses a program for its memory."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}


def compile_ahead(target: str, step: Callable[[Execution], None], seconds: float) -> Compiled | Support:
    """See the interface. ``target`` is ``tpu:CHIP:TOPOLOGY``."""
    _, chip, topology = target.split(":")
    described, devices = parse(chip, topology)
    if find_spec("torch_xla") is None:
        return unsupported(_NO_TORCH_XLA)
    if refused := mismatch(SPMD):
        return unsupported(refused)
    python = compiler()
    if isinstance(python, Support):
        return python
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="accelbridge-ahead-") as name:
        folder = Path(name)
        script = [python, str(Path(__file__).with_name("compile_tpu.py")), str(folder), f"{chip.lower()}:{topology}"]
        _run("asking the compiler for the topology", script, {}, until)  # in seconds, before minutes of recording
        asked = json.loads((folder / "compiled.json").read_text())
        if "missing" in asked:
            return unsupported(f"{python} has no {asked['missing']}; {_INSTALL}")
        if "refused" in asked:
            raise ConfigError(f"--compile-for {target} asked; libtpu refuses: {_first(asked['refused'])}; {_OTHERS}")
        if asked["devices"] != devices:
            return unsupported(f"libtpu shows {asked['devices']} devices for {devices} chips of {target}")
        _record(folder, step, devices, until)
        _run("compiling the step", script, {}, until)
        return _report(folder, described, devices)


_OTHERS = "choose another topology: hosts hold whole blocks of chips, so that not every shape exists"


def compiler() -> str | Support:
    """The interpreter that has the compiler, or why there is none."""
    named = os.environ.get(COMPILER)
    if named:
        if not (Path(named).is_file() and os.access(named, os.X_OK)):
            raise BackendError(f"{COMPILER}={named} asked; there is no such program; {_INSTALL}")
        return named
    missing = [each for each in ("jax", "libtpu") if find_spec(each) is None]
    if missing:
        return unsupported(f"the compiler for TPUs is not installed here ({', '.join(missing)} missing); {_INSTALL}")
    return sys.executable


def _record(folder: Path, step: Callable[[Execution], None], devices: int, until: float) -> None:
    (folder / "step.pickle").write_bytes(pickle.dumps(step))
    environment = {
        PLATFORM_VARIABLE: "CPU",
        VIRTUAL_VARIABLE: str(devices),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    _run("recording the step", [sys.executable, "-m", "accelbridge_xla.ahead.export", str(folder)], environment, until)
    if (refused := folder / "refused.txt").exists():
        raise AccelbridgeError(refused.read_text())


def _run(what: str, command: Sequence[str], environment: dict[str, str], until: float) -> None:
    """A child in a session of its own, ended with all it started when the time is up."""
    left = until - time.monotonic()
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
    }
    if not environment:  # another interpreter: our modules are not for it
        variables.pop("PYTHONPATH", None)
    child = subprocess.Popen(
        command,
        env=variables | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, errors = child.communicate(timeout=max(left, 0.1))
    except subprocess.TimeoutExpired:
        raise CompileTimeout(f"{what} did not finish within the limit") from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    if child.returncode:
        raise BackendError(
            f"{what} failed: {Path(command[0]).name} ended with {child.returncode}: {_last(errors)}; {_whose(command)}"
        )


def _whose(command: Sequence[str]) -> str:
    if command[1] == "-m":
        return "torch_xla 2.9.0 with torch 2.9.1 is what this was written for"
    return _INSTALL


def _report(folder: Path, target: Target, devices: int) -> Compiled:
    program = json.loads((folder / "program.json").read_text())
    found = json.loads((folder / "compiled.json").read_text())
    software = {name: each for name in ("torch", "torch_xla") if (each := version_of(name))}
    software |= {"jax": found["jax"], "libtpu": found["libtpu"]}
    common: dict[str, Any] = {
        "chip": target.chip,
        "devices": devices,
        "software": software,
        "seconds": {"recording": program["seconds"], "compiling": found["seconds"]},
        "host_bytes": max(program["host_bytes"], found["host_bytes"]),
    }
    if "error" in found:
        return _too_large(found["error"], program, target, common)
    optimised = hlo.read((folder / "optimised.hlo").read_text())
    flops, notes = _flops(found["cost"].get("flops"), optimised)
    return Compiled(
        fits=True,  # else the compiler would have refused
        memory=_memory(found["memory"], program),
        capacity=target.memory_bytes,
        flops=flops,
        collectives=traffic(optimised),
        notes=notes,
        **common,
    )


def _flops(counted: float | None, optimised: hlo.Program) -> tuple[float | None, tuple[str, ...]]:
    """Of one run, and notes on how they and the collectives were counted."""
    notes: list[str] = []
    if optimised.unknown_loops:
        notes.append(f"{optimised.unknown_loops} loops of unknown length: what is in them counts once")
    if counted is None or not (repeated := repeated_flops(optimised)):
        return counted, tuple(notes)
    notes.append(f"the compiler counts a loop once; {repeated:.4g} FLOPs of the further runs of its products are added")
    return counted + repeated, tuple(notes)


def _memory(stats: dict[str, int], program: dict[str, Any]) -> dict[str, int]:
    """The compiler's sizes, with arguments told apart by what they are, in the share of their padded whole."""
    kinds = _argument_kinds(program)
    padding = stats["arguments"] - sum(kinds.values())
    memory = {**kinds, "padding of arguments": max(0, padding)} if padding > 0 else dict(kinds)
    memory |= {
        "temporaries": stats["temporaries"],
        "results": stats["outputs"] - stats["aliased"],
        "code": stats["code"],
    }
    return {**memory, "total": sum(memory.values())}


def _argument_kinds(program: dict[str, Any]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for value in program["inputs"]:
        size = value["itemsize"]
        for length, ways in zip(value["shape"], _tiles(value["sharding"], len(value["shape"])), strict=True):
            size *= -(-length // ways)
        kinds[value["kind"]] = kinds.get(value["kind"], 0) + size
    return kinds


def _tiles(sharding: str, dims: int) -> list[int]:
    match = re.match(r"\{devices=\[([\d,]+)\]", sharding)
    return [int(each) for each in match[1].split(",")[:dims]] if match else [1] * dims


def _too_large(error: str, program: dict[str, Any], target: Target, common: dict[str, Any]) -> Compiled:
    """What is known of a program that the compiler refuses for its memory. Raises BackendError for another refusal."""
    kinds = _argument_kinds(program)
    if used := _USED.search(error):
        total = _size(used[1], used[2])
        memory = {**kinds, "temporaries and code": max(0, total - sum(kinds.values())), "total": total}
    elif used := _TEMPORARIES.search(error):
        memory = {**kinds, "temporaries": _size(used[1], used[2])}
        memory["total"] = sum(memory.values())
    else:
        raise BackendError(
            f"compiling the step failed: {_first(error)}; this is a limit of the compiler or a bug of ours"
        )
    notes = (f"refused by the compiler: {used[0]}",)
    return Compiled(fits=False, memory=memory, capacity=_size(used[3], used[4]), notes=notes, **common)


def _size(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _first(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[0][:300]


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1][:300]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
