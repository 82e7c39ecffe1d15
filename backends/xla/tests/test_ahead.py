"""Steps compiled for TPUs that are not here: targets and HLO are read without any SDK, the rest takes torch_xla and an
environment with libtpu's compiler."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelbridge.backend import CompileTimeout, Traffic
from accelbridge.errors import BackendError, ConfigError
from accelbridge.estimate.step import OneStep
from accelbridge_xla import runtimes
from accelbridge_xla.ahead import compiling, hlo
from accelbridge_xla.ahead.products import flops, repeated_flops
from accelbridge_xla.ahead.targets import parse
from accelbridge_xla.ahead.traffic import traffic
from accelbridge_xla.backend import XlaBackend
from backends.xla.tests import environment

COMPILER = os.environ.get(compiling.COMPILER, "")
needs_compiler = pytest.mark.skipif(
    find_spec("torch_xla") is None or not (COMPILER or find_spec("libtpu")),
    reason=f"recording takes torch_xla, and compiling {compiling.COMPILER}; make test-xla makes both environments",
)


# ---------------------------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("chip", "topology", "count"),
    [("v5e", "4x4", 16), ("V6E", "16x16", 256), ("v5p", "4x4x4", 64), ("v5p", "2x2x1", 4)],
)
def test_a_topology_is_so_many_chips(chip: str, topology: str, count: int) -> None:
    target, found = parse(chip, topology)
    assert found == count
    probe = XlaBackend.absent(chip, topology)
    assert [device.chip for device in probe.devices] == [target.chip] * count
    assert {device.memory_bytes for device in probe.devices} == {target.memory_bytes}


@pytest.mark.parametrize(
    ("chip", "topology", "reason"),
    [
        ("v5", "4x4", 'chip "v5" is not one of v5e, v5p, v6e; did you mean'),
        ("v5p", "4x4", "slices of 3 dimensions"),
        ("v6e", "4x4x4", "slices of 2 dimensions"),
        ("v6e", "4x", 'and "4x" is not one; write it like 4x4'),
        ("v6e", "0x4", '"0x4" is not one'),
        ("v6e", "32x16", "512 chips; the largest slice of TPU v6e has 256"),
    ],
)
def test_targets_that_there_are_not(chip: str, topology: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(chip, topology)


# ------------------------------------------------------------------------------------------------------------ HLO

PROGRAM = """
HloModule step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%start.1 (p: f32[8,16]) -> f32[32,16] {
  %p = f32[8,16]{1,0:T(8,128)} parameter(0)
  ROOT %ag.1 = f32[32,16]{1,0:T(8,128)S(1)} all-gather(%p), channel_id=7, dimensions={0}
}

%middle.1 (p.1: f32[8,16]) -> f32[32,16] {
  %p.1 = f32[8,16]{1,0} parameter(0)
  ROOT %ag.2 = f32[32,16]{1,0} all-gather(%p.1), channel_id=7, dimensions={0}
}

%all-reduce-scatter.1 (p.2: f32[32,16]) -> f32[8,16] {
  %p.2 = f32[32,16]{1,0} parameter(0)
  %ar.1 = f32[32,16]{1,0} all-reduce(%p.2), channel_id=1, to_apply=%add
  ROOT %part = f32[8,16]{1,0} dynamic-slice(%ar.1), dynamic_slice_sizes={8,16}
}

%body (state: (s32[], bf16[4,128])) -> (s32[], bf16[4,128]) {
  %state = (s32[], bf16[4,128]{1,0}) parameter(0)
  %block = bf16[4,128]{1,0} get-tuple-element(%state), index=1
  %cp = (bf16[4,128]{1,0}, bf16[4,128]{1,0}, u32[], u32[]) collective-permute-start(%block), channel_id=3
  %cpd = bf16[4,128]{1,0} collective-permute-done(%cp)
  ROOT %next = (s32[], bf16[4,128]{1,0}) tuple(%state, %cpd)
}

