"""Bad input to ``accelbridge train``: one clear error, exit code 2, before work begins, and nothing changed.

Most cases call the command line in this process; the few that need real ranks are at the end.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.cli import main
from accelbridge.models.config import ModelConfig
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import Prepared, choose_target, prepare
from accelbridge.train.resume import CHECKPOINTS
from accelbridge.train.world import world_from_environment
from tests import cli

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELBRIDGE_BACKEND")


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """``accelbridge ARGS`` in this process."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)

    def call(*args: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["accelbridge", *args])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capfd.readouterr()
        return Done(int(left.value.code or 0), captured.out, captured.err)

    return call


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below ``folder`` with its bytes, every folder with None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def unchanged(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Call it once everything is set up: by the end of the test, nothing below tmp_path may have changed."""
    noted: list[dict[str, bytes | None]] = []
    yield lambda: noted.append(contents(tmp_path))
    for before in noted:
        assert contents(tmp_path) == before


def refused(done: Done, *parts: str) -> str:
    """Exit code 2 and one message on stderr, with ``parts``; nothing else."""
    assert done.code == 2, done
    assert done.out == ""
    assert "Traceback" not in done.err
    assert done.err.count("error: ") == 1
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) == 1, done.err
    for part in parts:
        assert part in done.err
    return done.err


# -------------------------------------------------------------------------------- settings against the machine

Sections = dict[str, Any]
BY_SETTING: list[tuple[list[str], list[str]]] = [
    (["parallel.tp=2"], ["parallel.tp 2 asked", "not a multiple of 2", "set "]),
    (["parallel.cp=2"], ["parallel.cp 2 asked", "not supported yet"]),
    (["parallel.pp=4"], ["parallel.pp 4 asked", "not supported yet"]),
    (["parallel.ep=2"], ["parallel.ep 2 asked", "not supported yet"]),
    (
        ["parallel.sequence_parallel=true"],
        ["parallel.sequence_parallel asked", "parallel.tp is 1", "set parallel.tp to"],
    ),
    (
        ["memory.recompute.ops=[rmsnorm]"],
        ['names "rmsnorm"', 'did you mean "rms_norm"?', "choose from rms_norm, linear"],
    ),
    (["memory.recompute.ops=[embedding]"], ['names "embedding"', "outside the shard units", "remove it"]),
    (["memory.recompute.budget=1KiB"], ["1024 bytes asked", "the least is", "outside the layers", "set ", " or more"]),
    (
        ["memory.activations=nvme"],
        ["memory.activations nvme asked", "not supported yet", "set memory.activations: host"],
    ),
    (["memory.optimizer=nvme"], ["memory.optimizer nvme asked", "not supported yet", "set memory.optimizer: host"]),
    (
        ["memory.parameters=host"],
        ["memory.optimizer device asked with memory.parameters host", "set memory.parameters: device"],
    ),
    (["backend.profile=fast"], ['backend.profile "fast" asked', "no network profiles", "remove it"]),
    (["parallel.dp_shard=2"], ["parallel.dp_shard 2 asked", "2 devices", "the run has 1", "--nproc 2"]),
    (["parallel.dp_replicate=2"], ["parallel.dp_replicate 2 asked", "1 device", "not a multiple of 2"]),
    (["train.microbatch_size=3"], ["train.microbatch_size 3 asked", "train.global_batch_size 8", "a divisor of"]),
    (["backend.name=cpuu"], ['backend "cpuu" asked by recipe', 'did you mean "cpu"?', "accelbridge devices"]),
    (["backend.options.foo=2"], ["backend.options.foo", "known: devices"]),
    (["backend.options.devices=x"], ["backend.options.devices", "valid integer"]),
    (["backend.ops.atention=sdpa"], ['"atention"', 'did you mean "attention"?', "known: "]),
    (["backend.ops.attention=x"], ['backend.ops.attention "x" asked', "candidates are sdpa, reference"]),
    (
        ["backend.ops.attention=sdpa", "model.softcap=20"],
        ["backend.ops.attention sdpa", "cap scores", "on_unsupported"],
    ),
    (["model.vocab_size=256"], ["data.train", "vocabulary of 257", "the model's is 256", "model.vocab_size to 257"]),
    (["train.seq_len=99999999"], ["train.seq_len 99999999 asked", "data.train", "shorter train.seq_len"]),
    (["data.train="], ["data.train is missing from", "accelbridge data build"]),
    (["data.train=/no/such/store"], ['data.train "/no/such/store" asked', "no such folder", "accelbridge data build"]),
    (["data.validation=/no/such/store"], ['data.validation "/no/such/store" asked', "no such folder"]),
    (["data.train=/dev/null"], ['data.train "/dev/null" asked']),
    (["model="], ["model is missing from", "add the section"]),
    (["output.dir=/proc/accelbridge"], ['output.dir "/proc/accelbridge" asked', "cannot be written", "set another"]),
    (["output.dir=RECIPE"], ["output.dir", "it is a file", "set another output.dir"]),
    (["output.dir=/tmp/" + "x" * 300], ["output.dir", "File name too long", "set another"]),
    (['output.dir="/tmp/a\\0b"'], ["output.dir", "null byte", "set another output.dir"]),
    (['data.train="/tmp/a\\0b"'], ["data.train", "no such folder"]),
    (["output.dir=RECIPE/below"], ["output.dir", "cannot be written: Not a directory"]),
    (["train.warmup=3"], ['unknown key "warmup" in train']),
]


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize(("overrides", "parts"), BY_SETTING, ids=lambda value: value[0] if value else "")
def test_a_setting_that_cannot_be(
    tmp_path: Path,
    store: Path,
    run: Run,
    unchanged: Callable[[], None],
    overrides: list[str],
    parts: list[str],
    nproc: int,
) -> None:
    """Whether or not processes would have to be started, in which case none is."""
    if overrides[0] in ("parallel.dp_shard=2", "parallel.dp_replicate=2") and nproc == 2:
        pytest.skip("fits two processes")
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store)
    asked = [f"--set={text.replace('RECIPE', str(recipe))}" for text in overrides]
    unchanged()
    error = refused(run("train", str(recipe), "--nproc", str(nproc), *asked), *parts)
    setting = overrides[0].split("=")[0]
    if setting.split(".")[0] != "model":
        assert error.startswith("error: --set ")
        assert setting in error


@pytest.mark.parametrize(
    ("nproc", "sections", "parts"),
    [
        (3, {}, ["train.global_batch_size 8 asked", "3 ways", "a multiple of 3"]),
        (2, {"train": {"microbatch_size": 3}}, ["2 data-parallel ranks takes 4 sequences", "multiple of 6"]),
        (3, {"parallel": {"dp_replicate": 2}}, ["parallel.dp_replicate 2 asked", "3 devices", "not a multiple of 2"]),
        (2, {"parallel": {"dp_shard": 4}}, ["parallel.dp_shard 4 asked", "takes 4 devices", "run has 2", "--nproc 4"]),
        (99999, {}, ["--nproc 99999 asked", "backend cpu offers", "or less"]),
        (3, {"backend": {"options": {"devices": 2}}}, ["--nproc 3 asked", "offers 2 devices", "set --nproc 2 or less"]),
    ],
)
def test_a_layout_that_does_not_fit(
    tmp_path: Path,
    store: Path,
    run: Run,
    unchanged: Callable[[], None],
    nproc: int,
    sections: Sections,
    parts: list[str],
) -> None:
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store, **sections)
    unchanged()
    refused(run("train", str(recipe), "--nproc", str(nproc)), *parts)


def test_errors_about_settings_have_file_and_line(tmp_path: Path, store: Path, run: Run) -> None:
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store, backend={"ops": {"attention": "x"}})
    (line,) = [n for n, text in enumerate(recipe.read_text().splitlines(), 1) if '"attention"' in text]
    refused(run("train", str(recipe)), f"{recipe}:{line}: backend.ops.attention")


def test_several_errors_of_a_recipe_come_together(tmp_path: Path, run: Run) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("train:\n  steps: no\n  step: 3\nmodel: {dim: 1.5}\n")
    done = run("train", str(recipe), "--nproc", "2")
    assert (done.code, done.out) == (2, "")
    lines = done.err.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith(f"error: {recipe}:2: train.steps")
    assert lines[1].startswith(f"{recipe}:3: unknown key")


@pytest.mark.parametrize("text", ["", "train: {steps: 5}\n"])
def test_a_recipe_without_a_model(tmp_path: Path, run: Run, unchanged: Callable[[], None], text: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    unchanged()
    refused(run("train", str(recipe)), f"model is missing from {recipe}", "add the section")


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_an_unknown_backend(tmp_path: Path, store: Path, run: Run, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store)
    if how == "environment":
        monkeypatch.setenv("ACCELBRIDGE_BACKEND", "cpuu")
    asked = ["--backend", "cpuu"] if how == "argument" else []
    by = "argument" if how == "argument" else "ACCELBRIDGE_BACKEND"
    parts = [f'backend "cpuu" asked by {by}', "no installed distribution", 'did you mean "cpu"?', "installed: cpu"]
    refused(run("train", str(recipe), *asked), *parts)
    refused(run("explain", str(recipe), *asked), *parts)


def test_damaged_data(tmp_path: Path, store: Path, run: Run, unchanged: Callable[[], None]) -> None:
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    tokens = copy / "train" / "tokens-00000.bin"
    os.truncate(tokens, tokens.stat().st_size - 2)
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", copy)
    unchanged()
    refused(run("train", str(recipe)), "data.train", str(tokens), "truncated", "rebuild the store")
    refused(run("explain", str(recipe)), "data.train", str(tokens), "truncated")
    refused(run("train", str(recipe), f"--set=data.train={copy}"), "data.train", "did you mean", str(copy / "train"))


# ------------------------------------------------------------------------------------- outputs and checkpoints


@pytest.fixture
def finished(tmp_path: Path, store: Path) -> Path:
    """A recipe whose output folder looks like that of a run that has ended at step 20."""
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store)
    output = tmp_path / "run-recipe"
    (output / "logs").mkdir(parents=True)
    (output / "logs" / "rank_0.log").write_text("as it was\n")
    (output / "metrics.jsonl").write_text('{"step": 20}\n')
    for step in (10, 20):
        checkpoint(output / CHECKPOINTS / f"step_{step}", step)
    return recipe


def checkpoint(path: Path, step: int, **changes: Any) -> Path:
    model = ModelConfig.model_validate(cli.TINY_MODEL).model_dump()
    path.mkdir(parents=True)
    manifests.write(path, Manifest(**{"step": step, "world_size": 1, "model": model, **changes}))
    return path


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_an_output_folder_that_holds_a_run(finished: Path, run: Run, unchanged: Callable[[], None], nproc: str) -> None:
    unchanged()
    refused(run("train", str(finished), "--nproc", nproc), "output.dir", "already holds a run", "--resume auto")


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_resume_of_what_cannot_be_resumed(finished: Path, run: Run, unchanged: Callable[[], None], nproc: str) -> None:
    folder = finished.parent
    output = folder / "run-recipe"
    known = output / CHECKPOINTS
    model = ModelConfig.model_validate(cli.TINY_MODEL).model_dump()
    (folder / "empty").mkdir()
    damaged = checkpoint(folder / "damaged", 5)
    (damaged / "manifest.json").write_text('{"format": "accelbridge-ch')
    cases: dict[str, list[str]] = {
        str(folder / "absent"): ["there is no such folder", f"use {known / 'step_20'}"],
        "latest": ["--resume latest asked", "no such folder", f"use {known / 'step_20'}"],
        str(folder / "empty"): ["no complete checkpoint", "no manifest.json"],
        str(finished): ["no complete checkpoint"],
        str(output): ["no complete checkpoint", f"use {known / 'step_20'}"],
        str(known): ["no complete checkpoint", f"use {known / 'step_20'}"],
        str(damaged): ["manifest.json", "cannot be read"],
        str(checkpoint(folder / "other", 25, model=model | {"dim": 64})): [
            "another model",
            "model.dim is 64 there, 32",
        ],
        str(checkpoint(folder / "newer", 25, version=2)): ["format version 2", "reads version 1", "use accelbridge"],
        str(checkpoint(folder / "late", 21)): ["at step 21", "train.steps is 20", "raise train.steps"],
        str(known / "step_10"): ["also holds step_20", "set another output.dir"],
        "x" * 300: ["--resume xxx", "File name too long", "set another path"],
        "": ["--resume"],
    }
    unchanged()
    for path, parts in cases.items():
        refused(run("train", str(finished), "--nproc", nproc, "--resume", path), *parts)


def resolved(recipe: Path, resume: str = "auto", *overrides: str) -> Prepared:
    config = TrainConfig.load(recipe, overrides)
    return prepare(config, world_from_environment(), resume=resume)


def test_resume_that_works(finished: Path, store: Path) -> None:
    assert resolved(finished).start_step == 20
    output = f"output.dir={finished.parent / 'elsewhere'}"
    at_10 = finished.parent / "run-recipe" / CHECKPOINTS / "step_10"
    assert resolved(finished, str(at_10), output).start_step == 10
    assert resolved(finished, "auto", output).start_step == 0, "there is nothing there: a fresh run"
    # A newer neighbour need not be readable for an older one to be refused, or used elsewhere.
    (at_10.with_name("step_20") / "manifest.json").write_text("{")
    assert resolved(finished, str(at_10), output).start_step == 10


def test_resume_auto_passes_over_what_it_cannot_read(finished: Path) -> None:
    checkpoints = finished.parent / "run-recipe" / CHECKPOINTS
    checkpoint(checkpoints / "step_30", 30, version=2)
    (checkpoints / "step_40").mkdir()
    found = resolved(finished).resume
    assert found is not None
    assert found.manifest.step == 20
    assert [(p.path.name, p.foreign) for p in found.passed_over] == [("step_40", False), ("step_30", True)]
    assert "format version 2" in found.passed_over[1].fault


def test_an_error_that_is_found_late_leaves_no_output_folder(tmp_path: Path, store: Path, run: Run) -> None:
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store, backend={"ops": {"attention": "x"}})
    refused(run("train", str(recipe)), "backend.ops.attention")
    assert not (tmp_path / "run-recipe").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_output_folder(tmp_path: Path, store: Path, run: Run) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store, output={"dir": str(tmp_path / "closed")})
    refused(run("train", str(recipe)), "output.dir", "cannot be written", os.strerror(errno.EACCES))


# --------------------------------------------------------------------------------------------------- fallback


def test_a_permitted_fallback_is_in_the_plan(tmp_path: Path, store: Path, run: Run) -> None:
    recipe = cli.write_recipe(
        tmp_path / "recipe.yaml",
        store,
        model={"softcap": 20.0},
        backend={"ops": {"attention": "sdpa"}, "on_unsupported": "fallback"},
    )
    plan = resolved(recipe, "none").plan
    (choice,) = [choice for choice in plan.ops if choice.op == "attention"]
    assert choice.implementation == "reference"
    assert "cap scores" in choice.rejected[0].reason
    done = run("explain", str(recipe))
    assert done.code == 0
    assert "FALLBACK: attention asked for sdpa" in done.out


# --------------------------------------------------------------------------------------------------- launchers


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ({"RANK": "0"}, ["RANK is set but WORLD_SIZE is not", "torchrun"]),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, ['RANK="zero"', "not an integer"]),
        ({"RANK": "0", "WORLD_SIZE": "two"}, ['WORLD_SIZE="two"', "not an integer"]),
        ({"RANK": "0", "WORLD_SIZE": ""}, ['WORLD_SIZE=""', "not an integer"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2 and WORLD_SIZE=2", "0 to WORLD_SIZE - 1"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK=-1"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, ["LOCAL_RANK=1"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "http"}, ['MASTER_PORT="http"', "not an integer"]),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "1 to 65535"]),
    ],
)
def test_a_launcher_that_sets_nonsense(
    tmp_path: Path,
    store: Path,
    run: Run,
    unchanged: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    parts: list[str],
) -> None:
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    unchanged()
    refused(run("train", str(recipe)), *parts)


@pytest.mark.parametrize("option", ["--nproc", "--port"])
def test_options_of_the_launcher_in_a_rank(
    tmp_path: Path, store: Path, run: Run, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store)
    refused(run("train", str(recipe), option, "2"), f"{option} 2 asked", "already a rank", f"leave {option} away")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_master_port_in_use(tmp_path: Path, store: Path, run: Run, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken)}.items():
        monkeypatch.setenv(name, value)
    refused(run("train", str(recipe)), f"127.0.0.1:{taken} asked", "already in use", "choose another port")


def test_nobody_at_the_meeting_point(
    tmp_path: Path, store: Path, run: Run, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store, parallel={"agreement_timeout": 0.3})
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free)}.items():
        monkeypatch.setenv(name, value)
    refused(run("train", str(recipe)), "rank 1", f"127.0.0.1:{free} asked", "nobody answered for 0.3 s", "rank 0")


def test_port_in_use(tmp_path: Path, store: Path, run: Run, taken: int) -> None:
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store)
    done = run("train", str(recipe), "--nproc", "2", "--port", str(taken))
    refused(done, f"--port {taken} asked", "in use", "choose another port")
    assert contents(tmp_path / "run-recipe") == {}


# ---------------------------------------------------------------------------------------------- real processes


def test_a_bad_recipe_for_two_processes_is_told_once(tmp_path: Path, store: Path) -> None:
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store, parallel={"tp": 2})
    done = cli.run("train", str(recipe), "--nproc", "2")
    refused(Done(done.returncode, done.stdout, done.stderr), "parallel.tp 2 asked", "model.vocab_size 257")
    assert not (tmp_path / "run-recipe").exists()


BUG = """
import os
if os.environ.get("RANK", "1") == "1":
    from accelbridge.train import trainer
    def broken(*_, **__):
        raise KeyError("a bug in this rank")
    trainer.Trainer.train_step = broken
"""


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_bug_is_no_bad_input(tmp_path: Path, store: Path, nproc: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(BUG)
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store)
    done = cli.run("train", str(recipe), f"--nproc={nproc}", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done
    log = tmp_path / "run-recipe" / "logs" / f"rank_{nproc - 1}.log"
    assert f"crashed with KeyError; the log is {log}" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("KeyError: 'a bug in this rank'") == 1
    assert "KeyError: 'a bug in this rank'" in log.read_text()


def test_choose_target_names_the_place_of_an_option(tmp_path: Path, store: Path) -> None:
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store, backend={"options": {"devices": 0}})
    with pytest.raises(ValueError, match=r"recipe\.yaml:\d+: backend\.options\.devices"):
        choose_target(TrainConfig.load(recipe))
