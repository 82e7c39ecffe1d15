"""Going on: from the newest intact checkpoint, with what is damaged named and kept; and settings that cannot be."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelbridge import Trainer
from accelbridge.checkpoint import manifest as manifests
from accelbridge.checkpoint.manifest import complete
from accelbridge.data.loader import PackedSamples
from accelbridge.data.store import TokenStore
from accelbridge.errors import CheckpointError, ConfigError
from accelbridge.train.config import TrainConfig
from accelbridge.train.metrics import PASSED_OVER_EVENT
from tests import cli
from tests.ranks import Rank, run_ranks
from tests.scenes import same_bits

STEPS = 6


def recipe(folder: Path, store: Path, **sections: Any) -> dict[str, Any]:
    made = cli.recipe(folder, store, **sections)
    made["train"]["steps"] = STEPS
    made["checkpoint"] = {"interval": 2, "keep": 9} | sections.get("checkpoint", {})
    return made


def fit(folder: Path, store: Path, resume: str = "none", **sections: Any) -> None:
    Trainer(recipe(folder, store, **sections), resume=resume).fit()


@pytest.fixture(autouse=True)
def clean_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is the whole world, whatever started pytest."""
    for name in ("RANK", "WORLD_SIZE", "ACCELBRIDGE_BACKEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A run with checkpoints of steps 2, 4 and 6."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "ACCELBRIDGE_BACKEND"):
            patch.delenv(name, raising=False)
        folder = tmp_path_factory.mktemp("straight") / "run"
        fit(folder, store)
    return folder


@pytest.fixture
def run(straight: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(straight, tmp_path / "run"))


# ----------------------------------------------------------------------------------------------------- damage


def flip_a_byte(path: Path) -> str:
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "__0_0.distcp does not match its checksum"


def remove_a_shard(path: Path) -> str:
    (path / "__0_0.distcp").unlink()
    return "__0_0.distcp is missing"


def truncate_a_shard(path: Path) -> str:
    os.truncate(path / "__0_0.distcp", 100)
    return "__0_0.distcp has 100 bytes"


def remove_the_manifest(path: Path) -> str:
    (path / "manifest.json").unlink()
    return "it has no manifest.json"


def tear_the_manifest(path: Path) -> str:
    os.truncate(path / "manifest.json", 40)
    return "manifest.json cannot be read"


def empty(path: Path) -> str:
    shutil.rmtree(path)
    path.mkdir()
    return "it has no manifest.json"


def copy_of_another(path: Path) -> str:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step_2"), path)
    return "manifest.json is of step 2"


def change_manifest(path: Path, **entries: Any) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def newer_format(path: Path) -> str:
    change_manifest(path, version=2, release="9.9")
    return "format version 2, which is newer; .* use accelbridge 9.9 or a later one"


def older_format(path: Path) -> str:
    change_manifest(path, version=0)
    return "format version 0, which is older"


def foreign(path: Path) -> str:
    change_manifest(path, format="somebody's")
    return "is no accelbridge-checkpoint manifest"


DAMAGE = [
    flip_a_byte,
    remove_a_shard,
    truncate_a_shard,
    remove_the_manifest,
    tear_the_manifest,
    empty,
    copy_of_another,
    newer_format,
    older_format,
    foreign,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_auto_goes_on_from_the_newest_that_is_intact(
    straight: Path,
    run: Path,
    store: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], str],
) -> None:
    newest = run / "checkpoints" / "step_6"
    fault = damage(newest)
    left = sorted(file.name for file in newest.iterdir())
    fit(run, store, resume="auto")
    said = capsys.readouterr().out
    assert "PASSED OVER step_6" in said
    assert "going on from step_4" in said
    (event,) = [line for line in cli.lines_of(run) if line.get("event") == PASSED_OVER_EVENT]
    assert event["checkpoint"] == "step_6"
    for text in (said, event["fault"], (run / "logs" / "rank_0.log").read_text()):
        assert re.search(fault, text), text
    aside = run / "checkpoints" / event["renamed"]
    assert aside.name == ("step_6.foreign" if "format" in fault or "is no" in fault else "step_6.damaged")
    assert sorted(file.name for file in aside.iterdir()) == left, "it is kept as it was"
    same_bits(newest, straight / "checkpoints" / "step_6")
    losses = [{s: line["loss"] for s, line in cli.steps_of(folder).items()} for folder in (run, straight)]
    assert losses[0] == losses[1]


def test_several_are_passed_over_and_an_earlier_one_aside_stays(run: Path, store: Path) -> None:
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step_6", checkpoints / "step_6.damaged")
    flip_a_byte(checkpoints / "step_6")
    tear_the_manifest(checkpoints / "step_4")
    fit(run, store, resume="auto")
    events = [line for line in cli.lines_of(run) if line.get("event") == PASSED_OVER_EVENT]
    assert [(e["checkpoint"], e["renamed"], e["step"]) for e in events] == [
        ("step_6", "step_6.damaged.1", 2),
        ("step_4", "step_4.damaged", 2),
    ]
    assert [p.name for p in complete(checkpoints)] == ["step_2", "step_4", "step_6"]


