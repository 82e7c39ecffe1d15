"""What ``accelbridge report RUN`` shows: one picture and a few lines about a run, from the files that it wrote.

Reads ``RUN/metrics.jsonl`` (see ``accelbridge.train.metrics``) and, for the caption, ``RUN/plan.json`` if it
is there. Works while the run goes on and after it was killed. Loads no torch, and matplotlib only to draw.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from accelbridge.errors import ConfigError, DataError
from accelbridge.parallel.layout import Layout
from accelbridge.train.incidents import Incidents, incident_rows, incidents, time_split, time_table
from accelbridge.train.metrics import METRICS_FILE, UNKNOWN, parse_line
from accelbridge.train.progress import quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

INK, MUTED, GRID = "#1f2733", "#6b7585", "#e6e9ef"
BLUE, ORANGE, TEAL, PURPLE, RED = "#2563c9", "#e07b1a", "#12877f", "#7b4fc4", "#c8323c"


def report(run: Path, out: Path | None = None) -> Path:
    """Draw the metrics of ``run`` to ``out`` (default ``RUN/report.png``) and return the path.

    Raises ``DataError`` if the run has no readable metrics, ``ConfigError`` if matplotlib isn't installed or
    ``out`` can't be written.
    """
    return draw(read_history(run), _default(run, out))


def _default(run: Path, out: Path | None) -> Path:
    return run / "report.png" if out is None else out


# ---------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class History:
    """What the files of a run tell. ``steps`` and ``evaluations`` are lines, in the order of their steps."""

    run: Path
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    restarts: list[int]
    """For each start but the first, the step after which the run went on."""
    facts: dict[str, Any]
    """The ``RunFacts`` of the last start; empty if no start was written."""
    caption: str
    torn: bool
    """The last line is incomplete: it is being written, or the run was killed while it was."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """All event lines, in the order of the file."""

    def column(self, name: str) -> NDArray[np.float64]:
        """Values of ``name`` by step, (steps,); NaN where a line has no such number."""
        return np.array([number(line.get(name)) for line in self.steps])

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The step numbers, (steps,)."""
        return np.array([line["step"] for line in self.steps])


def number(value: Any) -> float:
    """A value of a line as a float: also the texts "nan", "inf", "-inf"; NaN for what isn't a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def read_history(run: Path) -> History:
    """Read what ``run`` wrote. Raises ``DataError`` if that isn't there, is damaged, or holds no step yet."""
    lines, torn = _read_lines(run)
    steps = {line["step"]: line for line in lines if "event" not in line}
    if not steps:
        raise DataError(
            f"asked to report on {run}, but its {METRICS_FILE} holds no step yet: wait for the first flush "
            "(metrics.interval steps), or look into the run's log for why it stopped"
        )
    starts = [line for line in lines if line.get("event") == "start"]
    resumes = starts[1:] or [line for line in lines if line.get("event") in ("resume", "restart")]
    events = [line for line in lines if "event" in line]
    evaluations = [line for line in events if line["event"] == "evaluation" and "step" in line]
    return History(
        run=run,
        steps=[steps[step] for step in sorted(steps)],
        evaluations=sorted(evaluations, key=lambda line: line["step"]),
        restarts=[int(line.get("step", 0)) for line in resumes],
        facts=starts[-1] if starts else {},
        caption=_caption(run / "plan.json"),
        torn=torn,
        events=events,
    )


def _read_lines(run: Path) -> tuple[list[dict[str, Any]], bool]:
    """The lines of the run's metrics, and whether an incomplete last one was left out."""
    path = run / METRICS_FILE
    if not run.is_dir():
        raise DataError(f"asked to report on {run}, but there is no such directory: name a run's output directory")
    try:
        *whole, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise DataError(
            f"asked to report on {run}, but it holds no {METRICS_FILE}: name the output directory of a run "
            "that has started training"
        ) from None
    except OSError as error:
        raise DataError(
            f"asked to report on {run}, but {path} cannot be read ({error.strerror}): "
            "check its permissions, or copy the run"
        ) from error
    lines = [parse_line(raw) for raw in whole]
    if None in lines:
        raise DataError(
            f"{path}, line {lines.index(None) + 1}: expected a JSON object of a step or an event, found "
            f"{whole[lines.index(None)][:60]!r}: resume the run, which repairs the file, or delete that line"
        )
    return [line for line in lines if line is not None], bool(rest)


