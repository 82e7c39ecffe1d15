"""``explain --assume`` against ``tests/data/plans``: what each chip's plan must say, written before the code, with the
source of each fact. Nothing here ran on such a chip."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from accelbridge.assume import Assumption
from accelbridge.backend import World
from accelbridge.cli.explain import explain_text
from accelbridge.errors import AccelbridgeError, Unsupported
from accelbridge.plan import ExecutionPlan
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import choose_target, prepare

PLANS = Path(__file__).parent / "data" / "plans"
CHIPS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(PLANS.glob("*.json"))}
TORCH = "2.13.0"
"""Whose usual software the files are about, whatever torch is installed here."""
RECIPE = """
model: {vocab_size: 32000, dim: 4096, layers: 2, heads: 32, kv_heads: 8}
train: {seq_len: 4096, global_batch_size: 8, steps: 1}
precision: {compute: bfloat16}
data: {document_mask: false}
output: {dir: unused}
"""


def plan_of(folder: Path, chip: str, *asked: str, assume: dict[str, str] | None = None) -> ExecutionPlan:
    """The plan of a decoder on one assumed ``chip``, with settings ``asked`` as after ``--set``."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    config = TrainConfig.load(recipe, asked)
    target = choose_target(config, assumed=Assumption(chip, 1, {"torch": TORCH, **(assume or {})}))
    return prepare(config, World(), target=target, writes=False).plan


def settings(ask: dict[str, Any], *more: str) -> list[str]:
    return [*(f"{key}={json.dumps(value)}" for key, value in ask.items()), *more]


def check(plan: ExecutionPlan, cell: dict[str, Any], wanted: dict[str, Any]) -> None:
    row = next(choice for choice in plan.ops if choice.op == cell["op"])
    assert (row.implementation, row.support) == (wanted["choice"], wanted["support"])
    assert row.evidence == "claimed"  # nothing ran
    rejected = {each.implementation: each.reason for each in row.rejected}
    for name, part in wanted["rejected"].items():
        assert part in rejected[name]
    if "formats" in wanted:
        assert row.dtypes["operands"] == wanted["formats"]


CELLS = [pytest.param(name, cell, id=f"{name}: {cell['what']}") for name in CHIPS for cell in CHIPS[name]["cells"]]


@pytest.mark.parametrize(("name", "cell"), CELLS)
def test_a_cell_is_met(tmp_path: Path, name: str, cell: dict[str, Any]) -> None:
    ask, assume = cell["ask"], cell.get("assume")
    if "error" not in cell:
        plan = plan_of(tmp_path, name, *settings(ask), assume=assume)
        assert (plan.backend, plan.selected_by) == (CHIPS[name]["backend"], "assumed")
        check(plan, cell, cell)
        return
    with pytest.raises(Unsupported) as caught:
        plan_of(tmp_path, name, *settings(ask), assume=assume)
    assert cell["error"] in str(caught.value)
    assert "; set " in str(caught.value)  # what to do about it
    if "with_fallback" not in cell:
        with pytest.raises(Unsupported):
            plan_of(tmp_path, name, *settings(ask, "backend.on_unsupported=fallback"), assume=assume)
    else:
        plan = plan_of(tmp_path, name, *settings(ask, "backend.on_unsupported=fallback"), assume=assume)
        check(plan, cell, cell["with_fallback"])
        assert any(note.startswith("FALLBACK: fp8 asked") for note in plan.notes)


def lacks(cell: dict[str, Any]) -> bool:
    """Whether there is not even something to fall back to."""
    return "error" in cell and "with_fallback" not in cell


def cell_of(name: str, what: str) -> dict[str, Any]:
    return next(cell for cell in CHIPS[name]["cells"] if cell["what"] == what)


# Each of the issue's axes, crossed: what a cell says of one axis holds whatever the other is.
PRECISIONS = ("bfloat16 product", "fp8 tensor", "fp8 row", "fp8 block", "fp8 mx")
MASKS = ("causal attention", "windowed attention", "varlen attention")
CROSSED = [
    pytest.param(name, precision, mask, id=f"{name}: {precision}, {mask}")
    for name, precision, mask in product(CHIPS, PRECISIONS, MASKS)
    if not lacks(cell_of(name, precision))
]


