"""The conformance suite over a backend of interpreted kernels: quantization, scaled products, and each op that a plan
may bind to one. (Attention's cases alone are in test_flash_conformance.py.) Its evidence is "simulated", and says
"interpreted" wherever a cell is named; no chip and no compiler has part in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelbridge.backend import World
from accelbridge.conformance.bench import Bench, NotSupported
from accelbridge.conformance.certify import Asked, perform
from accelbridge.conformance.pool import Target
from accelbridge.conformance.registry import cases
from accelbridge.conformance.runner import run_cases
from accelbridge.conformance.status import Status
from tests.kernels.backend import NAME, InterpretedBackend, site

FAMILIES = ("F8-", "CST-", "MM-", "INF-007", "INF-008", "INF-009", "INF-010")
IDS = [id for id, case in sorted(cases().items()) if id.startswith(FAMILIES) and case.worlds == (1,)]
QUICK = ("CST-007", "CST-008", "F8-005", "F8-007", "F8-008", "F8-010", "F8-011", "F8-012", "INF-008")
"""The others take the interpreter more than some seconds each."""
RUN = ("ATT-003", "ATT-005", "F8-003", "F8-011", "INF-003", "INF-008")
"""By the suite's own runner, in processes of their own."""


@pytest.mark.parametrize("id", [pytest.param(id, marks=[] if id in QUICK else [pytest.mark.full]) for id in IDS])
def test_a_case_passes(id: str, tmp_path: Path) -> None:
    backend = InterpretedBackend()
    host = backend.host = backend.probe()
    capabilities = backend.capabilities(host.devices[0].chip, host.software)
    bench = Bench(cases()[id], backend, capabilities, World(), torch.device("cpu"), tmp_path, seed=0)
    try:
        cases()[id].body(bench)
    except NotSupported as error:
        pytest.skip(str(error))
    assert bench.found.failures == []
    assert bench.found.comparisons > bench.found.vacuous


def test_products_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the emulation would be seen to pass in their place."""
    from accelbridge.kernels import quantize, scaled_mm
    from accelbridge.precision.formats import FORMATS

    seen: list[str] = []
    for module in (quantize, scaled_mm):
        name = module.__name__.rpartition(".")[2]
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, n=name, r=real, **more: (seen.append(n), r(*args, **more))[1])
    matmul = InterpretedBackend().matmul
    x, w = torch.ones(16, 32), torch.ones(16, 32)
    a, b = (matmul.quantize(each, FORMATS["float8_e4m3fn"], "row") for each in (x, w))
    torch.testing.assert_close(matmul.scaled_mm(a, b.t(), torch.float32), x @ w.t())
    assert seen == ["quantize", "quantize", "scaled_mm"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in site(tmp_path / "site").items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.mark.full
def test_the_suite_runs_it_as_any_backend(folder: Path) -> None:
    outcomes = run_cases(Target(NAME), [cases()[id] for id in RUN], folder / "out", 4)
    assert {outcome.id for outcome in outcomes} == set(RUN)
    assert [outcome for outcome in outcomes if outcome.status != Status.PASS] == []


def test_a_report_says_simulated_and_interpreted(folder: Path) -> None:
    report = perform(Asked(Target(NAME), ("fp8",), ("MM-001", "F8-005"), certify=False), folder / "out")
    assert "simulated" in report.headline
    assert "hardware" not in report.headline
    assert report.environment.chip.startswith("interpreted on ")
    assert {(test.status, test.evidence) for test in report.tests} == {(Status.PASS, "simulated")}
    products = [cell for cell in report.cells if cell.op == "scaled_mm"]
    assert {cell.claimed for cell in products} == {"full"}
    assert all(cell.reason.startswith("interpreted; ") for cell in products)
