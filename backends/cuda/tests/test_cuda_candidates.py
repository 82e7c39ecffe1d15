"""Tables, predicates and rules of the CUDA backend: no GPU, no NVML."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from accelbridge.backend import DeviceInfo, Implementation, Probe, Request
from accelbridge.errors import ConfigError
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.scalings import SCALINGS
from accelbridge_cuda import attention, facts
from accelbridge_cuda.backend import CudaBackend
from accelbridge_cuda.rules import RULES

NOW = facts.usual_software("2.13.0")
LIBRARY = {name: version for name, version in NOW.items() if name != "triton"}
"""Without our kernels."""
HEADS = {"head_dim": 128, "heads": 32, "kv_heads": 8, "sequence": 4096}
CAUSAL = Request("attention", "bfloat16", HEADS, needs=frozenset({"causal", "gqa"}))
WINDOW = replace(CAUSAL, needs=CAUSAL.needs | {"window"})


def chip(architecture: str) -> str:
    return f"Some GPU ({architecture})"


def cell(architecture: str, formats: str, scaling: str, software: Mapping[str, str] = LIBRARY):
    return facts.capabilities(chip(architecture), software).support("scaled_mm", formats, scaling)


# -------------------------------------------------------------------------------------------------------- table


@pytest.mark.parametrize("architecture", facts.ARCHITECTURES)
def test_every_key_is_made_of_known_names(architecture: str) -> None:
    table = facts.capabilities(chip(architecture), NOW).table
    for op, dtype, variant in table:
        if op in ("quantize", "scaled_mm"):
            assert set(dtype.split(" x ")) <= set(FORMATS)
            assert set(variant.split(" x ")) <= set(SCALINGS)
            assert table[op, dtype, variant].level in ("full", "emulated")
    for (op, dtype, variant), support in table.items():
        assert support or support.reason, (op, dtype, variant)


def test_capabilities_are_a_pure_function() -> None:
    software = dict(NOW)
    first, second = (facts.capabilities(chip("sm90"), software) for _ in range(2))
    assert first == second
    assert software == NOW


def test_products_and_chips_are_of_known_architectures() -> None:
    for name in (*facts.PRODUCTS, *facts.CHIPS.values()):
        assert facts.architecture_of(name) in facts.ARCHITECTURES
    h200 = CudaBackend.capabilities(facts.CHIPS["h200"], NOW).chip
    assert (h200.peak_flops["bfloat16"], h200.peak_flops["fp8"]) == (989e12, 1979e12)
    assert h200.memory_bytes == 141e9


def test_an_unknown_product_of_a_known_architecture_works_without_a_peak() -> None:
    found = facts.capabilities("NVIDIA H100 NVL (sm90)", NOW)
    assert (dict(found.chip.peak_flops), found.chip.memory_bytes) == ({}, None)
    assert found.support("scaled_mm", facts.E4M3, "tensor").level == "full"


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-16GB (sm70)", "Something"])
def test_an_unknown_architecture_claims_nothing_and_says_so(name: str) -> None:
    found = facts.capabilities(name, NOW)
    assert not any(found.table.values())
    assert "is not one of sm80" in found.support("linear", "bfloat16").reason


PAIR = f"{facts.E5M2} x {facts.E4M3}"
BLOCKS = "block1x128 x block128x128"


@pytest.mark.parametrize(
    ("architecture", "formats", "scaling", "level", "why"),
    [
        ("sm80", facts.E4M3, "tensor", "emulated", "sm80"),
        ("sm86", facts.E4M3, "row", "emulated", "sm86"),
        ("sm89", facts.E4M3, "tensor", "full", ""),
        ("sm89", facts.E4M3, "unit", "full", ""),
        ("sm89", PAIR, "row_pow2", "full", ""),
        ("sm89", facts.E4M3, "mx", "emulated", "sm100"),
        ("sm90", facts.E5M2, "tensor", "emulated", "no two float8_e5m2"),
        ("sm90", PAIR, "tensor_pow2", "full", ""),
        ("sm90", f"{facts.E4M3} x {facts.E5M2}", "tensor", "full", ""),
        ("sm90", f"{facts.E4M3} x {facts.E5M2}", "row", "emulated", "second operand"),
        ("sm90", PAIR, BLOCKS, "full", ""),
        ("sm90", facts.E4M3, "block1x128_pow2", "full", ""),
        ("sm90", facts.E4M3, "block128x128", "emulated", "with 1x128 ones only"),
        ("sm100", facts.E4M3, "block1x128", "emulated", "sm90"),
        ("sm100", PAIR, "mx_pow2", "full", ""),
        ("sm103", facts.E4M3, "mx", "full", ""),
        ("sm120", facts.E4M3, "row", "emulated", "pytorch/pytorch#192707"),
        ("sm120", facts.E4M3, "mx", "full", ""),
    ],
)
def test_products(architecture: str, formats: str, scaling: str, level: str, why: str) -> None:
    found = cell(architecture, formats, scaling)
    assert (found.level, why in found.reason) == (level, True)


def test_blocks_and_mx_need_their_cuda_and_torch() -> None:
    for version, level in (("12.8", "emulated"), ("12.9", "full"), ("13.0", "full")):
        assert cell("sm90", facts.E4M3, BLOCKS, {**LIBRARY, "cuda": version}).level == level
    for version, level in (("2.9.1", "emulated"), ("2.10.0", "full")):
        assert cell("sm90", facts.E4M3, BLOCKS, {**LIBRARY, "torch": version}).level == level
    for version, level in (("12.6", "emulated"), ("12.8", "full")):
        assert cell("sm100", facts.E4M3, "mx", {**LIBRARY, "cuda": version}).level == level
    assert "an unknown one" in cell("sm90", facts.E4M3, BLOCKS, {"torch": "2.13.0"}).reason


@pytest.mark.parametrize(
    ("architecture", "formats", "scaling", "library"),
    [
        ("sm89", facts.E4M3, BLOCKS, "on sm90 only"),
        ("sm90", facts.E5M2, "tensor", "no two float8_e5m2"),
        ("sm90", f"{facts.E4M3} x {facts.E5M2}", "row_pow2", "second operand"),
        ("sm90", facts.E4M3, "block128x128", "with 1x128 ones only"),
        ("sm100", PAIR, BLOCKS, "on sm90 only"),
        ("sm103", facts.E4M3, "block1x128_pow2", "on sm90 only"),
        ("sm120", facts.E4M3, "row", "pytorch/pytorch#192707"),
        ("sm120", facts.E4M3, "mx", ""),
    ],
)
def test_what_the_library_lacks_is_served_by_a_kernel(
    architecture: str, formats: str, scaling: str, library: str
) -> None:
    """Compiled for these chips ahead of time (tests/kernels), not run on them."""
    found = cell(architecture, formats, scaling, NOW)
    assert found.level == "full"
    assert library in found.reason
    assert ("served by a kernel of accelbridge" in found.reason) == bool(library)
    backend = CudaBackend()
    backend.host = Probe(True, "", (DeviceInfo(0, chip(architecture)),), NOW)
    own = {each.name: each for each in backend.implementations() if each.op == "scaled_mm"}
    request = Request("scaled_mm", formats, variant=scaling)
    assert own["triton"].supports(request)
    assert bool(own["torch_scaled_mm"].supports(request)) != bool(library)


@pytest.mark.parametrize(
    ("architecture", "scaling", "why"),
    [("sm80", "tensor", "it has no 8-bit floats"), ("sm90", "mx", "that begins with sm100")],
)
def test_what_no_kernel_serves_is_emulated_and_says_why(architecture: str, scaling: str, why: str) -> None:
    found = cell(architecture, facts.E4M3, scaling, NOW)
    assert (found.level, why in found.reason) == ("emulated", True)
    assert found.reason.endswith("widened to float32 and multiplied there")


def test_a_kernel_needs_its_triton() -> None:
    for triton, why in (({}, "triton is not installed"), ({"triton": "3.3.1"}, "triton 3.3.1 is older than 3.4")):
        found = cell("sm100", facts.E4M3, BLOCKS, {**LIBRARY, **triton})
        assert (found.level, why in found.reason) == ("emulated", True)


def _multiple_of_k(formats: str, torch: str) -> int:
    found = cell("sm90", formats, BLOCKS, {**NOW, "torch": torch})
    return {limit.dim: limit.multiple for limit in found.limits}["k"]


def test_limits_are_those_of_the_call_that_serves_the_pair() -> None:
    """The private call, which serves mixed pairs, pads no 128x128 scales."""
    assert _multiple_of_k(facts.E4M3, "2.13.0+cu130") == 128
    assert _multiple_of_k(PAIR, "2.13.0") == 512


@pytest.mark.parametrize(("architecture", "cuda", "dtypes"), [
    ("sm90", "13.0", ("bfloat16", "float32")), ("sm90", "12.8", ("bfloat16",)), ("sm100", "13.0", ("bfloat16",)),
])  # fmt: skip
def test_dtypes_that_row_scales_give(architecture: str, cuda: str, dtypes: tuple[str, ...]) -> None:
    assert facts.outputs(architecture, {**NOW, "cuda": cuda})["row"] == dtypes


# ---------------------------------------------------------------------------------------------------- attention


def named(architecture: str, software: Mapping[str, str] = NOW) -> dict[str, Implementation]:
    return {each.name: each for each in attention.candidates(architecture, software)}


@pytest.mark.parametrize(
    ("architecture", "cudnn", "first"),
    [
        ("sm80", "9.20", "flash"),
        ("sm89", "9.20", "flash"),
        ("sm90", "9.20.0.48", "cudnn"),
        ("sm90", "9.15.1.9", "cudnn"),
        ("sm90", "9.15.0", "flash"),
        ("sm90", "9.10.2.21", "flash"),
        ("sm100", "9.26", "cudnn"),
        ("sm120", "9.26", "flash"),
    ],
)
def test_the_order_is_torchs(architecture: str, cudnn: str, first: str) -> None:
    assert next(iter(named(architecture, {**NOW, "cudnn": cudnn}))) == first


def test_without_a_known_cudnn_it_neither_comes_first_nor_serves() -> None:
    found = named("sm90", {"torch": "2.13.0"})
    assert next(iter(found)) == "flash"
    assert "needs cuDNN 9 or later" in found["cudnn"].supports(CAUSAL).reason


@pytest.mark.parametrize(
    ("name", "request_", "why"),
    [
        ("cudnn", CAUSAL, ""),
        ("cudnn", WINDOW, ""),
        ("cudnn", replace(CAUSAL, dtype="float32"), "not float32"),
        ("cudnn", replace(CAUSAL, shape={**HEADS, "head_dim": 192}), "heads up to 128"),
        ("cudnn", replace(CAUSAL, shape={**HEADS, "sequence": 1}), "from 2 on"),
        ("cudnn", replace(WINDOW, shape={**HEADS, "sequence": 4160}), "pytorch/pytorch#196678"),
        ("cudnn", replace(CAUSAL, shape={**HEADS, "sequence": 4160}), ""),
        ("flash", CAUSAL, ""),
        ("flash", WINDOW, "mask"),
        ("flash", replace(CAUSAL, shape={**HEADS, "head_dim": 256}), ""),
        ("flash", replace(CAUSAL, shape={**HEADS, "head_dim": 264}), "heads up to 256"),
        ("efficient", WINDOW, ""),
        ("efficient", replace(WINDOW, dtype="float32"), ""),
        ("efficient", replace(WINDOW, dtype="float64"), "not float64"),
        ("fa3", CAUSAL, "not installed"),
        ("fa4", CAUSAL, "not installed"),
    ],
)
def test_what_a_candidate_serves_on_sm90(name: str, request_: Request, why: str) -> None:
    found = named("sm90")[name].supports(request_)
    assert bool(found) is (why == "")
    assert why in found.reason


def test_flash_has_no_backward_pass_for_some_heads_on_some_architectures() -> None:
    asked = replace(CAUSAL, shape={**HEADS, "head_dim": 208})
    assert not named("sm89")["flash"].supports(asked)
    assert named("sm90")["flash"].supports(asked)


def test_few_heads_are_refused_on_sm100_alone() -> None:
    few = replace(CAUSAL, shape={**HEADS, "kv_heads": 4})
    assert "pytorch/pytorch#193893" in named("sm100")["cudnn"].supports(few).reason
    assert named("sm100", {**NOW, "cudnn": "9.25.1.4"})["cudnn"].supports(few)
    assert named("sm90")["cudnn"].supports(few)


@pytest.mark.parametrize(("name", "architecture", "label"), [("fa3", "sm90", "FA3"), ("fa4", "sm100", "FA4")])
def test_flash_of_ones_own_is_put_in_place_when_it_is_bound(
    monkeypatch: pytest.MonkeyPatch, name: str, architecture: str, label: str
) -> None:
    torch_attention = pytest.importorskip("torch.nn.attention")
    activated: list[str] = []
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(attention, "_installed", lambda module: True)
    found = named(architecture)[name]
    assert found.supports(CAUSAL)
    assert activated == []
    found.load()
    assert activated == [label]
    assert f"{label} is not written for sm80" in named("sm80")[name].supports(CAUSAL).reason


def test_fp8_layers_of_other_packages_say_why_they_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _h100()
    found = {each.name: each for each in backend.implementations() if each.op == "scaled_mm"}
    assert list(found) == ["torch_scaled_mm", "triton", "transformer_engine", "torchao"]
    request = Request("scaled_mm", facts.E4M3, variant="tensor")
    assert found["torch_scaled_mm"].supports(request)
    assert found["torch_scaled_mm"].load() == backend.matmul.scaled_mm
    assert found["torchao"].supports(request).reason == "it is not installed"
    module = ModuleType("torchao")
    module.__spec__ = ModuleSpec("torchao", None)
    monkeypatch.setitem(sys.modules, "torchao", module)
    assert "torch._scaled_mm" in found["torchao"].supports(request).reason


def _h100() -> CudaBackend:
    backend = CudaBackend()
    backend.host = CudaBackend.assume("h100", 8, {})
    return backend


# -------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.issue)
def test_a_rule_is_whole(rule) -> None:
    assert rule.what
    assert rule.reported <= rule.read
    assert "#" in rule.issue
    assert set(rule.architectures) <= set(facts.ARCHITECTURES)
    names = set(named("sm90")) | {"torch_scaled_mm"}
    assert set(rule.implementations) <= names
    assert set(rule.software) <= {"torch", "cuda", "cudnn", "nccl"}


# ----------------------------------------------------------------------------------------------------- assuming


def test_an_assumed_host_has_the_software_of_its_torch() -> None:
    found = CudaBackend.assume("h100", 8, {})
    assert len(found.devices) == 8
    assert found.software["torch"].count("+") == 0
    assert CudaBackend.assume("h100", 1, {"torch": "2.9.1"}).software == {"torch": "2.9.1", **facts._USUAL["2.9"]}
    assert CudaBackend.assume("h100", 1, {"cuda": "12.8"}).software["cuda"] == "12.8"
    assert CudaBackend.assume("h100", 1, {"torch": "3.7"}).software == {"torch": "3.7"}  # nothing is made up


def test_an_assumed_version_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match='software "torhc" asked of backend "cuda"'):
        CudaBackend.assume("h100", 1, {"torhc": "2.9"})
    with pytest.raises(ConfigError, match='torch "new" asked; that is no version'):
        CudaBackend.assume("h100", 1, {"torch": "new"})


def test_facts_and_predicates_load_no_torch() -> None:
    code = (
        "import sys; from accelbridge_cuda.backend import CudaBackend; backend = CudaBackend(); "
        "backend.host = CudaBackend.assume('h100', 1, {}); "
        "found = [each.supports for each in backend.implementations()]; assert len(found) > 6; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
