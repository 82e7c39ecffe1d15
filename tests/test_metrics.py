"""Metrics, progress and report of a run: no host synchronisation, one line per step, honest pictures."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelbridge.cli.report import report_command
from accelbridge.cpu.backend import CpuBackend
from accelbridge.errors import ConfigError, DataError
from accelbridge.train import metrics as metrics_module
from accelbridge.train import report as report_module
from accelbridge.train.metrics import Metrics, RunFacts
from accelbridge.train.metrics_config import MetricsConfig
from accelbridge.train.progress import duration, make_progress, quantity
from accelbridge.train.report import read_history, report, running_mean, smoothing_window, summarise

FACTS = RunFacts(parameters=1_000, flops_per_token=6_000.0, peak_flops=1e9, total_steps=20, tokens_per_step=512)


def open_metrics(
    output: Path, *, start_step: int = 0, rank: int = 0, facts: RunFacts = FACTS, **config: Any
) -> Metrics:
    return Metrics(output, MetricsConfig(**config), facts, rank=rank, start_step=start_step)


def record(metrics: Metrics, step: int, **changes: Any) -> None:
    values = {"loss": 5.0 / step, "grad_norm": 1.0, "tokens": 512, "lr": 1e-3, "step_time": 0.5} | changes
    metrics.record(step, **values)


def train(output: Path, first: int, last: int, **config: Any) -> None:
    """Steps ``first``..``last``, an evaluation every fifth, flushed as the trainer is told to."""
    metrics = open_metrics(output, start_step=first - 1, **config)
    for step in range(first, last + 1):
        record(metrics, step)
        if metrics.due(step) or step % 5 == 0:
            metrics.flush()
        if step % 5 == 0:
            metrics.event("evaluation", step=step, loss=6.0 / step)
    metrics.flush()
    metrics.close()


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not strict JSON")


def lines_of(output: Path) -> list[dict[str, Any]]:
    text = (output / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


def steps_of(output: Path) -> list[int]:
    return [line["step"] for line in lines_of(output) if "event" not in line]


def events_of(output: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(output) if line.get("event") == kind]


class CountReads(TorchDispatchMode):
    """Counts the ops by which the host learns a device value, and so waits for it."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waiting = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default}
        self.reads += func in waiting
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------------------- metrics


def test_record_never_reads_the_device_and_flush_does(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path)
    with CountReads() as mode:
        for step in range(1, 4):
            record(metrics, step, loss=torch.tensor(2.5), grad_norm=torch.tensor(1.5), tokens=torch.tensor(512))
            metrics.due(step)
        assert mode.reads == 0
        lines = metrics.flush()
        assert mode.reads == 9
    assert [line["loss"] for line in lines] == [2.5] * 3
    assert lines[0]["tokens"] == 512
    assert type(lines[0]["tokens"]) is int


def test_record_works_where_a_read_is_impossible(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path)
    record(metrics, 1, loss=torch.empty((), device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        metrics.flush()
    metrics.close()


def test_recorded_values_survive_reuse_of_the_buffer_and_hold_no_graph(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path)
    weight = torch.ones((), requires_grad=True)
    loss = weight * 3
    kept = CpuBackend().execution.end_step({"loss": loss, "lr": 0.5})
    record(metrics, 1, loss=kept["loss"])
    with torch.no_grad():
        loss.zero_()  # what replaying a captured step does to its outputs
    assert kept["lr"] == 0.5
    assert not any(getattr(value, "requires_grad", False) for value in metrics._pending[0].values())
    assert metrics.flush()[0]["loss"] == 3.0


def test_due_at_the_interval_and_at_the_last_step(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path, interval=8)
    assert [step for step in range(1, 21) if metrics.due(step)] == [8, 16, 20]
    assert [s for s in range(1, 4) if open_metrics(tmp_path / "each", interval=1).due(s)] == [1, 2, 3]


def test_throughput_is_the_mean_of_the_interval_with_the_wait_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 103.0])  # reading waits three seconds for queued work
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: next(clock))
    metrics = open_metrics(tmp_path)
    record(metrics, 1, step_time=0.75, tokens=torch.tensor(1000))
    record(metrics, 2, step_time=0.25, tokens=torch.tensor(3000))
    lines = metrics.flush()
    assert [line["tokens_per_second"] for line in lines] == [1000.0, 1000.0]  # 4000 / (0.75 + 0.25 + 3)
    assert lines[0]["mfu"] == pytest.approx(6_000 * 1000 / 1e9)
    assert [line["step_time"] for line in lines] == [0.75, 0.25]
    assert metrics.flush() == []


