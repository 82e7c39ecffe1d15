"""Where the time of a step goes, memory by kind, profiles, and what the report says of incidents."""

from __future__ import annotations

import io
import json
import os
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelbridge import Trainer
from accelbridge.errors import ConfigError
from accelbridge.train.config import TrainConfig
from accelbridge.train.incidents import incident_rows, incidents, time_split
from accelbridge.train.report import as_text, read_history, summarise
from accelbridge.train.step_times import StepTimes
from tests import cli
from tests.ranks import Rank, run_ranks

PARTS = ("time_data", "time_forward", "time_backward", "time_optimizer")


class SlowData:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(0.004)
        return {"x": torch.full((4,), index / 64)}


class Slow(nn.Module):
    """Waits 20 ms in its forward pass and 10 ms in its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.020)
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(0.010))
        return y


class Total:
    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"]) ** 2).sum()

    def count(self, batch: Any) -> Tensor:
        return torch.tensor(float(len(batch["x"])))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which it is known what takes how long, with a profile and checkpoints."""
    output = tmp_path_factory.mktemp("times") / "run"
    recipe: dict[str, Any] = {
        "train": {"steps": 8, "global_batch_size": 16, "microbatch_size": 8},
        "checkpoint": {"interval": 4},
        "metrics": {"interval": 3, "profile": "5:6"},
        "output": {"dir": str(output)},
    }
    Trainer(recipe, model=Slow(), data=SlowData(), loss=Total()).fit()
    return output


def test_the_parts_are_what_they_say(slow: Path) -> None:
    steps = cli.steps_of(slow)
    for step in range(3, 9):
        line = steps[step]
        assert line["time_forward"] >= 0.040
        assert line["time_backward"] >= 0.020
        assert sum(line[part] for part in PARTS) <= line["step_time"] + 1e-4

    # Of a busy machine's steps the quietest is judged: the rest of a step is short, and the CPU is never behind.
    quiet = min((steps[step] for step in range(3, 9)), key=lambda line: line["step_time"])
    assert sum(quiet[part] for part in PARTS) > 0.9 * quiet["step_time"]
    assert quiet["time_optimizer"] + quiet["time_wait"] < quiet["time_forward"] + quiet["time_backward"]
    assert steps[1]["time_data"] > 0.050
    assert {step for step in steps if "time_checkpoint" in steps[step]} == {5}  # after step 4; the last has no next
    (stall,) = [line["stall"] for line in cli.lines_of(slow) if line.get("event") == "checkpoint" and line["step"] == 4]
    assert steps[5]["time_checkpoint"] == pytest.approx(stall, abs=1e-4)


def test_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 3.0, 6.0, 7.0, 7.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    times = StepTimes()
    times.begin()  # 1
    times.lap("data")  # 3
    times.lap("forward")  # 6
    times.lap("data")  # 7
    times.add("checkpoint", 5.0)
    assert times.end() == {"step_time": 6.5, "time_data": 3.0, "time_forward": 3.0, "time_checkpoint": 5.0}


def test_memory_by_kind(slow: Path) -> None:
    event = next(line for line in cli.lines_of(slow) if line.get("event") == "memory")
    assert (event["parameters"], event["gradients"], event["optimizer"]) == (20, 20, 48)  # two moments, two counts
    assert event["peak"] == 88 + event["other"] > 2**20


def test_a_trace_of_the_chosen_steps(slow: Path) -> None:
    (path,) = (slow / "profile").iterdir()
    assert path.name == "steps_5-6.rank_0.json"
    events = json.loads(path.read_text())["traceEvents"]
    updates = [e for e in events if e.get("name", "").startswith("Optimizer.step")]
    assert len(updates) == 2
    (event,) = [line for line in cli.lines_of(slow) if line.get("event") == "profile"]
    assert (event["step"], event["path"]) == (6, str(path))
    assert event["collective_seconds"] < 0.005  # one process


