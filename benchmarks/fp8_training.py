"""What fp8 does to a loss: the demo's model trained in bfloat16 and in fp8 with each scaling, otherwise the same.

    .venv/bin/python benchmarks/fp8_training.py --out benchmarks/results --plot docs/fp8_training.svg

Per seed the same initial values, data and order; products are emulated on the host, so nothing here is a speed. The
last losses are means over the last ``--last`` steps, of the same batches in each run. Any other rounding takes a run to
another of many ways down, so single ratios scatter: ``float32`` shows by how much, and what is held against the limit
is the mean over seeds. The slow emulations, block and mx, get one seed.

Needs the token store that ``make demo`` builds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from arms import end_on_sigterm, head, machine, row, write

BASE = "bfloat16"
SCALINGS = ("tensor", "delayed", "row", "block", "mx")
SLOW = ("block", "mx")
LIMIT = 0.01
"""How far the last loss may be from that of bfloat16, relative, in the mean over seeds."""
ROOT = Path(__file__).resolve().parents[1]
INK, MUTED, GRID = "#1f2933", "#66788a", "#e4e9ee"
COLOURS = ("#1f2933", "#9aa5b1", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def train(name: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Losses by step, and the loss of the validation data; of a run that ``folder`` holds already, its own."""
    output = folder / f"{name}-{seed}"
    if not (output / "checkpoints" / f"step_{options.steps}").exists():
        run(name, seed, options, output)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "event" not in line}
    validation = next(line["loss"] for line in reversed(lines) if line.get("event") == "evaluation")
    lost = [shares for line in lines if line.get("event") == "fp8" for shares in _worst(line["layers"])]
    return {
        "losses": [losses[step] for step in sorted(losses)],
        "validation": validation,
        "most_saturated": max((s for s, _ in lost), default=None),
        "most_underflowed": max((u for _, u in lost), default=None),
    }


def run(name: str, seed: int, options: argparse.Namespace, output: Path) -> None:
    """Train into ``output``."""
    settings = {
        "data.train": options.data / "train",
        "data.validation": options.data / "validation",
        "output.dir": output,
        "train.seed": seed,
        "train.steps": options.steps,
        "optimizer.warmup_steps": options.steps // 10,
        "checkpoint.interval": options.steps,
        "precision.compute": "fp8" if name in SCALINGS else name,
    }
    if name in SCALINGS:
        settings |= {"precision.fp8.scaling": name, "backend.on_unsupported": "fallback"}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "accelbridge", "train", str(ROOT / "recipes" / "demo.yaml"), "--nproc", "1", *sets]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _worst(layers: dict[str, dict[str, list[float]]]) -> list[tuple[float, float]]:
    return [(shares[0], shares[1]) for roles in layers.values() for shares in roles.values()]


Runs = dict[str, list[dict[str, Any]]]
"""By name, one for each seed."""


def table(runs: Runs, last: int) -> str:
    """One line for each precision."""
    lines = [
        head("run", "last loss", "over bfloat16", "by seed", "within 1 %", "validation", "saturated", "underflowed")
    ]
    for name, seeds in runs.items():
        off = [_last(run, last) / _last(base, last) - 1 for run, base in zip(seeds, runs[BASE], strict=False)]
        shares = [_most(seeds, "most_saturated"), _most(seeds, "most_underflowed")]
        verdict = ("yes" if abs(statistics.mean(off)) <= LIMIT else "NO") if name in SCALINGS else ""
        loss = statistics.mean(_last(run, last) for run in seeds)
        validation = statistics.mean(run["validation"] for run in seeds)
        by_seed = ", ".join(f"{each:+.2%}" for each in off)
        mean = f"{statistics.mean(off):+.2%}"
        lines.append(row(name, f"{loss:.4f}", mean, by_seed, verdict, f"{validation:.4f}", *shares))
    return "\n".join(lines)


def _last(run: dict[str, Any], last: int) -> float:
    return statistics.mean(run["losses"][-last:])


def _most(seeds: list[dict[str, Any]], key: str) -> str:
    """The largest share of any tensor of any layer."""
    found = [run[key] for run in seeds if run[key] is not None]
    return f"{max(found):.2g}" if found else ""


def mean_losses(seeds: list[dict[str, Any]]) -> list[float]:
    """By step, over seeds."""
    return [statistics.mean(losses) for losses in zip(*(run["losses"] for run in seeds), strict=True)]


def plot(runs: Runs, out: Path) -> None:
    """Mean losses above, and below what each is off bfloat16's of the same step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for (name, seeds), colour in zip(runs.items(), COLOURS, strict=True):
        losses, base = mean_losses(seeds), mean_losses(runs[BASE][: len(seeds)])
        steps = range(1, len(losses) + 1)
        above.plot(steps, losses, color=colour, linewidth=1.2, label=name)
        if name != BASE:
            off = [100 * (a / b - 1) for a, b in zip(losses, base, strict=True)]
            below.plot(steps, off, color=colour, linewidth=1.0)
    below.axhspan(-100 * LIMIT, 100 * LIMIT, color=GRID, zorder=0)
    above.set_ylabel("loss, nats a byte", color=MUTED)
    below.set_ylabel("% off bfloat16", color=MUTED)
    below.set_xlabel("step", color=MUTED)
    above.legend(frameon=False, ncols=3, labelcolor=INK)
    for ax in (above, below):
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelcolor=MUTED, length=0)
        ax.grid(axis="y", color=GRID)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--last", type=int, default=10, help="steps whose losses are averaged")
    parser.add_argument("--work", type=Path, help="folder that keeps the runs; those it holds are not run again")
    parser.add_argument("--data", type=Path, default=ROOT / "datasets" / "stdlib")
    parser.add_argument("--out", type=Path, help="folder for the results, for example benchmarks/results")
    parser.add_argument("--plot", type=Path, help="file for the curves, for example docs/fp8_training.svg")
    options = parser.parse_args()
    if not (options.data / "train").exists():
        parser.error(f"--data {options.data} asked; there is no token store; run 'make demo' first, which builds it")
    facts = machine() | {"ranks": 1}
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        names = (BASE, "float32", *SCALINGS)
        seeds = {name: range(1 if name in SLOW else options.seeds) for name in names}
        runs = {name: [train(name, seed, options, work) for seed in seeds[name]] for name in names}
    text = table(runs, options.last)
    print(text)
    if options.plot:
        plot(runs, options.plot)
    if options.out:
        date = time.strftime("%Y-%m-%d")
        about = f"{options.steps} steps, {options.seeds} seeds, emulated on the host"
        title = f"The demo's model in bfloat16 and in fp8, {date}; {about}"
        write(options.out, f"fp8-training-{date}", {"date": date, "machine": facts, "runs": runs}, title, text, facts)


if __name__ == "__main__":
    main()