%condition (state.1: (s32[], bf16[4,128])) -> pred[] {
  %state.1 = (s32[], bf16[4,128]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: f32[8,16], b: f32[32,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  %s = f32[32,16]{1,0} fusion(%a), kind=kCustom, calls=%start.1
  %m = f32[32,16]{1,0} fusion(%a), kind=kOutput, calls=%middle.1
  %loss = f32[] all-reduce(%x), channel_id=5, to_apply=%add
  %norm = f32[] all-reduce(%x), channel_id=6, to_apply=%add
  %loop = (s32[], bf16[4,128]{1,0}) while(%t), condition=%condition, body=%body, backend_config={TRIPS}
  ROOT %out = f32[8,16]{1,0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_collectives_are_counted_once_and_loops_as_often_as_they_run() -> None:
    program = hlo.read(PROGRAM.replace("{TRIPS}", '{"known_trip_count":{"n":"3"}}'))
    assert traffic(program) == (
        Traffic("all_gather", 1, 32 * 16 * 4),  # one channel in two fusions
        Traffic("all_reduce", 2, 8),
        Traffic("reduce_scatter", 1, 32 * 16 * 4),
        Traffic("permute", 3, 3 * 4 * 128 * 2),  # the largest part of what -start returns, not the sum
    )
    assert program.unknown_loops == 0


def test_a_loop_of_unknown_length_is_counted() -> None:
    program = hlo.read(PROGRAM.replace("{TRIPS}", "{}"))
    assert Traffic("permute", 1, 4 * 128 * 2) in traffic(program)
    assert program.unknown_loops == 1


def test_a_program_of_one_device_has_none() -> None:
    assert traffic(hlo.read("ENTRY %main (a: f32[2]) -> f32[2] {\n  ROOT %b = f32[2]{0} tanh(%a)\n}")) == ()


LOOP = """
%product (p: bf16[8,32], q: bf16[16,8]) -> f32[16,32] {
  %p = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  %q = bf16[16,8]{1,0} parameter(1)
  ROOT %convolution.1 = f32[16,32]{1,0} convolution(%q, %p), dim_labels=bf_io->bf
}

%body (state: (u32[], bf16[8,32], f32[16,32])) -> (u32[], bf16[8,32], f32[16,32]) {
  %state = (u32[], bf16[8,32]{1,0}, f32[16,32]{1,0}) parameter(0)
  %two.sunk = u32[] constant(2)
  %at = u32[]{:T(128)} get-tuple-element(%state), index=0
  %block = bf16[8,32]{1,0} get-tuple-element(%state), index=1
  %done = f32[16,32]{1,0} fusion(%block, %b), kind=kOutput, calls=%product
  %next = u32[]{:T(128)} add(%at, %two.sunk), backend_config={"aliasing_operands":{"lists":[{"indices":["0","2"]}]}}
  ROOT %made = (u32[], bf16[8,32]{1,0}, /*index=2*/f32[16,32]{1,0}) tuple(%next, %block, /*index=2*/%done)
}

%condition (state.1: (u32[], bf16[8,32], f32[16,32])) -> pred[] {
  %state.1 = (u32[], bf16[8,32]{1,0}, f32[16,32]{1,0}) parameter(0)
  %at.1 = u32[]{:T(128)} get-tuple-element(%state.1), index=0
  %end = u32[]{:T(128)} constant(7)
  ROOT %go = pred[]{:T(512)} compare(%at.1, %end), direction=LT, metadata={op_name="dot.1"}
}

ENTRY %main (a: bf16[8,32]) -> f32[16,32] {
  %a = bf16[8,32]{1,0} parameter(0)
  %zero = u32[]{:T(128)} constant(0)
  %start = u32[]{:T(128)} copy(%zero)
  %state.2 = (u32[], bf16[8,32]{1,0}, f32[16,32]{1,0}) tuple(%start, %a, /*index=2*/%sum)
  %loop = (u32[], bf16[8,32]{1,0}, f32[16,32]{1,0}) while(%state.2), condition=%condition, body=%body
  ROOT %out = f32[16,32]{1,0} get-tuple-element(%loop), index=2
}
"""


def test_a_loop_that_counts_has_its_length() -> None:
    program = hlo.read(LOOP)
    assert (program.runs["%body"], program.runs["%product"], program.unknown_loops) == (4, 4, 0)  # 0, 2, 4, 6
    assert repeated_flops(program) == 3 * 2 * 16 * 8 * 32


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=NE"),
        ("constant(7)", "parameter(1)"),
        ("add(%at, %two.sunk)", "multiply(%at, %two.sunk)"),
        ("add(%at, %two.sunk)", "add(%other, %two.sunk)"),
        ("copy(%zero)", "add(%zero, %zero)"),
        ("constant(2)", "constant(0)"),
    ],
)
def test_another_loop_has_none_that_is_known(old: str, new: str) -> None:
    assert old in LOOP
    program = hlo.read(LOOP.replace(old, new))
    assert (program.runs["%product"], program.unknown_loops) == (1, 1)


@pytest.mark.parametrize(
    ("product", "operands", "multiplications"),
    [
        (
            "f32[4,16,32] dot(%q, %p), lhs_batch_dims={0}, lhs_contracting_dims={2}",
            ("4,16,8", "4,8,32"),
            4 * 16 * 8 * 32,
        ),
        ("f32[16,32] convolution(%q, %p), dim_labels=bf_oi->bf", ("16,8", "32,8"), 16 * 8 * 32),
        # A batch as a spatial dimension, in the two ways of the TPU compiler: most places are padding.
        (
            "f32[16,4,32] convolution(%q, %p), window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=b0f_i0o->b0f",
            ("16,1,8", "8,4,32"),
            16 * 4 * 8 * 32,
        ),
        (
            "f32[4,16,32] convolution(%q, %p), window={size=4 stride=3 lhs_dilate=4 pad=0_0}, dim_labels=0bf_0io->0bf",
            ("4,16,8", "4,8,32"),
            4 * 16 * 8 * 32,
        ),
        # Three taps over five places, padded by one: 2 + 3 + 3 + 3 + 2.
        (
            "f32[2,5,7] convolution(%q, %p), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
            ("2,5,3", "3,3,7"),
            2 * 13 * 3 * 7,
        ),
    ],
)
def test_flops_of_products(product: str, operands: tuple[str, str], multiplications: int) -> None:
    lines = [f"  %{name} = f32[{dims}] parameter(0)" for name, dims in zip("qp", operands, strict=True)]
    program = hlo.read("\n".join(["ENTRY %main () -> f32[] {", *lines, f"  ROOT %r = {product}", "}"]))
    main = program.computations["%main"]
    assert flops(main.instructions["%r"], main) == 2 * multiplications


# ---------------------------------------------------------------------------------------------- what the compiler says


def fake_program() -> dict[str, Any]:
    weight = {
        "kind": "parameters",
        "shape": [6, 4],
        "itemsize": 4,
        "sharding": "{devices=[4,1]0,1,2,3}",
        "parameter": 0,
    }
    step = {"kind": "optimizer", "shape": [], "itemsize": 4, "sharding": "{replicated}", "parameter": 1}
    return {"inputs": [weight, step], "outputs": [], "seconds": 1.0, "host_bytes": 10}


def report(folder: Path, **found: Any) -> Any:
    (folder / "program.json").write_text(json.dumps(fake_program()))
    (folder / "compiled.json").write_text(
        json.dumps({"jax": "0", "libtpu": "0", "seconds": 2.0, "host_bytes": 5, **found})
    )
    return compiling._report(folder, parse("v6e", "2x2")[0], 4)


@pytest.mark.parametrize(
    ("message", "total"),
    [
        (
            "total memory required for HLO temporaries (238.50G) exceeds available HBM (31.25G).",
            int(238.5 * 2**30) + 36,
        ),
        ("... Used 40.00G of 31.25G hbm. Exceeded hbm capacity by 8.75G.", 40 * 2**30),
    ],
)
def test_a_step_too_large_is_a_finding(tmp_path: Path, message: str, total: int) -> None:
    found = report(tmp_path, error=f"RESOURCE_EXHAUSTED: Ran out of memory on HBM, the {message}")
    assert not found.fits
    assert found.memory["total"] == total
    assert found.memory["parameters"] == 2 * 4 * 4  # 6 rows over 4 devices: 2 each, the last padded
    assert found.capacity == int(31.25 * 2**30)
    assert found.flops is None


def test_another_refusal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="compiling the step failed: INTERNAL: Mosaic"):
        report(tmp_path, error="INTERNAL: Mosaic failed\nmore")


def test_sizes_add_up_and_padding_is_named(tmp_path: Path) -> None:
    (tmp_path / "optimised.hlo").write_text("")
    stats = {"arguments": 1000, "outputs": 900, "aliased": 880, "temporaries": 50, "code": 7}
    memory = report(tmp_path, memory=stats, cost={"flops": 3.0}).memory
    assert memory == {
        "parameters": 32, "optimizer": 4, "padding of arguments": 964, "temporaries": 50, "results": 20, "code": 7,
        "total": 1077,
    }  # fmt: skip


def test_what_a_loop_repeats_is_added_to_what_the_compiler_counts(tmp_path: Path) -> None:
    (tmp_path / "optimised.hlo").write_text(LOOP)
    stats = {"arguments": 1000, "outputs": 900, "aliased": 880, "temporaries": 50, "code": 7}
    found = report(tmp_path, memory=stats, cost={"flops": 10_000.0})
    assert found.flops == 10_000 + 3 * 2 * 16 * 8 * 32
    assert found.notes == (
        "the compiler counts a loop once; 2.458e+04 FLOPs of the further runs of its products are added",
    )


# ---------------------------------------------------------------------------------------------------------- children


def test_a_child_that_takes_too_long_is_ended_with_its_own_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); "
        "open(sys.argv[1], 'w').write(str(p.pid)); p.wait()"
    )
    until = time.monotonic() + 5.0
    with pytest.raises(CompileTimeout, match="thinking did not finish within the limit"):
        compiling._run("thinking", [sys.executable, "-c", code, str(tmp_path / "pid")], {}, until)
    pid = int((tmp_path / "pid").read_text())
    _wait(lambda: not _runs(pid), 10)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell no child that its parent ended")
