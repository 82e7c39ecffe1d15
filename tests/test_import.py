"""Importing accelbridge and asking it for help costs nothing: no torch, no environment, no device, safe to fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plugins_env import environment, once

WATCH = """
import json, os, sys
import psutil

seen = []
def audit(event, args):
    what = os.fsdecode(args[0]) if args and isinstance(args[0], (str, bytes)) else ""
    device = event == "open" and what.startswith("/dev/") and what not in ("/dev/null", "/dev/urandom")
    # typer sets this one while it builds its parameters, and takes it back at once.
    variable = event in ("os.putenv", "os.unsetenv") and what != "PYDANTIC_DISABLE_PLUGINS"
    if device or variable or event.startswith("socket."):
        seen.append([event, what])

def state():
    process = psutil.Process()
    return {"environment": dict(os.environ), "files": process.num_fds(), "threads": process.num_threads()}

def report(**more):
    after = state()
    changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
    print("\\n" + json.dumps({"changed": changed, "seen": seen, "modules": sorted(sys.modules), **more}))

before = state()
sys.addaudithook(audit)
"""
"""Notes what a piece of code does to its process: environment, open files, threads, devices, sockets, modules."""


def watched(code: str, cwd: Path) -> dict[str, Any]:
    """Run ``code`` in a new process; what it did, and whatever it passed to ``report``."""
    done = subprocess.run(
        [sys.executable, "-c", WATCH + code],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def top_level(found: dict[str, Any]) -> set[str]:
    return {name.partition(".")[0] for name in found["modules"]}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("accelbridge", {"torch", "numpy", "pydantic", "pluggy", "typer", "rich"}),
        ("accelbridge.backend", {"torch", "numpy", "pydantic", "pluggy", "typer", "rich"}),
        ("accelbridge.plugins", {"torch", "numpy", "pydantic", "typer", "rich"}),
        ("accelbridge.hookspecs", {"torch", "numpy", "pydantic", "typer", "rich"}),
        ("accelbridge.train.config", {"torch", "numpy", "typer", "rich"}),
        ("accelbridge.agreement", {"torch", "numpy", "pydantic", "typer", "rich"}),
        ("accelbridge.cli", {"torch", "numpy"}),
    ],
)
def test_importing_costs_nothing(module: str, absent: set[str], tmp_path: Path) -> None:
    found = watched(f"import {module}\nreport()", tmp_path)
    assert not absent & top_level(found)
    assert (found["changed"], found["seen"]) == ({}, [])
    assert list(tmp_path.iterdir()) == []


def test_the_public_names_that_need_no_torch_load_none(tmp_path: Path) -> None:
    code = "from accelbridge import Backend, Capabilities, TrainConfig, hookimpl, load_backend\nreport()"
    found = watched(code, tmp_path)
    assert not {"torch", "numpy"} & top_level(found)
    assert (found["changed"], found["seen"]) == ({}, [])


def test_help_of_every_command(tmp_path: Path) -> None:
    code = """
import typer.main
from accelbridge.cli import main
from accelbridge.cli.main import app

def paths(command, path=()):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from paths(child, (*path, name))

helped = []
for path in paths(typer.main.get_command(app)):
    sys.argv = ["accelbridge", *path, "--help"]
    try:
        main()
    except SystemExit as leave:
        assert not leave.code, path
    helped.append([" ".join(path), sorted({"torch", "numpy"} & sys.modules.keys())])
report(helped=helped)
"""
    found = watched(code, tmp_path)
    assert all(loaded == [] for _, loaded in found["helped"]), found["helped"]
    assert {"", "train", "devices", "explain", "data", "report"} <= {path for path, _ in found["helped"]}
    assert (found["changed"], found["seen"]) == ({}, [])


@pytest.mark.parametrize("arguments", [["devices"], ["devices", "--json"], ["--version"]])
def test_devices_opens_none(arguments: list[str], tmp_path: Path) -> None:
    code = f"""
from accelbridge.cli import main
sys.argv = ["accelbridge", *{arguments!r}]
try:
    main()
except SystemExit as leave:
    assert not leave.code
report()
"""
    found = watched(code, tmp_path)
    assert not {"torch", "numpy"} & top_level(found)
    assert (found["changed"], found["seen"]) == ({}, [])


FORK = """
import importlib, pkgutil
import accelbridge, accelbridge.backend, accelbridge.plugins, accelbridge.train.config, accelbridge.cli
from accelbridge.plugins import survey

def flags():
    import torch
    import torch.distributed as dist
    modules = [torch.get_device_module(t) for t in ("cpu", "cuda", "xpu")]
    return [
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.initial_seed(),
        torch.get_rng_state().sum().item(),
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.multiprocessing.get_sharing_strategy(),
        dist.is_initialized(),
        [m.is_initialized() for m in modules if hasattr(m, "is_initialized")],
    ]

def import_everything():
    names = [m.name for m in pkgutil.walk_packages(accelbridge.__path__, "accelbridge.")]
    for name in names:
        if not name.endswith(("__main__", "ray_worker")):  # the latter is imported in a worker of Ray only
            importlib.import_module(name)
    return len(names)

first = [c.name for c in survey() if c.available]
report_modules = sorted(sys.modules)
read, write = os.pipe()
child = os.fork()
if child == 0:
    import torch
    torch.manual_seed(1)
    fresh, environ = flags(), dict(os.environ)
    count = import_everything()
    product = (torch.ones(64, 64) @ torch.ones(64, 64)).sum().item()
    answer = [fresh, flags(), dict(os.environ) == environ, count, product, [c.name for c in survey() if c.available]]
    os.write(write, json.dumps(answer).encode())
    os._exit(0)
os.close(write)
answer = json.loads(os.fdopen(read).read())
_, status = os.waitpid(child, 0)
report(child=answer, status=status, first=first, second=[c.name for c in survey() if c.available])
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A process that surveys, forks a child that imports torch and all of accelbridge, and surveys again."""

    def make(folder: Path) -> None:
        (folder / "found").write_text(json.dumps(watched(FORK, folder)))

    made = once(tmp_path_factory, "forked", make)
    return json.loads((made / "found").read_text())


def test_forking_after_import_and_survey_is_safe(forked: dict[str, Any]) -> None:
    *_, product, devices = forked["child"]
    assert (forked["status"], product) == (0, 64.0**3)
    assert devices == forked["first"] == forked["second"]
    assert "cpu" in devices


def test_a_survey_loads_no_torch_and_leaves_nothing_behind(forked: dict[str, Any]) -> None:
    assert not {"torch", "numpy"} & top_level(forked)
    assert (forked["changed"], forked["seen"]) == ({}, [])


def test_importing_all_of_accelbridge_leaves_torch_as_it_is(forked: dict[str, Any]) -> None:
    fresh, after, same_environment, count, *_ = forked["child"]
    assert after == fresh
    assert same_environment
    assert count > 50


def test_the_watch_sees_what_it_should(tmp_path: Path) -> None:
    code = """
import socket, threading, time
os.environ["NEW"] = "1"
open("/dev/zero").close()
kept = socket.socket()
threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
report()
"""
    found = watched(code, tmp_path)
    assert set(found["changed"]) == {"environment", "files", "threads"}
    assert {event for event, *_ in found["seen"]} >= {"os.putenv", "open", "socket.__new__"}