def test_where_none_is_intact_nothing_is_started_or_changed(run: Path, store: Path) -> None:
    for path in complete(run / "checkpoints"):
        flip_a_byte(path)
    before = sorted(p.name for p in (run / "checkpoints").iterdir())
    with pytest.raises(CheckpointError, match=r"none of the 3 checkpoints .* can be used.*step_6.*step_4.*step_2"):
        fit(run, store, resume="auto")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == before


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_that_is_named_is_an_error(
    run: Path, store: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    if damage is copy_of_another:
        pytest.skip("a copy under another name is in order; its step is in its manifest")
    path = run / "checkpoints" / "step_6"
    fault = damage(path)
    with pytest.raises(CheckpointError, match=fault.replace("it has no", "has no")):
        fit(tmp_path / "elsewhere", store, resume=str(path))


def test_resuming_an_older_one_would_replace_the_newer(run: Path, store: Path) -> None:
    with pytest.raises(CheckpointError, match=r"also holds step_4, step_6, .* move away what is newer or damaged"):
        fit(run, store, resume=str(run / "checkpoints" / "step_2"))


def test_a_finished_run_resumes_to_nothing_to_do(run: Path, store: Path) -> None:
    before = (run / "checkpoints" / "step_6" / "manifest.json").read_bytes()
    fit(run, store, resume="auto")
    assert (run / "checkpoints" / "step_6" / "manifest.json").read_bytes() == before
    assert sorted(cli.steps_of(run)) == list(range(1, STEPS + 1))


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(run: Path, straight: Path, store: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / ".step_2.partial").mkdir(parents=True)
    fit(run, store, resume="auto")
    assert [p.name for p in complete(run / "checkpoints")] == ["step_2", "step_4", "step_6"]
    assert (run / "metrics.1.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()


def test_a_checkpoint_of_the_future(run: Path, store: Path) -> None:
    short = recipe(run, store)
    short["train"]["steps"] = 4
    with pytest.raises(CheckpointError, match=r"at step 6, and train\.steps is 4; raise train\.steps"):
        Trainer(short, resume="auto")


def two_ranks(ctx: Rank, run: Path, store: Path) -> list[str]:
    """Both ranks find that step 6 is damaged, though each has read a part of it, and go on from step 4."""
    ctx.launched()
    trainer = Trainer(recipe(run, store), resume="auto")
    with trainer:
        trainer.setup()
        found = [str(trainer.step), *(p.fault for p in trainer.prepared.resume.passed_over)]  # type: ignore[union-attr]
    return found


def test_all_ranks_take_the_same_one(run: Path, store: Path) -> None:
    flip_a_byte(run / "checkpoints" / "step_6")
    first, second = run_ranks(two_ranks, 2, run, store, timeout=120)
    assert first == second
    assert first[0] == "4"
    assert "__0_0.distcp does not match its checksum" in first[1]
    for rank in (0, 1):
        assert "PASSED OVER step_6" in (run / "logs" / f"rank_{rank}.log").read_text()


# ------------------------------------------------------------------------------------------- settings that cannot be


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep"),
        ({"checkpoint": {"interval": 7}}, r"interval 7 asked; train\.steps is 6, so it never comes"),
        ({"checkpoint": {"keep_every": 5}}, r"keep_every 5 asked.* no checkpoint before the end"),
        ({"checkpoint": {"interval": 0, "keep_every": 2}}, r"keep_every 2 asked"),
        ({"checkpoint": {"interval": 0, "best": {"metric": "loss"}}}, r"checkpoint\.interval is 0, so there is one"),
        ({"checkpoint": {"best": {}}}, r"train\.eval_interval 0 .* is evaluated; set train\.eval_interval"),
        ({"checkpoint": {"best": {"metric": "accuracy"}}}, "validation_loss"),
        ({"checkpoint": {"best": {"metric": "loss", "keep": 0}}}, "keep"),
        ({"checkpoint": {"before_seconds": -1}}, "before_seconds"),
    ],
)
def test_a_setting_that_cannot_be(tmp_path: Path, store: Path, section: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        TrainConfig.of(recipe(tmp_path, store, **section))


def test_a_time_limit_that_nobody_knows(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(ConfigError, match=r"no time limit is known .*; set train\.max_seconds"):
        fit(tmp_path, store, checkpoint={"before_seconds": 60})
    late = recipe(tmp_path, store, checkpoint={"before_seconds": 60})
    late["train"]["max_seconds"] = 60
    with pytest.raises(ConfigError, match="would end at once"):
        TrainConfig.of(late)


def test_best_without_validation_data(tmp_path: Path, store: Path) -> None:
    asked = recipe(tmp_path, store, checkpoint={"best": {}})
    asked["train"]["eval_interval"] = 2
    with pytest.raises(ConfigError, match="there is no validation data"):
        Trainer(asked)


def test_the_best_by_validation_loss_survives(tmp_path: Path, store: Path) -> None:
    asked = recipe(tmp_path, store, checkpoint={"best": {}, "keep": 1})
    asked["train"]["eval_interval"] = 2
    asked["optimizer"] = {"lr": 2.0, "warmup_steps": 5}  # it gets worse soon, and stays finite on every processor
    packed = PackedSamples(TokenStore(store / "validation"), 32, True)
    Trainer(asked, validation=[packed[i] for i in range(8)]).fit()
    losses = {line["step"]: line["loss"] for line in cli.lines_of(tmp_path) if line.get("event") == "evaluation"}
    best = min(losses, key=lambda step: losses[step])
    assert best != STEPS, losses
    assert [p.name for p in complete(tmp_path / "checkpoints")] == [f"step_{best}", f"step_{STEPS}"]
    for path in complete(tmp_path / "checkpoints"):
        kept = manifests.read(path)
        assert kept.metrics["validation_loss"] == losses[kept.step]
