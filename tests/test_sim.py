"""The simulated device proves itself: torch's features on it, one process and one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import Rank, run_ranks
from tests.sim import build
from tests.sim.bugs import BUGS, CORRECT
from tests.sim.device import HPU, RENAMED
from tests.sim.probes import PROBES, run_all

KEYS = (HPU, RENAMED)
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
    assert results(key)["bugs"][name], "it went unnoticed"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", CORRECT)
def test_correct_counterpart_passes(key: str, name: str, results: Callable[[str], Results]) -> None:
    assert not (failure := results(key)["correct"][name]), failure


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.CACHE_ENVIRONMENT, str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.CannotBuild, match="install g\\+\\+ or set CXX"):
        build.library()
    assert list(tmp_path.rglob("*.so")) == []
