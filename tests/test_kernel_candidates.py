"""Which chips get our kernels of layers and losses, and what a plan says where one does not. No GPU, no triton."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from accelbridge.backend import Backend, Implementation, Request
from accelbridge.kernels.candidates import LAYERS, layers
from accelbridge.kernels.installed import installed_triton
from accelbridge.kernels.limits import DTYPES
from accelbridge_cuda.backend import CudaBackend
from accelbridge_rocm.backend import RocmBackend
from tests.test_plans import plan_of

CHIPS = {"a100": CudaBackend, "h100": CudaBackend, "b200": CudaBackend, "rtx5090": CudaBackend, "mi250x": RocmBackend,
         "mi300x": RocmBackend, "mi355x": RocmBackend}  # fmt: skip
SHAPE = {"dim": 4096, "sequence": 4096, "head_dim": 128}
REQUESTS = [Request(op, "bfloat16", SHAPE) for op in LAYERS]


def candidate(chip: str, op: str, **software: str) -> Implementation:
    backend: Backend = CHIPS[chip]()
    backend.host = CHIPS[chip].assume(chip, 1, software)
    found = [each for each in backend.implementations() if each.op == op]
    assert [each.name for each in found] == ["triton"]  # no vendor library has one
    return found[0]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.op)
def test_each_op_is_served_on_each_chip(chip: str, request_: Request) -> None:
    ours = candidate(chip, request_.op)
    for dtype in DTYPES:
        assert ours.supports(replace(request_, dtype=dtype))
    assert ours.deterministic
    assert ours.launches[0].startswith("accelbridge::")


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Request("rms_norm", "float64", SHAPE), "not float64"),
        (Request("rms_norm", "bfloat16", {"dim": 16384}), ""),
        (Request("rms_norm", "bfloat16", {"dim": 16385}), "16384 elements, not 16385"),
        (Request("rms_norm", "bfloat16", SHAPE, needs=frozenset({"compiled"})), ""),
        (Request("rope", "bfloat16", {"head_dim": 512}), ""),
        (Request("rope", "bfloat16", {"head_dim": 514}), "heads up to 512, not 514"),
        (Request("rope", "bfloat16", SHAPE, needs=frozenset({"compiled"})), "torch.compile makes one pass"),
        (Request("swiglu", "bfloat16", SHAPE, needs=frozenset({"compiled"})), "torch.compile makes one pass"),
        (Request("cross_entropy", "float8_e4m3fn"), "not float8_e4m3fn"),
        (Request("linear_cross_entropy", "float64"), "not float64"),
    ],
    ids=str,
)
def test_what_a_kernel_does_not_take_is_refused_with_the_reason(request_: Request, why: str) -> None:
    found = candidate("h100", request_.op).supports(request_)
    assert bool(found) is (why == "")
    assert why in found.reason


def test_triton_must_be_there_and_new_enough() -> None:
    for software, why in (({}, "triton is not installed"), ({"triton": "3.1.0"}, "3.1.0 is older")):
        for each in layers("sm90", {"any": None}, software):  # pyright: ignore[reportArgumentType]
            assert why in each.supports(Request(each.op, "bfloat16")).reason
    assert "has no tiles for sm70" in layers("sm70", {}, {"triton": "3.7.1"})[0].supports(REQUESTS[0]).reason
    assert not candidate("mi300x", "rope", torch="2.20.0").supports(REQUESTS[1])  # nothing is made up of its triton


def test_its_version_is_read_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton").mkdir()
    source = tmp_path / "triton" / "__init__.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    for text, version in (("raise SystemExit\n__version__ = '3.9.1'\n", "3.9.1"), ("raise SystemExit\n", None)):
        source.write_text(text, encoding="utf-8")
        assert installed_triton() == version


# ---------------------------------------------------------------------------------------------------------- plans


def chosen(plan, op: str) -> tuple[str, dict[str, str]]:
    row = next(choice for choice in plan.ops if choice.op == op)
    return row.implementation, {each.implementation: each.reason for each in row.rejected}


@pytest.mark.parametrize("chip", ["h100", "mi300x"])
def test_a_plan_takes_them_and_says_why(tmp_path: Path, chip: str) -> None:
    plan = plan_of(tmp_path, chip, "memory.chunked_loss=true")
    for op in ("rms_norm", "rope", "swiglu", "linear_cross_entropy"):
        name, rejected = chosen(plan, op)
        assert (name, set(rejected)) == ("triton", {"reference"})
    assert chosen(plan_of(tmp_path, chip), "cross_entropy")[0] == "triton"


def test_a_plan_of_compiled_layers_leaves_them_to_the_compiler(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "h100", "train.compile=true")
    assert chosen(plan, "rms_norm")[0] == "triton"
    for op in ("rope", "swiglu"):
        name, rejected = chosen(plan, op)
        assert name == "reference"
        assert "torch.compile" in rejected["triton"]
