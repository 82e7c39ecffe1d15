"""``accelbridge estimate``: arithmetic against shapes, the search for what compiles, and what bad input ends in."""

from __future__ import annotations

import json
import pickle
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelbridge.backend import Compiled, CompileTimeout, Traffic, World
from accelbridge.cli.estimate import estimate_text
from accelbridge.cpu.backend import CpuBackend
from accelbridge.data.loader import PackedSamples
from accelbridge.data.store import TokenStore
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.estimate import ahead
from accelbridge.estimate.arithmetic import state_bytes
from accelbridge.estimate.step import OneStep, _Absent, batches
from accelbridge.estimate.targets import AbsentMachine
from accelbridge.memory.use import held
from accelbridge.models.decoder import Decoder
from accelbridge.parallel.layout import Layout
from accelbridge.portable.execution import EagerExecution
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import choose_target, prepare

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "recipes" / "demo.yaml"
SIZES = {"vocab_size": 96, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64}


def config(**sections: Any) -> TrainConfig:
    base = {"model": SIZES, "train": {"global_batch_size": 4, "microbatch_size": 2, "seq_len": 16, "steps": 4}}
    return TrainConfig.of({**base, "optimizer": {"warmup_steps": 1}, **sections})


def estimate(recipe: Path = DEMO, *overrides: str, assume: tuple[str, ...] = (), **options: Any) -> str:
    given = {"nproc": None, "backend": None, "compile_for": None, "seconds": 1.0, "layers": "auto", "as_json": False}
    return estimate_text(recipe, overrides, assumed=assume, **{**given, **options})


@pytest.mark.parametrize("document_mask", [True, False])
def test_a_step_that_is_compiled_has_batches_like_the_loaders(store: Path, document_mask: bool) -> None:
    asked = config(data={"document_mask": document_mask})
    made = batches(prepare(asked, World(), writes=False), 1)[0]
    sample = PackedSamples(TokenStore(store / "train"), asked.train.seq_len, document_mask)[0]
    assert made.pop("sample_ids").shape == (2,)
    assert {name: (t.shape[1:], t.dtype) for name, t in made.items()} == {
        n: (t.shape, t.dtype) for n, t in sample.items()
    }


# ---------------------------------------------------------------------------------------------------- arithmetic


def test_one_device_holds_what_torch_holds() -> None:
    model = Decoder(config().model)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())
    assert state_bytes(config(), Layout(), parts_at_rest=True) == held(model, optimizer)