@pytest.mark.parametrize(("name", "precision", "mask"), CROSSED)
def test_precision_and_mask_are_met_together(tmp_path: Path, name: str, precision: str, mask: str) -> None:
    first, second = cell_of(name, precision), cell_of(name, mask)
    asked = settings({**first["ask"], **second["ask"]}, "backend.on_unsupported=fallback")
    plan = plan_of(tmp_path, name, *asked)
    check(plan, first, first.get("with_fallback", first))
    check(plan, second, second)


def test_every_chip_of_the_issue_has_its_cells() -> None:
    assert set(CHIPS) >= {"a100", "h100", "b200", "mi250x", "mi300x", "mi355x", "trn2", "trn3"}
    for name, what in product(CHIPS, (*PRECISIONS, *MASKS)):
        assert cell_of(name, what)["source"]


@pytest.mark.parametrize("chip", ["mi325x", "h200", "rtxpro6000"])
def test_the_text_says_that_it_is_assumed(tmp_path: Path, chip: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    text = explain_text(recipe, [], None, None, False, [f"chip={chip}"])
    assert "assumed" in text
    found = json.loads(explain_text(recipe, [], None, None, True, [f"chip={chip}", "devices=8"]))
    assert found["selected_by"] == "assumed"
    assert found["contract"]["world_size"] == 8


@pytest.mark.parametrize(("chip", "architecture"), [("a100", "sm80"), ("mi250x", "gfx90a")])
def test_fp8_on_a_chip_without_it_says_what_to_set(tmp_path: Path, chip: str, architecture: str) -> None:
    with pytest.raises(Unsupported, match=f"{architecture} has no fp8 products") as caught:
        plan_of(tmp_path, chip, "precision.compute=fp8")
    assert "set backend.on_unsupported: fallback" in str(caught.value)
    assert "precision.compute: bfloat16" in str(caught.value)


def test_another_vendors_backend_does_not_know_the_chip(tmp_path: Path) -> None:
    with pytest.raises(AccelbridgeError, match='chip "h100" asked of backend "rocm"'):
        plan_of(tmp_path, "h100", "backend.name=rocm")


def test_a_deterministic_run_gets_no_kernel_that_is_not(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "h100", "train.deterministic=true")
    row = next(choice for choice in plan.ops if choice.op == "attention")
    assert row.implementation == "flash"
    assert {each.implementation: each.reason for each in row.rejected}["cudnn"].startswith("it is not deterministic")


def test_a_known_defect_is_lifted_by_its_version(tmp_path: Path) -> None:
    asked = ["model.window=1024", "train.seq_len=4160"]
    for cudnn, chosen in (("9.25.1.4", "efficient"), ("9.26.0.51", "cudnn")):
        plan = plan_of(tmp_path, "h100", *asked, assume={"cudnn": cudnn})
        assert next(choice for choice in plan.ops if choice.op == "attention").implementation == chosen


def test_what_is_asked_for_and_cannot_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"backend.ops.attention fa3 asked.*not written for sm80"):
        plan_of(tmp_path, "a100", "backend.ops.attention=fa3")
    with pytest.raises(Unsupported, match="takes no mask tensor"):
        plan_of(tmp_path, "mi300x", "backend.ops.attention=flash", "model.window=128")


@pytest.mark.parametrize("chip", [name for name in CHIPS if CHIPS[name]["backend"] in ("cuda", "rocm")])
def test_our_own_attention_serves_where_it_is_asked_for_too(tmp_path: Path, chip: str) -> None:
    asked = ["backend.ops.attention=triton", "model.window=1024", "data.document_mask=true", "train.deterministic=true"]
    plan = plan_of(tmp_path, chip, *asked)
    assert next(choice for choice in plan.ops if choice.op == "attention").implementation == "triton"
    with pytest.raises(Unsupported, match=r"backend.ops.attention triton asked.*a multiple of 8, not 100"):
        plan_of(tmp_path, chip, "backend.ops.attention=triton", "model.head_dim=100")
