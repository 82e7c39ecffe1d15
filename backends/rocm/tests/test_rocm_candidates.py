"""Tables, predicates and rules of the ROCm backend: no GPU, no sysfs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from accelbridge.backend import Implementation, Mask, Request
from accelbridge.errors import BackendError, ConfigError, Unsupported
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.scalings import SCALINGS
from accelbridge_rocm import attention, facts
from accelbridge_rocm.backend import RocmBackend
from accelbridge_rocm.rules import RULES

NOW = {"torch": "2.13.0", "rocm": "7.2"}
HEADS = {"head_dim": 128, "heads": 32, "kv_heads": 8, "sequence": 4096}
CAUSAL = Request("attention", "bfloat16", HEADS, needs=frozenset({"causal", "gqa"}))
WINDOW = replace(CAUSAL, needs=CAUSAL.needs | {"window"})


def cell(architecture: str, formats: str, scaling: str, software: Mapping[str, str] = NOW):
    return facts.capabilities(f"Some GPU ({architecture})", software).support("scaled_mm", formats, scaling)


# -------------------------------------------------------------------------------------------------------- table


@pytest.mark.parametrize("architecture", facts.ARCHITECTURES)
def test_every_key_is_made_of_known_names(architecture: str) -> None:
    table = facts.capabilities(f"Some GPU ({architecture})", NOW).table
    for op, dtype, variant in table:
        if op in ("quantize", "scaled_mm"):
            assert set(dtype.split(" x ")) <= set(FORMATS)
            assert set(variant.split(" x ")) <= set(SCALINGS)
            assert table[op, dtype, variant].level in ("full", "emulated")
    for key, support in table.items():
        assert support or support.reason, key


def test_capabilities_are_a_pure_function() -> None:
    software = dict(NOW)
    first, second = (facts.capabilities(facts.CHIPS["mi300x"], software) for _ in range(2))
    assert first == second
    assert software == NOW


def test_chips_are_called_by_their_product() -> None:
    assert set(facts.CHIPS) == {"mi210", "mi250x", "mi300a", "mi300x", "mi325x", "mi350x", "mi355x"}
    assert facts.CHIPS["mi355x"] == "AMD Instinct MI355X (gfx950)"
    for name in facts.CHIPS.values():
        assert facts.architecture_of(name) in facts.ARCHITECTURES


def test_an_unknown_architecture_claims_nothing_and_says_so() -> None:
    found = facts.capabilities("AMD Radeon PRO W7900 (gfx1100)", NOW)
    assert not any(found.table.values())
    assert "gfx1100 is not one of gfx90a" in found.support("linear", "bfloat16").reason


@pytest.mark.parametrize(("chip", "variant"), [("mi250x", "fn fnuz"), ("mi325x", "fnuz"), ("mi350x", "fn")])
def test_the_variant_is_the_architectures(chip: str, variant: str) -> None:
    assert facts.capabilities(facts.CHIPS[chip], NOW).facts["fp8.variant"] == variant


def test_matrix_instructions_of_gfx90a_flush_subnormal_numbers() -> None:
    assert facts.capabilities(facts.CHIPS["mi210"], NOW).subnormals == {"bfloat16": "flushed", "float16": "flushed"}
    assert facts.capabilities(facts.CHIPS["mi300a"], NOW).subnormals == {}


FNUZ, OCP = facts.FNUZ, facts.OCP


@pytest.mark.parametrize(
    ("architecture", "formats", "scaling", "level", "why"),
    [
        ("gfx90a", OCP[0], "tensor", "emulated", "gfx90a"),
        ("gfx90a", FNUZ[0], "tensor", "emulated", "gfx90a"),
        ("gfx942", FNUZ[0], "tensor", "full", ""),
        ("gfx942", FNUZ[1], "tensor_pow2", "full", ""),
        ("gfx942", f"{FNUZ[1]} x {FNUZ[0]}", "row", "full", ""),
        ("gfx942", f"{FNUZ[0]} x {FNUZ[1]}", "row", "emulated", "second operand"),
        ("gfx942", OCP[0], "tensor", "unsupported", "states no support"),
        ("gfx942", FNUZ[0], "block1x128 x block128x128", "emulated", "ROCm"),
        ("gfx942", FNUZ[0], "mx_pow2", "emulated", "gfx950"),
        ("gfx950", OCP[0], "mx_pow2", "full", ""),
        ("gfx950", f"{OCP[1]} x {OCP[0]}", "mx", "full", ""),
        ("gfx950", FNUZ[0], "tensor", "unsupported", "states no support"),
    ],
)
def test_products(architecture: str, formats: str, scaling: str, level: str, why: str) -> None:
    found = cell(architecture, formats, scaling)
    assert (found.level, why in found.reason) == (level, True)


@pytest.mark.parametrize(
    ("rocm", "tensor", "mx"),
    [("6.4", "emulated", "emulated"), ("6.5", "full", "emulated"), ("7.0", "full", "full"),
     ("7.13.60800", "full", "full"), ("7.14.0", "full", "emulated")],
)  # fmt: skip
def test_products_of_gfx950_by_rocm(rocm: str, tensor: str, mx: str) -> None:
    software = {**NOW, "rocm": rocm}
    assert (cell("gfx950", OCP[0], "tensor", software).level, cell("gfx950", OCP[0], "mx", software).level) == (
        tensor,
        mx,
    )
    assert "an unknown one" in cell("gfx950", OCP[0], "mx", {"torch": "2.13.0"}).reason


def test_what_8_bit_floats_may_move() -> None:
    found = facts.capabilities(facts.CHIPS["mi300x"], NOW)
    assert found.support("all_gather", FNUZ[0])
    assert "lowerings: [fp8_bytes]" in found.support("all_gather", OCP[0]).reason


# ---------------------------------------------------------------------------------------------------- attention


def named(architecture: str, software: Mapping[str, str] = NOW) -> dict[str, Implementation]:
    return {each.name: each for each in attention.candidates(architecture, software)}


@pytest.mark.parametrize(
    ("name", "request_", "why"),
    [
        ("flash", CAUSAL, ""),
        ("flash", WINDOW, "mask"),
        ("flash", replace(CAUSAL, shape={**HEADS, "head_dim": 512}), ""),
        ("flash", replace(CAUSAL, dtype="float32"), "not float32"),
        ("efficient", WINDOW, ""),
        ("efficient", replace(WINDOW, dtype="float32"), ""),
        ("efficient", replace(WINDOW, shape={**HEADS, "head_dim": 264}), "heads up to 256"),
        ("ck", CAUSAL, ""),
        ("aiter", CAUSAL, "not installed"),
    ],
)
@pytest.mark.parametrize("architecture", facts.ARCHITECTURES)
def test_what_a_candidate_serves(architecture: str, name: str, request_: Request, why: str) -> None:
    found = named(architecture)[name].supports(request_)
    if name == "aiter" and architecture == "gfx90a":
        why = "not written for gfx90a"
    assert bool(found) is (why == "")
    assert why in found.reason


def test_values_are_copied_on_gfx942_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(attention, "candidate", lambda kernel, *rest: seen.append(kernel.dense_values))
    for architecture, dense in (("gfx90a", False), ("gfx942", True), ("gfx950", False)):
        seen.clear()
        attention.candidates(architecture, NOW)
        assert seen == [dense] * 3


def test_older_torch_is_refused_by_its_rules() -> None:
    assert "pytorch/pytorch#138764" in named("gfx942", {"torch": "2.5.0"})["flash"].supports(CAUSAL).reason
    assert named("gfx950", {"torch": "2.5.0"})["flash"].supports(CAUSAL)
    assert "pytorch/pytorch#147460" in named("gfx90a", {"torch": "2.6.0"})["efficient"].supports(WINDOW).reason
    assert named("gfx90a", {"torch": "2.6.0"})["efficient"].supports(CAUSAL)


@pytest.mark.parametrize(
    ("architecture", "torch", "sure"),
    [("gfx942", "2.13.0", True), ("gfx942", "2.12.1", False), ("gfx950", "2.9.1", False), ("gfx90a", "2.9.1", True)],
)
def test_backward_passes_that_add_in_any_order_are_not_deterministic(architecture: str, torch: str, sure: bool) -> None:
    found = {each.name: each.deterministic for each in attention.candidates(architecture, {"torch": torch})}
    assert (found["flash"], found["efficient"]) == (sure, sure)


def test_ck_is_preferred_when_it_is_bound_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    asked: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_rocm_fa_library", asked.append)
    monkeypatch.setattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: False, raising=False)
    with pytest.raises(BackendError, match="built without it; choose flash"):
        named("gfx942")["ck"].load()
    assert asked == []
    monkeypatch.setattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: True, raising=False)
    named("gfx942")["ck"].load()
    assert asked == ["ck"]


class _Aiter(ModuleType):
    """aiter.flash_attn_func as its signature and documentation say, by the portable reference."""

    def __init__(self) -> None:
        super().__init__("aiter")
        self.__spec__ = ModuleSpec("aiter", None)
        self.shapes: list[tuple[int, ...]] = []

    def flash_attn_func(self, q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1, 0), deterministic=True):
        from accelbridge.ops.dot_product import attention as reference

        self.shapes.append(tuple(q.shape))
        left, right, _ = window_size
        assert (left, right) == (-1, -1) or right == 0
        mask = Mask(causal, None if left < 0 else left + 1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return reference(q, k, v, mask, scale=softmax_scale).transpose(1, 2)


@pytest.mark.parametrize("mask", [Mask(), Mask(window=3), Mask(causal=False)])
def test_aiter_is_called_as_it_documents(monkeypatch: pytest.MonkeyPatch, mask: Mask) -> None:
    import torch

    from accelbridge.ops.dot_product import attention as reference

    module = _Aiter()
    monkeypatch.setitem(sys.modules, "aiter", module)
    found = named("gfx950")["aiter"]
    assert found.supports(WINDOW)
    assert not found.supports(replace(CAUSAL, needs=frozenset({"segments"})))
    assert not found.supports(replace(CAUSAL, dtype="float32"))
    q, k, v = torch.randn(2, 4, 12, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)
    assert torch.equal(found.load()(q, k, v, mask, scale=0.5), reference(q, k, v, mask, scale=0.5))
    assert module.shapes == [(2, 12, 4, 16)]
    with pytest.raises(Unsupported, match="bind another"):
        found.load()(q, k, v, mask, return_lse=True)


# --------------------------------------------------------------------------------------------- rules, assuming


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.issue)
def test_a_rule_is_whole(rule) -> None:
    assert rule.what
    assert rule.reported <= rule.read
    assert set(rule.architectures) <= set(facts.ARCHITECTURES)
    assert set(rule.implementations) <= set(named("gfx942"))
    assert set(rule.software) <= {"torch", "rocm", "rccl"}


def test_an_assumed_host_has_the_software_of_its_torch() -> None:
    found = RocmBackend.assume("MI325X", 8, {"torch": "2.9.1"}).software
    assert found == {"torch": "2.9.1", "rocm": "6.4", "triton": "3.5.1"}
    assert RocmBackend.assume("mi325x", 1, {"rocm": "7.0"}).software["rocm"] == "7.0"


def test_products_are_candidates_as_far_as_the_chip_has_them() -> None:
    backend = RocmBackend()
    backend.host = RocmBackend.assume("mi300x", 1, {})
    found = {each.name: each for each in backend.implementations() if each.op == "scaled_mm"}
    assert list(found) == ["torch_scaled_mm", "triton", "transformer_engine", "torchao"]
    assert found["torch_scaled_mm"].supports(Request("scaled_mm", FNUZ[0], variant="row"))
    blocks = Request("scaled_mm", FNUZ[0], variant="block1x128")
    assert "ROCm" in found["torch_scaled_mm"].supports(blocks).reason
    assert found["triton"].supports(blocks)


@pytest.mark.parametrize(
    ("architecture", "formats", "scaling", "rocm", "library"),
    [
        ("gfx942", f"{FNUZ[0]} x {FNUZ[1]}", "row", "7.2", "second operand"),
        ("gfx942", FNUZ[0], "block1x128 x block128x128", "7.2", "not available on ROCm"),
        ("gfx950", f"{OCP[1]} x {OCP[0]}", "block1x128_pow2", "7.2", "not available on ROCm"),
        ("gfx950", OCP[0], "mx_pow2", "7.14", "whose order was not looked up"),
        ("gfx950", OCP[0], "tensor", "6.4", "need ROCm 6.5"),
    ],
)
def test_what_the_library_lacks_is_served_by_a_kernel(
    architecture: str, formats: str, scaling: str, rocm: str, library: str
) -> None:
    """Compiled for these chips ahead of time (tests/kernels), not run on them."""
    software = {**NOW, "rocm": rocm, "triton": "3.7.1"}
    found = cell(architecture, formats, scaling, software)
    assert (found.level, library in found.reason) == ("full", True)
    assert "served by a kernel of accelbridge" in found.reason
    operand = facts.capabilities(f"Some GPU ({architecture})", software).support(
        "quantize", formats.partition(" ")[0], "row"
    )
    assert operand.level == "full"


def test_what_no_kernel_serves_is_emulated_and_says_why() -> None:
    for architecture, scaling, why in (("gfx942", "mx", "begins with gfx950"), ("gfx90a", "row", "no 8-bit floats")):
        found = cell(architecture, FNUZ[0], scaling, {**NOW, "triton": "3.7.1"})
        assert (found.level, why in found.reason) == ("emulated", True)


def test_an_assumed_version_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match='software "cuda" asked of backend "rocm"'):
        RocmBackend.assume("mi300x", 1, {"cuda": "2.9"})
    with pytest.raises(ConfigError, match='torch "new" asked; that is no version'):
        RocmBackend.assume("mi300x", 1, {"torch": "new"})


def test_facts_and_predicates_load_no_torch() -> None:
    code = (
        "import sys; from accelbridge_rocm.backend import RocmBackend; backend = RocmBackend(); "
        "backend.host = RocmBackend.assume('mi300x', 1, {}); "
        "found = [each.supports for each in backend.implementations()]; assert len(found) > 6; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
