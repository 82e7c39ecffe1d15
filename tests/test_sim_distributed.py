"""The simulated device proves itself: two ranks with a device each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks import run_ranks
from tests.sim import build
from tests.sim.distributed import PROBES, run_all
from tests.sim.names import KEYS

ByRank = list[dict[str, str]]


@pytest.fixture(scope="module")
def results() -> Callable[[str], ByRank]:
    """What became of every probe on both ranks, by key."""
    build.library()  # not on the clock of the ranks
    found: dict[str, ByRank] = {}

    def of(name: str) -> ByRank:
        if name not in found:
            found[name] = run_ranks(run_all, 2, name, timeout=120)
        return found[name]

    return of


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", PROBES)
def test_probe(key: str, name: str, results: Callable[[str], ByRank]) -> None:
    failures = {rank: found[name] for rank, found in enumerate(results(key)) if found[name]}
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
