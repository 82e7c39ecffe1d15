"""What fp8 does to a loss: the demo's model trained in bfloat16 and in fp8 with each scaling, otherwise the same.

    .venv/bin/python benchmarks/fp8_training.py --out benchmarks/results --plot docs/fp8_training.svg

Same initial values, data and order; products are emulated on the host, so nothing here is a speed. The last losses are
means over the last ``--last`` steps, of the same batches in each run: their ratio says what fp8 has changed,
without the noise of single batches. Needs the token store that ``make demo`` builds.
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

SCALINGS = ("tensor", "delayed", "row", "block", "mx")
LIMIT = 0.01
"""How far the last loss may be from that of bfloat16, relative."""
ROOT = Path(__file__).resolve().parents[1]
INK, MUTED, GRID = "#1f2933", "#66788a", "#e4e9ee"
COLOURS = ("#1f2933", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


def train(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Losses by step, and the loss of the validation data."""
    settings = {
        "data.train": options.data / "train",
        "data.validation": options.data / "validation",
        "output.dir": folder / name,
        "train.steps": options.steps,
        "optimizer.warmup_steps": options.steps // 10,
        "checkpoint.interval": options.steps,
        "precision.compute": "bfloat16" if name == "bfloat16" else "fp8",
    }
    if name != "bfloat16":
        settings |= {"precision.fp8.scaling": name, "backend.on_unsupported": "fallback"}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "accelbridge", "train", str(ROOT / "recipes" / "demo.yaml"), "--nproc", "1", *sets]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "event" not in line}
    validation = next(line["loss"] for line in reversed(lines) if line.get("event") == "evaluation")
    lost = [shares for line in lines if line.get("event") == "fp8" for shares in _worst(line["layers"])]
    return {
        "losses": [losses[step] for step in sorted(losses)],
        "validation": validation,
        "most_saturated": max((s for s, _ in lost), default=None),
        "most_underflowed": max((u for _, u in lost), default=None),
    }


def _worst(layers: dict[str, dict[str, list[float]]]) -> list[tuple[float, float]]:
    return [(shares[0], shares[1]) for roles in layers.values() for shares in roles.values()]


def table(runs: dict[str, dict[str, Any]], last: int) -> str:
    """One line a run."""
    lines = [
        head("run", "last loss", "over bfloat16", "within 1 %", "validation", "most saturated", "most underflowed")
    ]
    base = statistics.mean(runs["bfloat16"]["losses"][-last:])
    for name, run in runs.items():
        loss = statistics.mean(run["losses"][-last:])
        off = loss / base - 1
        shares = [run["most_saturated"], run["most_underflowed"]]
        texts = ["" if share is None else f"{share:.2g}" for share in shares]
        verdict = "" if name == "bfloat16" else ("yes" if abs(off) <= LIMIT else "NO")
        lines.append(row(name, f"{loss:.4f}", f"{off:+.3%}", verdict, f"{run['validation']:.4f}", *texts))
    return "\n".join(lines)


def plot(runs: dict[str, dict[str, Any]], out: Path) -> None:
    """Losses above, and below what each is off bfloat16's of the same step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    base = runs["bfloat16"]["losses"]
    for (name, run), colour in zip(runs.items(), COLOURS, strict=True):
        steps = range(1, len(run["losses"]) + 1)
        above.plot(steps, run["losses"], color=colour, linewidth=1.2, label=name)
        if name != "bfloat16":
            off = [100 * (a / b - 1) for a, b in zip(run["losses"], base, strict=True)]
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
    parser.add_argument("--last", type=int, default=10, help="steps whose losses are averaged")
    parser.add_argument("--data", type=Path, default=ROOT / "datasets" / "stdlib")
    parser.add_argument("--out", type=Path, help="folder for the results, for example benchmarks/results")
    parser.add_argument("--plot", type=Path, help="file for the curves, for example docs/fp8_training.svg")
    options = parser.parse_args()
    if not (options.data / "train").exists():
        parser.error(f"--data {options.data} asked; there is no token store; run 'make demo' first, which builds it")
    facts = machine() | {"ranks": 1}
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: train(name, options, Path(folder)) for name in ("bfloat16", *SCALINGS)}
    text = table(runs, options.last)
    print(text)
    if options.plot:
        plot(runs, options.plot)
    if options.out:
        date = time.strftime("%Y-%m-%d")
        title = f"The demo's model in bfloat16 and in fp8, {date}; {options.steps} steps, emulated on the host"
        write(options.out, f"fp8-training-{date}", {"date": date, "machine": facts, "runs": runs}, title, text, facts)


if __name__ == "__main__":
    main()
