"""The conformance suite on a device that is not the host: what a host processor alone cannot show of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelbridge.conformance.pool import Outcome, Target
from accelbridge.conformance.registry import cases
from accelbridge.conformance.runner import run_cases
from tests.sim import build
from tests.sim.backend import BACKENDS, environment, site
from tests.sim.hosted import HostedSim, add_to
from tests.sim.names import KEYS

IDS = ("INF-003", "INF-008", "MEM-001", "MM-007")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    build.library()
    add_to(site(tmp_path / "site"))
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def run(folder: Path, backend: str) -> dict[str, Outcome]:
    outcomes = run_cases(Target(backend), [cases()[id] for id in IDS], folder / "out", 4)
    return {outcome.id: outcome for outcome in outcomes}


@pytest.mark.parametrize("key", KEYS)
def test_the_simulated_device_does_its_work(key: str, folder: Path) -> None:
    for outcome in run(folder, BACKENDS[key].name).values():
        assert (outcome.status, outcome.on_device) == ("PASS", "proven"), outcome


def test_work_done_on_the_host_instead_is_seen(folder: Path) -> None:
    found = run(folder, HostedSim.name)
    assert (found["INF-008"].status, found["INF-008"].code) == ("FAIL", "FALLBACK"), found["INF-008"]
    # Its results are right and lie where they should: nothing else could tell.
    assert {id for id, outcome in found.items() if outcome.status != "PASS"} == {"INF-008"}, found