def _caption(path: Path) -> str:
    """Backend, chip and layout as far as the contract in ``plan.json`` names them; "" without the file."""
    if not path.exists():
        return ""
    try:
        plan = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: expected the run's plan as JSON, found {error}: restore the file, "
            "or move it away to report without it"
        ) from error
    contract = plan.get("contract") if isinstance(plan, dict) else None
    if not isinstance(contract, dict):
        raise DataError(f"{path}: expected a plan with its contract, found neither: move the file away")
    layout = contract.get("layout")
    texts = [contract.get("backend"), contract.get("chip"), _layout_text(layout) if layout else None]
    return " · ".join(text for text in texts if isinstance(text, str) and text)


def _layout_text(degrees: dict[str, Any]) -> str:
    # Names that this release doesn't know are left out: the plan may be a newer release's.
    known = {field.name for field in fields(Layout)}
    return Layout(**{name: degree for name, degree in degrees.items() if name in known}).describe()


# ---------------------------------------------------------------------------------------------------- summary


@dataclass(frozen=True)
class Summary:
    """The run in a few numbers; None where nothing is known. Losses that aren't finite are only counted."""

    run: str
    steps: int
    """The last step done."""
    total_steps: int | None
    first_loss: float | None
    last_loss: float | None
    best_validation_loss: float | None
    best_validation_step: int | None
    median_tokens_per_second: float | None
    median_mfu: float | str
    """0..1, or "unknown"."""
    restarts: int
    nonfinite_losses: int
    torn_last_line: bool
    incidents: Incidents
    """What a guard or a watch reported."""
    time_split: dict[str, float]
    """Mean host seconds per step by part."""


def summarise(history: History) -> Summary:
    """Sum a run up."""
    losses = history.column("loss")
    finite = losses[np.isfinite(losses)].tolist()
    best = min(_validation(history), key=lambda point: point[1], default=(None, None))
    mfu = _median(history.column("mfu"))
    return Summary(
        run=str(history.run),
        steps=int(history.numbers[-1]),
        total_steps=history.facts.get("total_steps"),
        first_loss=finite[0] if finite else None,
        last_loss=finite[-1] if finite else None,
        best_validation_loss=best[1],
        best_validation_step=best[0],
        median_tokens_per_second=_median(history.column("tokens_per_second")),
        median_mfu=UNKNOWN if mfu is None else mfu,
        restarts=len(history.restarts),
        nonfinite_losses=len(losses) - len(finite),
        torn_last_line=history.torn,
        incidents=incidents(history.events, history.steps),
        time_split=time_split(history.steps),
    )


def _validation(history: History) -> list[tuple[int, float]]:
    """(step, loss) of each evaluation whose loss is finite."""
    points = [(line["step"], number(line.get("loss"))) for line in history.evaluations]
    return [point for point in points if math.isfinite(point[1])]


def _median(values: NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)].tolist()
    return median(known) if known else None


def as_text(history: History, summary: Summary, path: Path) -> str:
    rows = [
        ("run", f"{summary.run}" + (f"  ({history.caption})" if history.caption else "")),
        ("steps", _steps_text(summary)),
        ("loss", _loss_text(summary)),
        ("validation", _validation_text(history, summary)),
        ("speed", _speed_text(summary)),
        *incident_rows(summary.incidents, history.restarts),
        ("report", str(path)),
    ]
    return "\n".join([*(f"{name:<11}{text}" for name, text in rows), *time_table(summary.time_split)])