def test_profile_of_two_ranks_from_the_first_step(tmp_path: Path, store: Path) -> None:
    said, _ = run_ranks(profiled, 2, tmp_path / "run", store, timeout=100)
    names = sorted(path.name for path in (tmp_path / "run" / "profile").iterdir())
    assert names == ["steps_1-2.rank_0.json", "steps_1-2.rank_1.json"]
    (event,) = [line for line in cli.lines_of(tmp_path / "run") if line.get("event") == "profile"]
    assert 0 < event["collective_seconds"] < 60
    assert "metrics.profile begins at step 2, which is done" in said


def profiled(ctx: Rank, output: Path, store: Path) -> str:
    """A run with a profile, and one that goes on after the steps of its profile; what the second says."""
    ctx.launched()
    for steps, profile in ((4, "1:2"), (5, "2:3")):
        os.environ["TORCHELASTIC_RUN_ID"] = profile
        recipe = cli.recipe(output, store, train={"steps": steps}, metrics={"profile": profile})
        said = io.StringIO()
        with redirect_stdout(said):
            Trainer(recipe, resume="auto").fit()
    return said.getvalue()


@pytest.mark.parametrize("text", ["0:3", "5:4", "5", "a:b", "-1:2", "1:2:3", "", "10:21"])
def test_bad_ranges_are_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.profile|FIRST:LAST"):
        TrainConfig.of({"metrics": {"profile": text}, "train": {"steps": 20}})


def test_a_bad_range_on_the_command_line(tmp_path: Path, store: Path) -> None:
    recipe = cli.write_recipe(tmp_path / "bad.yaml", store)
    done = cli.run("train", str(recipe), "--profile", "12:10")
    assert done.returncode == 2
    assert "FIRST:LAST" in done.stderr
    assert not (tmp_path / "run-bad").exists()


# ------------------------------------------------------------------------------------------------------------ report


def test_the_report_tells_incidents_and_times(slow: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"event": "start", "step": 0},
        {"event": "skipped_update", "step": 3, "parameter": "w", "ranks": "1"},
        {"event": "skipped_update", "step": 7, "parameter": "w", "ranks": "1"},
        {"event": "spike", "step": 9, "loss": 9.0},
        {"event": "halted", "step": 20, "cause": "nonfinite", "message": "step 20: the loss is nan; and more"},
        {"event": "start", "step": 10},
        {"event": "rollback", "step": 12, "spike": 30},
        {"event": "slow_rank", "step": 10, "rank": 3, "ratio": 1.5},
        {"event": "slow_rank", "step": 20, "rank": 3, "ratio": 1.75},
    ]
    text = (slow / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + text)
    history = read_history(tmp_path)
    summary = summarise(history)
    shown = as_text(history, summary, tmp_path / "report.png").splitlines()
    for line in (
        "skipped    2 updates, not finite, at step 3, 7",
        "halted     step 20: the loss is nan",
        "spikes     at step 9",
        "rollback   from the spike at step 30 to step 12",
        "slow rank  3: up to 1.75 x the others, reported 2 time(s)",
    ):
        assert line in shown, shown
    assert any(line.startswith("restarts   after step 10") for line in shown)
    (forward,) = [line.split() for line in shown if line.startswith("  forward")]
    assert float(forward[1]) >= 40
    assert summary.time_split["forward"] == pytest.approx(float(forward[1]) / 1e3, abs=1e-5)
    shares = [float(line.split()[-1].rstrip("%")) for line in shown[shown.index("time per step (mean, host)") + 1 :]]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_a_quiet_run_has_nothing_to_tell() -> None:
    assert incident_rows(incidents([], [{"step": 1}]), []) == []
    assert time_split([{"step": 1, "loss": 1.0}]) == {}
    scaled = incidents([], [{"step": 1, "skipped_updates": 2}, {"step": 2, "skipped_updates": 3}])
    assert incident_rows(scaled, []) == [("skipped", "3 updates, not finite")]
