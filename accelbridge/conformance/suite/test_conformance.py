"""The suite under pytest, one item per id: ``pytest --pyargs accelbridge.conformance.suite --ab-backend NAME``.

The same ranks in processes of their own as under ``accelbridge conform``, with pytest's choice and report of tests. It
certifies nothing: ``accelbridge conform certify`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from accelbridge.cli.conform import target_of
from accelbridge.conformance.certify import check_levels, chosen_cases
from accelbridge.conformance.registry import Case
from accelbridge.conformance.runner import Runner
from accelbridge.conformance.status import Status


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        levels = check_levels(str(metafunc.config.getoption("--ab-level")).split(","))
        metafunc.parametrize("case", [pytest.param(case, id=case.id) for case in chosen_cases(levels, ())])


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    backend = request.config.getoption("--ab-backend")
    if not backend:
        pytest.fail("name the backend: --ab-backend NAME")
    folder: Path = tmp_path_factory.mktemp("conformance")
    with Runner(target_of(backend, request.config.getoption("--ab-option")), folder) as runner:
        runner.introduce()
        yield runner


def test_conforms(case: Case, runner: Runner) -> None:
    outcomes = [outcome for outcome, _ in runner.run(case)]
    absent = [outcome for outcome in outcomes if outcome.status == Status.NOT_SUPPORTED]
    bad = [outcome for outcome in outcomes if outcome.status not in (Status.PASS, Status.NOT_SUPPORTED)]
    told = [
        f"{o.status.value} {o.code} at {o.world} ranks: {o.message} (log {runner.out / 'logs' / o.log}*)" for o in bad
    ]
    assert not bad, f"{case.asserted()}\n" + "\n".join(told)
    if absent:
        pytest.skip(absent[0].message)
