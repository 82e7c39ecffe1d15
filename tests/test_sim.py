"""The simulated device proves itself: torch's features on it, one process and one device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests import cli
from tests.ranks import Rank, run_ranks
from tests.sim import build
from tests.sim.bugs import BUGS, CORRECT
from tests.sim.names import KEYS
from tests.sim.probes import PROBES, run_all

Results = dict[str, dict[str, str]]


def _run(ctx: Rank, name: str) -> Results:
    groups = {"probes": PROBES, "correct": CORRECT, "bugs": BUGS}
    return {group: run_all(probes, name) for group, probes in groups.items()}


@pytest.fixture(scope="module")
def results() -> Callable[[str], Results]:
    """What became of everything on one key; each key has a process of its own."""
    build.library()  # not on the clock of the process
    found: dict[str, Results] = {}

    def of(name: str) -> Results:
        if name not in found:
            found[name] = run_ranks(_run, 1, name, timeout=120)[0]
        return found[name]

    return of


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", PROBES)
def test_probe(key: str, name: str, results: Callable[[str], Results]) -> None:
    assert not (failure := results(key)["probes"][name]), failure


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", BUGS)
def test_seeded_bug_is_caught(key: str, name: str, results: Callable[[str], Results]) -> None:
    assert not (failure := results(key)["bugs"][name]), failure


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", CORRECT)
def test_correct_counterpart_passes(key: str, name: str, results: Callable[[str], Results]) -> None:
    assert not (failure := results(key)["correct"][name]), failure


def test_how_much_is_tried() -> None:
    assert (len(BUGS), len(CORRECT)) == (23, 12)
    assert len(PROBES) >= 49


# ------------------------------------------------------------------------------------------------- how it is built


def build_here(cache: Path, compiler: Path | None = None) -> subprocess.Popen[str]:
    """A process that builds, in a session of its own; it prints the library's path."""
    program = "from tests.sim import build; print(build.library())"
    env = os.environ | {build.CACHE_ENVIRONMENT: str(cache)} | ({"CXX": str(compiler)} if compiler else {})
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=env,
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """Stands for the real one, which takes a minute: it notes each call, waits where it is told to, writes a file."""
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        f"echo call >> {tmp_path}/calls\n"
        f"while [ -e {tmp_path}/wait ]; do sleep 0.05; done\n"
        'while [ "$1" != -o ]; do shift; done\n'
        'echo library > "$2"\n'
    )
    script.chmod(0o755)
    return script


def calls(compiler: Path) -> int:
    noted = compiler.parent / "calls"
    return len(noted.read_text().splitlines()) if noted.exists() else 0


def test_two_at_a_time_build_once(tmp_path: Path, compiler: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "wait").touch()
    first = build_here(cache, compiler)
    cli.wait_for(lambda: calls(compiler) > 0, 120, "a build")
    second = build_here(cache, compiler)
    assert list(cache.rglob("*.so")) == []
    (tmp_path / "wait").unlink()
    outs = [process.communicate(timeout=120) for process in (first, second)]
    assert outs[0][0] == outs[1][0] != "", outs
    assert calls(compiler) == len(build.UNITS) + 1  # each unit, and the linker


def test_a_killed_build_is_done_again(tmp_path: Path, compiler: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "wait").touch()
    killed = build_here(cache, compiler)
    cli.wait_for(lambda: calls(compiler) > 0, 120, "a build")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert len(list(cache.rglob(f"{build.SCRATCH}*"))) == 1
    (tmp_path / "wait").unlink()
    out, errors = build_here(cache, compiler).communicate(timeout=120)
    assert Path(out.strip()).read_text() == "library\n", errors
    assert list(cache.rglob(f"{build.SCRATCH}*")) == []


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()  # permissions would not stop root
    monkeypatch.setenv(build.CACHE_ENVIRONMENT, str(tmp_path / "file"))
    with pytest.raises(build.CannotBuild, match=f"set {build.CACHE_ENVIRONMENT} to a folder"):
        build.library()


def test_what_is_built_is_taken_without_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = tmp_path / build.key() / f"{build.MODULE}{EXTENSION_SUFFIXES[0]}"
    built.parent.mkdir()
    built.touch()
    built.parent.chmod(0o500)
    monkeypatch.setenv(build.CACHE_ENVIRONMENT, str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.library() == built
    assert list(built.parent.iterdir()) == [built]  # nor a lock


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.CACHE_ENVIRONMENT, str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.CannotBuild, match="install g\\+\\+ or set CXX"):
        build.library()
    assert list(tmp_path.rglob("*.so")) == []
