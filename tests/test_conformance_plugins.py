"""Plugins that crash, hang, abort, print rubbish, patch torch or lie: each is caught, named, and leaves a report."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from accelbridge.cli import main
from accelbridge.conformance.patched import unstated
from accelbridge.conformance.report.model import Report
from accelbridge.conformance.report.verify import load, verify
from accelbridge.conformance.status import Status

from .plugins_env import Plugin, backend_source, environment, install, once, run_cli

CRASH = "raise RuntimeError('the driver is not loaded')"
BIND = """
def bind(self, world):
    {body}
    return torch.device("cpu")

import torch
from accelbridge.portable.device import TorchDevice
{before}
class Device(TorchDevice):
    def count(self):
        return {count}
    bind = bind
    def memory(self):
        return {{"allocated": None, "peak": None, "total": None}}
Made.device = cached_property(lambda self: Device("cpu"))
Made.device.__set_name__(Made, "device")
"""


def bind(body: str = "pass", before: str = "", count: int = 8) -> str:
    return BIND.format(body=body, before=before, count=count)


LAZY_MATMUL = """
from accelbridge.portable.matmul import PortableMatmul
class Lazy(PortableMatmul):
    def matmul(self, a, b, out_dtype=None):
        {body}
Made.matmul = cached_property(lambda self: Lazy("made"))
Made.matmul.__set_name__(Made, "matmul")
"""


@dataclass(frozen=True)
class Scene:
    """A plugin, and what the report must say of test MM-007 under it."""

    changes: str = ""
    before: str = ""
    exit_code: int = 1
    status: Status = Status.CRASH
    code: str = "START"
    says: str = ""
    env: dict[str, str] = field(default_factory=dict)


SCENES = {
    "import": Scene(before=CRASH + "\n", exit_code=3, says="the driver is not loaded"),
    "crash": Scene(bind(CRASH), exit_code=3, says="the driver is not loaded"),
    "exit": Scene(bind("os._exit(7)"), exit_code=3, says="exit code 7"),
    "abort": Scene(bind("os.abort()"), exit_code=3, says="SIGABRT"),
    "abort-later": Scene(bind() + LAZY_MATMUL.format(body="os.abort()"), code="DIED", says="SIGABRT"),
    "raise-later": Scene(
        bind() + LAZY_MATMUL.format(body="raise ValueError('no kernel')"),
        status=Status.FAIL,
        code="RAISED",
        says="no kernel",
    ),
    "rubbish": Scene(
        bind("print('{\"status\": \"PASS\"}'); os.write(1, bytes(range(256)) * 100); os.write(2, b'x' * 10000)"),
        exit_code=0,
        status=Status.PASS,
        code="",
    ),
    "wrong": Scene(
        bind() + LAZY_MATMUL.format(body="return super().matmul(a, b, out_dtype) + 1"), status=Status.FAIL, code="EXACT"
    ),
}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        plugins = [Plugin(name, backend_source(name, before=s.before, changes=s.changes)) for name, s in SCENES.items()]
        patching = bind(before="torch.nn.functional.relu = lambda x: x\n")
        few = bind(count=1)
        slow = bind("time.sleep(3600)")
        extra = {"patching": patching, "few": few, "slow": slow}
        install(folder, [*plugins, *(Plugin(n, backend_source(n, changes=c)) for n, c in extra.items())])

    return once(tmp_path_factory, "conformance-plugins", make) / "site"


def run(name: str, sites: Path, folder: Path, *arguments: str, **env: str) -> tuple[int, Report, str]:
    done = run_cli(
        "conform", "run", "--backend", name, "--out", str(folder / "R"), *arguments, cwd=folder, sites=[sites], env=env
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, load(folder / "R"), done.stdout + done.stderr


FULL = ("exit", "abort", "raise-later")
"""Scenes of which others show the like."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] if n in FULL else []) for n in SCENES])
def test_what_a_bad_plugin_does_is_an_outcome(name: str, sites: Path, tmp_path: Path) -> None:
    scene = SCENES[name]
    code, report, said = run(name, sites, tmp_path, "--only", "MM-007")
    assert code == scene.exit_code, said
    (row,) = report.tests
    assert (row.status, row.code) == (scene.status, scene.code), row.message
    assert scene.says in row.message
    assert report.backend.name == name
    assert report.backend.distribution == f"vendor-{name}"
    assert verify(tmp_path / "R")[0] == []


def test_a_plugin_that_replaces_functions_of_torch_is_named(sites: Path, tmp_path: Path) -> None:
    _, report, _ = run("patching", sites, tmp_path, "--only", "MM-007")
    (name,) = report.environment.patched
    assert name.startswith("torch.nn.functional.relu (")
    assert "replaced a function of torch" in (tmp_path / "R" / "report.html").read_text()


def test_what_a_vendors_package_replaces_is_stated() -> None:
    found = ["torch.compile (/site/acme/loader.py)", "torch.nn.functional.relu (/site/acme/loader.py)"]
    assert unstated(found, ("torch.compile",)) == found[1:]
    assert unstated(found, ()) == found


def test_too_few_devices_are_no_pass(sites: Path, tmp_path: Path) -> None:
    code, report, _ = run("few", sites, tmp_path, "--only", "COL-001")
    assert code == 3
    assert [row.status for row in report.tests] == [Status.RESOURCE_ERROR]
    assert "2 devices needed, 1 found" in report.tests[0].message


def test_a_plugin_that_hangs_is_ended(sites: Path, tmp_path: Path) -> None:
    """The limit is long, so it is shortened here; what is shown is that hanging is an outcome."""
    program = (
        "import sys; from accelbridge.conformance import pool; pool.START_S = 8.0\n"
        "from accelbridge.cli import main; sys.argv[1:] = "
        f"['conform', 'run', '--backend', 'slow', '--only', 'MM-007', '--out', {str(tmp_path / 'R')!r}]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(sites), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    (row,) = load(tmp_path / "R").tests
    assert (row.status, row.code) == (Status.CRASH, "START")
    assert "not ready within 8 s" in row.message
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("certify", "--backend", "cpuu"), 'did you mean "cpu"'),
        (("certify", "--backend", "cpu", "--level", "cor"), 'did you mean "core"'),
        (("run", "--backend", "cpu", "--only", "MM-999"), "no id"),
        (("run", "--backend", "cpu", "--option", "devices"), "NAME=VALUE"),
        (("verify", "nowhere"), "no report.json"),
        (("mutants", "--only", "Q99"), "there is none"),
    ],
)
def test_bad_input_is_refused_at_once(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = ("--out", str(tmp_path / "R")) if arguments[0] in ("certify", "run") else ()
    monkeypatch.chdir(tmp_path)
    assert conform(monkeypatch, *arguments, *out) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.out == ""
    assert not (tmp_path / "R").exists()


def test_a_folder_in_use_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "R").mkdir()
    (tmp_path / "R" / "mine").write_text("precious")
    asked = ("run", "--backend", "cpu", "--only", "MM-007", "--out", str(tmp_path / "R"))
    assert conform(monkeypatch, *asked) == 2
    assert "not empty" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "R").iterdir()] == ["mine"]


def conform(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """``accelbridge conform ARGUMENTS`` in this process: what only refuses needs none of its own."""
    monkeypatch.setattr(sys, "argv", ["accelbridge", "conform", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code