@pytest.mark.parametrize("missing", ["flops_per_token", "peak_flops"])
def test_mfu_is_unknown_unless_model_and_chips_are_known(tmp_path: Path, missing: str) -> None:
    metrics = open_metrics(tmp_path, facts=replace(FACTS, **{missing: None}))
    record(metrics, 1)
    assert metrics.flush()[0]["mfu"] == "unknown"
    assert lines_of(tmp_path)[-1]["mfu"] == "unknown"


def test_other_ranks_learn_the_values_and_write_nothing(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path / "run", rank=3)
    record(metrics, 1, loss=torch.tensor(2.0))
    assert metrics.flush()[0]["loss"] == 2.0
    metrics.event("checkpoint", step=1)
    metrics.close()
    assert not (tmp_path / "run").exists()


def test_lines_are_strict_json_and_float_reads_the_texts_back(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path)
    record(metrics, 1, loss=torch.tensor(math.nan), grad_norm=torch.tensor(math.inf), skipped=torch.tensor(True))
    returned = metrics.flush()[0]
    metrics.event("evaluation", step=1, loss=-math.inf)
    assert math.isnan(returned["loss"])
    step, evaluation = lines_of(tmp_path)[-2:]
    assert (step["loss"], step["grad_norm"], evaluation["loss"]) == ("nan", "inf", "-inf")
    assert float(step["grad_norm"]) == math.inf
    assert step["skipped"] is True
    wanted = {"step", "time", "loss", "grad_norm", "lr", "tokens", "step_time", "tokens_per_second", "mfu"}
    assert wanted <= step.keys()


def test_the_start_event_holds_the_facts(tmp_path: Path) -> None:
    open_metrics(tmp_path).close()
    (start,) = events_of(tmp_path, "start")
    assert start["step"] == 0
    assert (start["parameters"], start["total_steps"], start["tokens_per_step"]) == (1_000, 20, 512)


def test_steps_must_rise_and_computed_names_are_taken(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path, start_step=0)
    record(metrics, 2)
    with pytest.raises(AssertionError, match="step 2 recorded after step 2"):
        record(metrics, 2)
    with pytest.raises(AssertionError, match="mfu"):
        record(metrics, 3, mfu=0.5)


def test_close_writes_nothing_more_and_may_be_repeated(tmp_path: Path) -> None:
    metrics = open_metrics(tmp_path)
    record(metrics, 1, loss=torch.empty((), device="meta"))  # a device that can no longer be read
    metrics.close()
    metrics.close()
    assert steps_of(tmp_path) == []


KILLED = """
import os, sys
from pathlib import Path
from accelbridge.train.metrics import Metrics, RunFacts
from accelbridge.train.metrics_config import MetricsConfig
facts = RunFacts(1, None, None, 20)
metrics = Metrics(Path(sys.argv[1]), MetricsConfig(interval=4), facts, rank=0, start_step=0)
for step in range(1, 15):
    metrics.record(step, loss=1.0, grad_norm=1.0, tokens=8, lr=0.1, step_time=0.1)
    if metrics.due(step):
        metrics.flush()
metrics.event("evaluation", step=12, loss=1.0)
os.kill(os.getpid(), 9)
"""