def _steps_text(summary: Summary) -> str:
    total = f" of {summary.total_steps:,}" if summary.total_steps else ""
    restarts = f", {_plural(summary.restarts, 'restart')}" if summary.restarts else ""
    torn = ", last line incomplete (left out)" if summary.torn_last_line else ""
    return f"{summary.steps:,}{total}{restarts}{torn}"


def _loss_text(summary: Summary) -> str:
    if summary.first_loss is None:
        return f"none finite in {_plural(summary.nonfinite_losses, 'step')}"
    bad = summary.nonfinite_losses
    not_finite = f"  (not finite in {_plural(bad, 'step')})" if bad else ""
    return f"{summary.first_loss:.4f} -> {summary.last_loss:.4f}{not_finite}"


def _validation_text(history: History, summary: Summary) -> str:
    if summary.best_validation_loss is None:
        return "none"
    best = f"best {summary.best_validation_loss:.4f} at step {summary.best_validation_step:,}"
    return f"{best}, last {_validation(history)[-1][1]:.4f}"


def _speed_text(summary: Summary) -> str:
    rate = summary.median_tokens_per_second
    speed = UNKNOWN if rate is None else f"{quantity(rate)} tok/s (median)"
    return f"{speed}, MFU {_mfu_text(summary)}"


def _mfu_text(summary: Summary) -> str:
    return summary.median_mfu if isinstance(summary.median_mfu, str) else f"{summary.median_mfu:.1%}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


# ---------------------------------------------------------------------------------------------------- drawing