@pytest.mark.parametrize(
    ("layout", "at_rest", "split"),
    [
        (Layout(dp_shard=4), True, {"parameters": 4, "gradients": 4, "optimizer": 4}),
        (Layout(dp_shard=4, zero=1), True, {"parameters": 4, "gradients": 4, "optimizer": 4}),
        (Layout(dp_shard=4, zero=2), False, {"parameters": 1, "gradients": 4, "optimizer": 4}),
        (Layout(dp_shard=4, zero=1), False, {"parameters": 1, "gradients": 1, "optimizer": 4}),
        (Layout(dp_replicate=4), True, {"parameters": 1, "gradients": 1, "optimizer": 1}),
    ],
)
def test_zero_stages_share_out_what_they_say(layout: Layout, at_rest: bool, split: dict[str, int]) -> None:
    whole = state_bytes(config(), Layout(), parts_at_rest=True)
    found = state_bytes(config(), layout, parts_at_rest=at_rest)
    assert found == {kind: size // split[kind] for kind, size in whole.items()}  # all sizes divide


def test_tensor_parallelism_leaves_norms_whole() -> None:
    whole = state_bytes(config(), Layout(), parts_at_rest=True)["parameters"]
    norms = 4 * 32 * (2 * 2 + 1)
    assert state_bytes(config(), Layout(tp=2), parts_at_rest=True)["parameters"] == (whole - norms) // 2 + norms


def test_frozen_parameters_have_no_state() -> None:
    frozen = config(optimizer={"warmup_steps": 1, "groups": [{"pattern": "embed.*", "frozen": True}]})
    whole = state_bytes(config(), Layout(), parts_at_rest=True)
    found = state_bytes(frozen, Layout(), parts_at_rest=True)
    embed = 4 * 96 * 32
    assert found == {
        "parameters": whole["parameters"],
        "gradients": whole["gradients"] - embed,
        "optimizer": whole["optimizer"] - 2 * embed,
    }


def test_a_laptop_says_what_a_large_host_would_need() -> None:
    large = ROOT / "recipes" / "llama3-8b.yaml"
    found = json.loads(estimate(large, assume=("chip=h200", "devices=8"), as_json=True))
    assert found["recipe"]["parameters"] == 8_030_261_248  # of the published checkpoint
    assert found["recipe"]["layout"] | {"dp_shard": 2, "tp": 4} == found["recipe"]["layout"]
    told = found["arithmetic"]
    assert told["evidence"] == "arithmetic, not run"
    assert told["capacity"] == 141e9
    assert told["memory"]["optimizer"] == pytest.approx(8.03e9 * 8 / 8, rel=1e-3)
    assert told["memory"]["total"] == sum(size for kind, size in told["memory"].items() if kind != "total")
    assert told["fits"] == (told["memory"]["total"] <= 141e9)


def test_what_does_not_fit_says_what_would_save_some() -> None:
    large = ROOT / "recipes" / "llama3-8b.yaml"
    text = estimate(large, "parallel.tp=1", "parallel.sequence_parallel=false", assume=("chip=h200", "devices=1"))
    assert re.search(r"^  fits +NO$", text, re.MULTILINE)
    assert "train.microbatch_size 16 -> 8: saves about" in text


def test_where_memory_is_unknown_nothing_is_said_to_fit() -> None:
    found = json.loads(estimate(nproc=2, backend="cpu", as_json=True))["arithmetic"]
    assert (found["capacity"], found["fits"]) == (None, None)
    assert "unknown: the device's memory is not known" in estimate(nproc=2, backend="cpu")


# ---------------------------------------------------------------------------------------- what is compiled ahead


def made(layers: int, *, fits: bool = True) -> Compiled:
    """As a compiler might find it: 10 bytes and 100 FLOPs outside the layers, 5 and 40 in each."""
    memory = {"parameters": 10 + 5 * layers, "total": 10 + 5 * layers}
    traffic = (Traffic("all_gather", 1 + 3 * layers, 100 * layers),)
    return Compiled("chip", 4, fits, memory, 1000, 100.0 + 40 * layers, traffic, {"c": "1"}, {"compiling": 2.0})


class Compiler:
    """Takes ``layers`` at most in time."""

    def __init__(self, most: int, fits: bool = True) -> None:
        self.most, self.fits, self.asked = most, fits, []

    def __call__(self, layers: int, seconds: float) -> Compiled:
        self.asked.append((layers, seconds))
        if layers > self.most:
            raise CompileTimeout("compiling the step did not finish within the limit")
        return made(layers, fits=self.fits)


def test_what_compiles_whole_is_not_derived() -> None:
    compiler = Compiler(32)
    found = ahead.search(compiler, 32, 100.0, "auto")
    assert (found.compiled, found.layers, found.derived) == (made(32), 32, "")
    assert compiler.asked == [(32, 50.0)]


def test_what_takes_too_long_is_derived_and_says_so() -> None:
    compiler = Compiler(2)
    found = ahead.search(compiler, 32, 100.0, "auto")
    assert found.compiled.memory == made(32).memory
    assert found.compiled.flops == made(32).flops
    assert found.compiled.collectives == made(32).collectives
    assert "all 32 layers did not compile within 50 s; derived from 1 and 2 of 32 layers" in found.derived
    assert "temporaries of many layers can be half as much again" in found.derived
    assert found.parts == {1: made(1), 2: made(2)}
    assert sum(seconds for _, seconds in compiler.asked[1:2]) <= 100.0


def test_what_is_derived_adds_up_and_says_of_what_its_notes_are() -> None:
    one = replace(made(1), memory={"code": 3, "padding": 2, "total": 5}, notes=("slow",), host_bytes=9)
    two = replace(made(2), memory={"code": 4, "batch": 1, "total": 5}, notes=("slow", "odd"), host_bytes=7)
    found = ahead.extrapolate(one, two, 5)
    assert found.memory == {"code": 7, "padding": 0, "batch": 4, "total": 11}
    assert found.notes == ("of 1 layer: slow", "of 2 layers: slow", "of 2 layers: odd")
    assert found.host_bytes == 9


def test_derived_figures_that_exceed_the_device_do_not_fit() -> None:
    found = ahead.search(Compiler(2), 200, 100.0, "few")
    assert found.compiled.memory["total"] == 1010
    assert not found.compiled.fits


def test_a_derived_step_that_just_fits_says_so() -> None:
    def told(capacity: int) -> tuple[bool, tuple[str, ...]]:
        one, two = (replace(made(n), memory={"temporaries": 5 * n, "total": 5 * n}, capacity=capacity) for n in (1, 2))
        found = ahead.extrapolate(one, two, 10)
        return found.fits, found.notes

    assert told(75) == (True, ())
    assert told(74) == told(50) == (True, ("it fits by less than that: only --layers whole can tell",))
    assert told(49) == (False, ())


def test_nothing_is_derived_from_what_does_not_fit() -> None:
    found = ahead.search(Compiler(2, fits=False), 32, 100.0, "few")
    assert (found.layers, found.compiled) == (1, made(1, fits=False))
    assert "even these do not fit" in found.derived


@pytest.mark.parametrize(("most", "largest"), [(0, "none compiled"), (1, "the largest that compiled has 1 layer")])
def test_the_largest_that_compiled_is_said(most: int, largest: str) -> None:
    with pytest.raises(Unsupported, match=f"{largest}; allow more with --seconds"):
        ahead.search(Compiler(most), 32, 100.0, "few")


def test_a_limit_on_the_whole_is_an_error_with_a_way_out() -> None:
    with pytest.raises(Unsupported, match="did not finish within the limit; allow more with --seconds, or take --lay"):
        ahead.search(Compiler(2), 32, 1.0, "whole")


# ------------------------------------------------------------------------------------------------------- the step


class Watched(EagerExecution):
    """The CPU's execution with a store of its own, which notes what it is asked for."""

    calls: list[str]

    def start(self, store: Any, *rest: Any, **named: Any) -> None:
        self.calls = ["start"]
        super().start(dist.HashStore(), *rest, **named)

    def realise(self, model: Any, *rest: Any, **named: Any) -> Any:
        assert all(p.is_meta for p in model.parameters()), "no memory may be taken"
        self.calls.append("realise")
        self.model_before = super().realise(model, *rest, **named)
        self.before = {name: p.detach().clone() for name, p in self.model_before.named_parameters()}
        return self.model_before

    def microbatch(self, model: Any, index: int, count: int) -> Any:
        self.calls.append(f"microbatch {index} of {count}")
        return super().microbatch(model, index, count)

    def end_step(self, values: Any = None) -> Any:
        self.calls.append("end_step")
        self.values = values
        return super().end_step(values)

    def close(self) -> None:
        self.after = {name: p.detach().clone() for name, p in self.model_before.named_parameters()}
        super().close()


def test_the_step_is_the_trainers_own() -> None:
    asked = config()
    prepared = prepare(asked, World(), target=choose_target(asked, "cpu"), writes=False)
    backend = CpuBackend()
    execution = Watched(backend.device, backend.collectives)
    _Absent(prepared).run(execution)
    execution.close()
    assert execution.calls == ["start", "realise", "end_step", "microbatch 0 of 2", "microbatch 1 of 2", "end_step"]
    assert {"loss", "lr", "grad_norm", "tokens"} <= execution.values.keys()
    assert execution.before.keys() == execution.after.keys()
    decayed = [name for name, p in execution.before.items() if p.dim() > 1]
    assert all(not torch.equal(execution.before[name], execution.after[name]) for name in decayed)


def test_a_step_goes_to_another_process() -> None:
    step = OneStep(config().model_dump(mode="json", exclude_unset=True), "word:chip:4x4", 1)
    assert pickle.loads(pickle.dumps(step)) == step
    assert TrainConfig.of(step.recipe) == config()


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("text", ["", "word", "word:chip", "word::4x4", "a:b:c:d"])
def test_a_target_has_three_parts(text: str) -> None:
    with pytest.raises(ConfigError, match="asked; write WORD:CHIP:TOPOLOGY"):
        AbsentMachine.parse(text)


def test_a_word_that_nobody_claims_lists_those_known() -> None:
    with pytest.raises(ConfigError, match=r'no installed backend knows "cpus"; did you mean "cpu"\?; known are .*cpu'):
        estimate(compile_for="cpus:x:4x4")


def test_a_backend_without_a_compiler_says_so() -> None:
    with pytest.raises(Unsupported, match="backend cpu compiles for no machine that is not here; leave --compile-for"):
        estimate(compile_for="cpu:x:4x4")
    refused = CpuBackend().execution.compile_ahead("cpu:x:1", lambda _: None)
    assert not refused
    assert "eager execution compiles no whole step" in refused.reason  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{"nproc": 2}, {"backend": "cpu"}, {"assume": ("chip=h200",)}])
def test_a_target_names_the_whole_machine(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the target names the whole machine; leave the others out"):
        estimate(compile_for="cpu:x:4x4", **options)


def test_a_recipe_without_a_model_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "empty.yaml"
    recipe.write_text("train:\n  steps: 3000\n")
    with pytest.raises(ConfigError, match=r"model is missing from .*empty\.yaml"):
        estimate(recipe, backend="cpu")


def test_a_mode_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match="--layers some asked; write one of auto, whole, few"):
        estimate(layers="some")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0])
def test_a_limit_is_a_number_above_zero(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"--seconds .* asked; give a number above 0"):
        estimate(seconds=seconds)


def test_an_estimate_takes_no_memory_for_weights() -> None:
    began = time.monotonic()
    text = estimate(ROOT / "recipes" / "llama3-8b.yaml", assume=("chip=h200", "devices=64"))
    assert "8.03 billion parameters, dp_shard 16 x tp 4, ZeRO 3, sequence parallel on 64 x" in text
    assert time.monotonic() - began < 60