def test_nothing_goes_on_when_who_asked_is_killed(tmp_path: Path) -> None:
    child = (
        "import os, sys, time\nfrom accelbridge_xla.ahead.compile_tpu import end_with_parent\nend_with_parent()\n"
        "open(sys.argv[1] + '.new', 'w').write(str(os.getpid()))\nos.rename(sys.argv[1] + '.new', sys.argv[1])\n"
        "time.sleep(120)"
    )
    parent = (
        "import sys, time\nfrom accelbridge_xla.ahead import compiling\n"
        "environment = {'PYTHONPATH': ':'.join(filter(None, sys.path))}\n"
        "compiling._run('', [sys.executable, '-c', *sys.argv[1:]], environment, time.monotonic() + 120)"
    )
    env = environment.environment(tmp_path / "site")
    asking = subprocess.Popen([sys.executable, "-c", parent, child, str(tmp_path / "pid")], env=env)
    try:
        pid = int(_wait(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 60))
    finally:
        asking.kill()
        asking.wait()
    _wait(lambda: not _runs(pid), 10)


def _wait(found: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def test_a_child_that_fails_says_its_last_words() -> None:
    with pytest.raises(BackendError, match=r"thinking failed: .* ended with 1: ValueError: no idea"):
        compiling._run("thinking", [sys.executable, "-c", "raise ValueError('no idea')"], {}, time.monotonic() + 60)


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(compiling.COMPILER, str(tmp_path / "python"))
    with pytest.raises(BackendError, match=r"there is no such program; 'make \.venv-tpu/installed' makes"):
        compiling.compiler()
    monkeypatch.delenv(compiling.COMPILER)
    if find_spec("jax") is None:
        refused = compiling.compiler()
        assert "the compiler for TPUs is not installed here (jax" in refused.reason  # type: ignore[union-attr]


def _installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(compiling, "find_spec", lambda _: object())
    monkeypatch.setattr(runtimes, "version_of", versions.get)


def test_torch_and_torch_xla_that_do_not_fit_are_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, torch="2.13.0", torch_xla="2.9.0")
    monkeypatch.setenv(compiling.COMPILER, "/nowhere")
    refused = compiling.compile_ahead("tpu:v6e:4x4", lambda _: None, 60.0)
    assert "torch_xla 2.9.0 is built for torch 2.9, and torch 2.13.0 is installed" in refused.reason  # type: ignore