def draw(history: History, out: Path) -> Path:
    """Draw the run as a PNG of 1650 x 1110 pixels and return ``out``. Errors as :func:`report`."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"asked to draw {out}, but matplotlib is not installed: run pip install 'accelbridge[report]'"
        )
    figure = _figure(history)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(
            f"asked to draw {out}, but it cannot be written ({error.strerror}): choose another --out"
        ) from error
    return out


def _figure(history: History) -> Figure:
    # Figure without pyplot: no global state, no window system, and savefig renders PNG with Agg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.4), facecolor="white")
    grid = figure.add_gridspec(2, 3, height_ratios=(1.75, 1), hspace=0.34, wspace=0.24)
    grid.update(left=0.06, right=0.975, top=0.84, bottom=0.06)
    _draw_header(figure, history)
    loss = figure.add_subplot(grid[0, :])
    speed, norm, rate = (figure.add_subplot(grid[1, column]) for column in range(3))
    _style(loss, history, ticks=10)
    for ax in (speed, norm, rate):
        _style(ax, history, ticks=5)
    _draw_loss(loss, history)
    _draw_throughput(speed, history)
    _draw_norm(norm, history)
    _draw_rate(rate, history)
    return figure


def _draw_header(figure: Figure, history: History) -> None:
    summary = summarise(history)
    parameters = history.facts.get("parameters")
    rate = summary.median_tokens_per_second
    parts = [
        history.caption,
        f"{quantity(parameters)} parameters" if isinstance(parameters, int) else "",
        f"step {_steps_text(summary)}",
        "" if rate is None else f"median {quantity(rate)} tok/s",
        f"MFU {_mfu_text(summary)}",
    ]
    name = history.run.resolve().name
    text = "   ·   ".join(part for part in parts if part)
    # parse_math: a "$" in a directory's name is no formula
    figure.text(0.06, 0.958, name, size=16, weight="bold", color=INK, va="center", parse_math=False)
    figure.text(0.06, 0.917, text, size=9.5, color=MUTED, va="center", parse_math=False)


def _style(ax: Axes, history: History, ticks: int) -> None:
    """What all panels share: quiet axes, a light grid, the range of steps, and a mark at each restart."""
    from matplotlib.ticker import MaxNLocator

    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(MUTED)
    ax.tick_params(length=0, labelsize=8.5, labelcolor=MUTED)
    ax.grid(axis="y", color=GRID, linewidth=0.9)
    ax.set_axisbelow(True)
    ax.set_xlim(0, max(1, int(history.numbers[-1])))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=ticks, integer=True))
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    for step in set(history.restarts):
        ax.axvline(step, **_RESTART)


_RESTART: dict[str, Any] = {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (2, 3)), "zorder": 1}


def _title(ax: Axes, text: str, note: str) -> None:
    ax.set_title(text, loc="left", size=10.5, weight="bold", color=INK, pad=9)
    ax.set_title(note, loc="right", size=8.5, color=MUTED, pad=9)


def _draw_loss(ax: Axes, history: History) -> None:
    _draw_smoothed(ax, history, "loss", BLUE)
    if points := _validation(history):
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.8}
        steps, losses = zip(*points, strict=True)
        ax.plot(
            steps,
            losses,
            "o-",
            color=ORANGE,
            markersize=5,
            linewidth=1.1,
            label="validation",
            zorder=4,
            **edge,
        )
    if history.restarts:
        ax.plot([], [], label="restart", **_RESTART)
    ax.legend(
        loc="upper right",
        ncols=5,
        handlelength=1.6,
        fontsize=9,
        labelcolor=INK,
        edgecolor="none",
        framealpha=0.9,
    )
    _title(ax, "Loss", "by step (optimizer update)")


def _draw_throughput(ax: Axes, history: History) -> None:
    ax.plot(history.numbers, history.column("tokens_per_second"), _marker(history), color=BLUE, linewidth=1.4)
    ax.set_ylim(bottom=0)  # from zero, so that small variation looks small
    ax.yaxis.set_major_formatter(lambda x, _: quantity(x) if x else "0")
    _title(ax, "Tokens per second", "by interval")


def _draw_norm(ax: Axes, history: History) -> None:
    window = _draw_smoothed(ax, history, "grad_norm", PURPLE)
    ax.set_ylim(bottom=0)
    _title(ax, "Gradient norm", f"mean of {window} steps" if window > 1 else "")


def _draw_rate(ax: Axes, history: History) -> None:
    ax.plot(history.numbers, history.column("lr"), _marker(history), color=TEAL, linewidth=1.6)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda x, _: f"{x:.1e}" if x else "0")
    _title(ax, "Learning rate", "")


def _draw_smoothed(ax: Axes, history: History, name: str, color: str) -> int:
    """The raw values thin and pale, their running mean over them, red ticks along the bottom where a value
    isn't finite (a gap in a line is easily overlooked); returns the window in steps."""
    steps, values = history.numbers, history.column(name)
    bad = ~np.isfinite(values)
    values[bad] = np.nan
    window = smoothing_window(len(values))
    raw: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.4} if window > 1 else {"linewidth": 1.6}
    ax.plot(steps, values, _marker(history), color=color, label="each step", zorder=2, **raw)
    if window > 1:
        mean = running_mean(values, window)
        ax.plot(steps, mean, color=color, linewidth=1.9, label=f"mean of {window} steps", zorder=3)
    if bad.any():
        ax.vlines(steps[bad], 0, 0.04, color=RED, label="not finite", transform=ax.get_xaxis_transform())
    return window


def _marker(history: History) -> str:
    """A line through one point would be invisible."""
    return "o-" if len(history.steps) == 1 else "-"


def smoothing_window(steps: int) -> int:
    """Steps of the running mean: odd, about 2 % of the run; 1 (none) for fewer than 60 steps."""
    return 1 if steps < 60 else 2 * (max(5, round(steps * 0.02)) // 2) + 1


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Centred mean over ``window`` (odd, at most n) values, (n,) -> (n,).

    NaN values are left out. The first and last ``window // 2`` results are NaN: a shorter or shifted window
    there would show a trend that isn't in the data.
    """
    known = np.isfinite(values)
    ones = np.ones(window)
    total = np.convolve(np.where(known, values, 0.0), ones, mode="valid")
    count = np.convolve(known, ones, mode="valid")
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return np.pad(mean, window // 2, constant_values=np.nan)