def test_one_line_per_step_over_a_kill_and_a_resume(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert process.returncode == -9
    assert steps_of(tmp_path) == list(range(1, 13))  # flushed, so written; 13 and 14 were pending
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 13, "lo')  # torn by the kill
    train(tmp_path, 9, 20)  # the newest checkpoint is of step 8
    assert steps_of(tmp_path) == list(range(1, 21))
    assert [event["step"] for event in events_of(tmp_path, "evaluation")] == [10, 15, 20]
    assert [event["step"] for event in events_of(tmp_path, "start")] == [0, 8]
    assert not (tmp_path / "metrics.jsonl.tmp").exists()


def test_resume_again_from_an_older_checkpoint_keeps_the_history(tmp_path: Path) -> None:
    train(tmp_path, 1, 10)
    train(tmp_path, 11, 14)
    train(tmp_path, 6, 20)
    assert steps_of(tmp_path) == list(range(1, 21))
    assert [event["step"] for event in events_of(tmp_path, "start")] == [0, 10, 5]


def test_resume_leaves_a_sound_file_untouched(tmp_path: Path) -> None:
    train(tmp_path, 1, 10)
    path = tmp_path / "metrics.jsonl"
    before = path.stat().st_ino
    train(tmp_path, 11, 12)
    assert path.stat().st_ino == before
    assert steps_of(tmp_path) == list(range(1, 13))


def test_resume_completes_a_last_line_without_its_newline_and_drops_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\n{"step": "x"}\n[1]\n{"step": 2}')
    open_metrics(tmp_path, start_step=2).close()
    assert steps_of(tmp_path) == [1, 2]
    assert "3 damaged line(s)" in caplog.text


def test_resume_without_a_file_begins_one(tmp_path: Path) -> None:
    train(tmp_path / "new", 11, 12)
    assert steps_of(tmp_path / "new") == [11, 12]


def test_a_new_run_in_an_old_directory_moves_the_old_lines_aside(tmp_path: Path) -> None:
    for last in (4, 3, 2):
        train(tmp_path, 1, last)
    assert steps_of(tmp_path) == [1, 2]
    kept = {path.name: len(path.read_text().splitlines()) for path in tmp_path.glob("metrics.*.jsonl")}
    assert kept == {"metrics.1.jsonl": 5, "metrics.2.jsonl": 4}  # steps and the start


def test_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        MetricsConfig(interval=0)


def test_tensorboard_files_hide_the_points_of_steps_done_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, 1, 10, tensorboard=True)
    train(tmp_path, 6, 12, tensorboard=True)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tags = board.Tags()["scalars"]
    assert {"train/loss", "train/lr", "train/tokens_per_second", "train/mfu", "evaluation/loss"} <= set(tags)
    assert not {"train/step", "train/time"} & set(tags)
    points = board.Scalars("train/loss")
    assert [point.step for point in points] == list(range(1, 13))
    assert points[3].value == pytest.approx(5.0 / 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_tensorboard_is_an_error_on_every_rank(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'accelbridge\[tensorboard\]'"):
        open_metrics(tmp_path, tensorboard=True, rank=rank)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------- progress

LINE = {
    "step": 120,
    "loss": 2.34561,
    "grad_norm": 1.234,
    "lr": 3e-4,
    "tokens_per_second": 12_345.6,
    "mfu": "unknown",
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the progress sees; assign to its element to let time pass."""
    from accelbridge.train import progress

    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_plain_progress_prints_one_line_per_update(clock: list[float]) -> None:
    out = io.StringIO()
    progress = make_progress(1000, 100, rank=0, stream=out)
    clock[0] = 20.0  # 20 steps in 20 s, 880 to go
    progress.update(LINE)
    progress.print("[evaluation] loss 2.5")
    progress.close()
    first, second = out.getvalue().splitlines()
    assert first == "step  120/1000  loss 2.3456  norm 1.234  lr 3.00e-04  12.3k tok/s  eta 14m40s"
    assert second == "[evaluation] loss 2.5"


def test_plain_progress_shows_mfu_and_values_that_are_not_finite(clock: list[float]) -> None:
    out = io.StringIO()
    make_progress(1000, 120, rank=0, stream=out).update(LINE | {"mfu": 0.412, "loss": math.nan})
    assert out.getvalue() == "step  120/1000  loss nan  norm 1.234  lr 3.00e-04  12.3k tok/s  mfu 41.2%  eta ?\n"


def test_eta_follows_the_recent_pace(clock: list[float]) -> None:
    out = io.StringIO()
    progress = make_progress(1000, 0, rank=0, stream=out)
    for step in range(1, 31):
        clock[0] = 500.0 + step  # the first step compiles for minutes
        progress.update({"step": step})
    assert out.getvalue().splitlines()[-1] == "step   30/1000  eta 16m10s"


def test_progress_goes_to_standard_output_under_capture(capsys: pytest.CaptureFixture[str]) -> None:
    make_progress(10, 0, rank=0).update({"step": 1, "loss": 1.0})
    make_progress(10, 0, rank=1).update({"step": 1, "loss": 1.0})
    assert capsys.readouterr().out.startswith("step  1/10  loss 1.0000  eta ")


@pytest.mark.parametrize("no_color", [True, False])
def test_live_progress_in_a_terminal(no_color: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    progress = make_progress(1000, 100, rank=0, stream=out)
    progress.update(LINE)
    progress.print("[bold]as it is[/bold]")
    progress.close()
    progress.close()
    text = out.getvalue()
    for part in ("120/1000", "loss 2.3456", "12.3k tok/s", "[bold]as it is[/bold]"):
        assert part in text
    assert ("\x1b[36m" in text) is not no_color


def test_dumb_terminals_and_forced_colour_get_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    piped = io.StringIO()
    make_progress(10, 0, rank=0, stream=piped).update({"step": 1})
    monkeypatch.setenv("TERM", "dumb")
    dumb = Terminal()
    make_progress(10, 0, rank=0, stream=dumb).update({"step": 1})
    assert "\x1b" not in piped.getvalue() + dumb.getvalue()
    assert dumb.getvalue().startswith("step  1/10  eta ")


def test_quantities_and_durations() -> None:
    quantities = {
        0.0: "0.00",
        9.996: "10.0",
        874.2: "874",
        999.7: "1.00k",
        12_345: "12.3k",
        999_950: "1.00M",
        7e9: "7.00G",
    }
    assert {x: quantity(x) for x in quantities} == quantities
    assert quantity(math.nan) == "nan"
    durations = {-3: "0s", 45.4: "45s", 59.6: "1m00s", 80: "1m20s", 7_500: "2h05m", 273_600: "3d04h"}
    assert {x: duration(x) for x in durations} == durations


# ----------------------------------------------------------------------------------------------------- report


def test_report_draws_a_picture_with_all_panels(tmp_path: Path) -> None:
    from matplotlib.image import imread

    run = tmp_path / "a$run"  # no formula
    train(run, 1, 12)
    train(run, 11, 20)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": "nan"}\n{"step": 22')
    (run / "plan.json").write_text(
        json.dumps({"contract": {"backend": "cpu", "chip": "x86_64", "layout": {"dp_shard": 2, "new": 1}}})
    )
    assert read_history(run).caption == "cpu · x86_64 · dp_shard 2, ZeRO 3"
    path = report(run)
    assert path == run / "report.png"
    pixels = imread(path)
    assert pixels.shape[:2] == (1110, 1650)
    colours, counts = np.unique((pixels[..., :3] * 255).round().reshape(-1, 3), axis=0, return_counts=True)
    seen = {"#{:02x}{:02x}{:02x}".format(*map(int, c)): n for c, n in zip(colours, counts, strict=True)}
    for drawn in (
        "BLUE",
        "ORANGE",
        "PURPLE",
        "TEAL",
        "RED",
    ):  # each panel, validation and the loss that is NaN
        assert seen.get(getattr(report_module, drawn), 0) > 20, drawn


def test_report_of_a_single_step_and_with_out(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, 1)
    out = tmp_path / "pictures" / "one.png"
    assert report(tmp_path / "run", out) == out
    assert out.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "run" / "report.png").exists()


def test_summary(tmp_path: Path) -> None:
    train(tmp_path, 1, 12)
    train(tmp_path, 11, 20)
    summary = summarise(read_history(tmp_path))
    assert (summary.steps, summary.total_steps, summary.restarts) == (20, 20, 1)
    assert (summary.first_loss, summary.last_loss) == (5.0, 0.25)
    assert (summary.best_validation_step, summary.best_validation_loss) == (20, 0.3)
    assert summary.median_tokens_per_second == pytest.approx(1024, rel=0.05)
    assert summary.median_mfu == pytest.approx(6_000 * 1024 / 1e9, rel=0.05)
    assert (summary.nonfinite_losses, summary.torn_last_line) == (0, False)


def run_command(*arguments: str) -> Any:
    import typer
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(report_command)
    return CliRunner().invoke(app, [*arguments])


def test_command_prints_a_summary(tmp_path: Path) -> None:
    facts = RunFacts(parameters=1, flops_per_token=None, peak_flops=None, total_steps=1_000)
    metrics = open_metrics(tmp_path, facts=facts)
    record(metrics, 1)
    record(metrics, 2, loss=math.nan)
    metrics.flush()
    result = run_command(str(tmp_path))
    assert result.exit_code == 0
    assert "steps      2 of 1,000" in result.output
    assert "loss       5.0000 -> 5.0000  (not finite in 1 step)" in result.output
    assert "validation none" in result.output
    assert "MFU unknown" in result.output
    as_json = json.loads(run_command(str(tmp_path), "--json", "--out", str(tmp_path / "x.png")).output)
    assert as_json["nonfinite_losses"] == 1
    assert as_json["median_mfu"] == "unknown"
    assert as_json["report"] == str(tmp_path / "x.png")


def test_report_names_what_is_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        report(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl"):
        report(tmp_path)
    open_metrics(tmp_path).close()
    with pytest.raises(DataError, match="holds no step yet"):
        report(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: expected a JSON object"):
        report(tmp_path)
    path.write_bytes(b'{"step": 1}\n')
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(DataError, match=r"plan\.json: expected the run's plan as JSON"):
        report(tmp_path)
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(DataError, match=r"plan\.json: expected a plan with its contract"):
        report(tmp_path)


def test_report_without_matplotlib_and_to_an_impossible_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 1, 2)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another --out"):
        report(tmp_path, tmp_path / "file" / "x.png")
    monkeypatch.setattr(report_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'accelbridge\[report\]'"):
        report(tmp_path)


def test_running_mean_takes_whole_windows_of_known_values() -> None:
    values = np.array([1.0, 2.0, math.nan, 4.0, 9.0])
    np.testing.assert_allclose(running_mean(values, 3), [math.nan, 1.5, 3.0, 6.5, math.nan])
    assert [smoothing_window(n) for n in (1, 59, 60, 1000, 10_000)] == [1, 1, 5, 21, 201]


def test_importing_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, accelbridge.cli.report, accelbridge.train.metrics_config, accelbridge.train.progress\n"
        "print(*sorted({'torch', 'matplotlib', 'tensorboard'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.stderr, result.returncode) == ("", "", 0)