@pytest.mark.skipif(find_spec("jax") is not None, reason="jax is installed here")
def test_an_interpreter_without_the_compiler_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, torch="2.9.1", torch_xla="2.9.0")
    monkeypatch.setenv(compiling.COMPILER, sys.executable)
    with pytest.raises(BackendError, match=r"No module named 'jax'; 'make \.venv-tpu/installed' makes"):
        compiling.compile_ahead("tpu:v6e:4x4", lambda _: None, 60.0)


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="torch_xla is installed here")
def test_no_torch_xla_says_where_it_is() -> None:
    refused = compiling.compile_ahead("tpu:v6e:4x4", lambda _: None, 1.0)
    assert "'make .venv-xla/installed' makes an environment" in refused.reason  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------------ the real thing


def recipe(folder: Path) -> Path:
    path = folder / "small.yaml"
    sizes = {"vocab_size": 256, "dim": 128, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 256}
    sections = {
        "model": sizes,
        "parallel": {"tp": 2},
        "train": {"global_batch_size": 4, "microbatch_size": 1, "seq_len": 32, "steps": 10},
        "optimizer": {"warmup_steps": 1},
    }
    path.write_text(json.dumps(sections))
    return path


def estimate(folder: Path, target: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = ("-m", "accelbridge", "estimate", str(recipe(folder)), "--compile-for", target, "--json", *options)
    env = environment.environment(folder / "site")
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=1200, check=False
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = estimate(tmp_path_factory.mktemp("ahead"), "tpu:v6e:2x2", "--seconds", "1000", "--layers", "whole")
    return json.loads(_succeeds(done))


@needs_compiler
def test_the_step_is_compiled_for_the_target(found: dict[str, Any]) -> None:
    compiled = found["compiled"]
    assert (compiled["evidence"], compiled["target"]) == ("compiled for, not run", "tpu:v6e:2x2")
    assert (compiled["chip"], compiled["devices"], compiled["fits"]) == ("TPU v6e", 4, True)
    assert found["recipe"]["layout"]["dp_shard"] == found["recipe"]["layout"]["tp"] == 2
    assert compiled["software"].keys() >= {"torch", "torch_xla", "jax", "libtpu"}


@needs_compiler
def test_arguments_are_the_parts_that_the_layout_gives_a_device(found: dict[str, Any]) -> None:
    memory, shapes = found["compiled"]["memory"], found["arithmetic"]["memory"]
    assert memory["parameters"] == shapes["parameters"]
    counts = 4 * 12  # AdamW's count of updates, one per parameter: nine of the layer, embedding, last norm and head
    assert memory["optimizer"] == shapes["optimizer"] + counts
    assert memory["total"] == sum(size for kind, size in memory.items() if kind != "total")


@needs_compiler
def test_parameters_and_state_are_donated(found: dict[str, Any]) -> None:
    memory = found["compiled"]["memory"]
    assert memory["results"] < (memory["parameters"] + memory["optimizer"]) / 10  # else all of them again


@needs_compiler
def test_flops_are_those_of_the_model(found: dict[str, Any]) -> None:
    assert found["compiled"]["flops"] == pytest.approx(found["arithmetic"]["flops"], rel=0.15)


@needs_compiler
def test_the_layouts_collectives_are_in_the_program(found: dict[str, Any]) -> None:
    collectives = {each["op"]: each for each in found["compiled"]["collectives"]}
    assert {"all_gather", "all_reduce"} <= collectives.keys()
    assert all(each["count"] > 0 and each["bytes"] > 0 for each in collectives.values())
    gathered = 2 * found["arithmetic"]["memory"]["parameters"]  # over dp_shard 2
    assert collectives["all_gather"]["bytes"] > gathered / 2


@needs_compiler
def test_a_slice_that_hosts_cannot_form_is_refused_at_once(tmp_path: Path) -> None:
    sizes = ("--set", "parallel.tp=1", "--set", "train.global_batch_size=27")
    done = estimate(tmp_path, "tpu:v5p:3x3x3", *sizes)
    assert done.returncode == 2
    assert "libtpu refuses:" in done.stderr
    assert "choose another topology" in done.stderr


@needs_compiler
def test_a_limit_ends_it(tmp_path: Path) -> None:
    done = estimate(tmp_path, "tpu:v6e:2x2", "--seconds", "2")
    assert done.returncode == 2
    assert "did not finish within the limit; allow more with --seconds" in done.stderr


@needs_compiler
def test_what_is_derived_is_what_compiles(tmp_path: Path) -> None:
    """Four layers, compiled and derived from one and two. What layers hold is exact; the rest is the compiler's choice
    anew in each program, and near."""
    whole, few = (
        json.loads(_succeeds(estimate(tmp_path, "tpu:v6e:2x2", "--set", "model.layers=4", "--layers", mode)))
        for mode in ("whole", "few")
    )
    compiled, derived = whole["compiled"], few["compiled"]
    assert (compiled["layers"], compiled["derived"], compiled["parts"]) == (4, "", {})
    assert (derived["layers"], derived["parts"].keys()) == (4, {"1", "2"})
    assert "derived from 1 and 2 of 4 layers" in derived["derived"]
    for kind in ("parameters", "optimizer", "batch"):
        assert derived["memory"][kind] == compiled["memory"][kind]
    assert derived["flops"] == pytest.approx(compiled["flops"], rel=0.02)
    assert derived["memory"]["total"] == pytest.approx(compiled["memory"]["total"], rel=0.15)
    sent = [sum(each["bytes"] for each in found["collectives"]) for found in (derived, compiled)]
    assert sent[0] == pytest.approx(sent[1], rel=0.15)


def _succeeds(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


TEXT = """
import sys
from pathlib import Path
from torch_xla.core import xla_builder
folder = Path(sys.argv[1])
module = xla_builder.computation_from_module_proto("step", (folder / "program.pb").read_bytes())
(folder / "program.hlo").write_text(xla_builder.get_computation_hlo(module))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step in bfloat16 over four data-parallel devices as it is exported, in program.pb and program.hlo."""
    folder = tmp_path_factory.mktemp("wide")
    sections = json.loads(recipe(folder).read_text()) | {"parallel": {}, "precision": {"compute": "bfloat16"}}
    (folder / "step.pickle").write_bytes(pickle.dumps(OneStep(sections, "tpu:v6e:2x2")))
    env = environment.environment(folder / "site")
    environment.python("-m", "accelbridge_xla.ahead.export", folder, env=env)
    environment.python("-c", TEXT, folder, env=env)
    return folder


@environment.needs_torch_xla
def test_in_bfloat16_the_exported_products_are_bfloat16_and_those_that_make_gradients_float32(wide: Path) -> None:
    """As ``accelbridge_xla.bfloat16`` says; eight modules of a layer and the head have a weight."""
    program = hlo.read((wide / "program.hlo").read_text())
    (main,) = [each for each in program.computations.values() if each.entry]
    products = [each for each in main.instructions.values() if each.opcode == "dot"]
    plain = [each for each in products if len(hlo.shapes(each.result)[0][1]) == 2]  # attention's have a batch
    kinds = [hlo.shapes(each.result)[0][0] for each in plain]
    assert (kinds.count("bf16"), kinds.count("f32")) == (2 * 8, 8)
    for product, kind in zip(plain, kinds, strict=True):
        for operand in product.operands:
            assert hlo.shapes(main.result(operand))[0][0] == kind
            assert kind == "bf16" or _rounded(main, operand), f"{operand} holds more than bfloat16 does"


def _rounded(main: hlo.Computation, name: str) -> bool:
    """Whether a float32 value was a bfloat16 one before it was moved about."""
    found = main.instructions[name]
    while found.opcode in ("transpose", "reshape"):
        found = main.instructions[found.operands[0]]
    return found.opcode == "convert" and hlo.shapes(main.result(found.operands[0]))[0][0] == "bf16"


@needs_compiler
def test_in_bfloat16_the_compiled_program_adds_gradients_up_in_float32(wide: Path) -> None:
    script = Path(compiling.__file__).with_name("compile_tpu.py")
    python = compiling.compiler()
    assert isinstance(python, str)
    subprocess.run([python, str(script), str(wide), "v6e:2x2"], check=True, capture_output=True, timeout=600)
    program = hlo.read((wide / "optimised.hlo").read_text())
    reduced: list[str] = []
    products: list[tuple[str, ...]] = []
    for name in program.runs:
        computation = program.computations[name]
        for each in computation.instructions.values():
            if each.opcode.removesuffix("-start") in ("all-reduce", "reduce-scatter"):
                reduced += [kind for kind, _ in hlo.shapes(each.result)]
            if each.opcode == "convolution":
                texts = (each.result, *map(computation.result, each.operands))
                products.append(tuple(hlo.shapes(text)[0][0] for text in texts))
    assert "f32" in reduced
    assert "bf16" not in reduced
    assert ("bf16", "bf16", "bf16") in products
    # The compiler sees that what makes gradients holds bfloat16 values, and takes one pass of its units for them.
    assert products.count(("f32", "bf16", "bf16")) >= 8


def test_a_layout_that_does_not_match_the_chips_is_refused(tmp_path: Path) -> None:
    done = estimate(tmp_path, "tpu:v6e:4x4", "--set", "parallel.dp_shard=3")
    assert done.returncode == 2
    assert "which takes 6 devices; the run has 16" in done.stderr


@pytest.mark.skipif(find_spec("torch") is None, reason="placing takes torch")
def test_places_are_written_as_hlo_writes_them() -> None:
    from accelbridge_xla.ahead.recording import sharding_text

    mesh = np.arange(8).reshape(2, 2, 2)
    assert sharding_text((None, None), mesh) == "{replicated}"
    assert sharding_text((), mesh) == "{replicated}"
    assert sharding_text((("dp_replicate", "dp_shard"), None), mesh) == (
        "{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"
    )
    assert sharding_text(("tp", "dp_shard"), mesh) == "{devices=[2,2,2]0,4,2,6,1,5,3,7 last_tile_dim_replicate}"
    assert sharding_text((("tp", "dp_shard"),), np.arange(4).reshape(1, 2, 2)) == "{devices=[4]0,2,1,3}"
