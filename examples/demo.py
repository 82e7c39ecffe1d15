"""Train about a million parameters on the Python standard library's source, on two CPU processes with FSDP2.

    make demo            builds the data, prints the plan, trains, is killed on the way, resumes and finishes
    make demo DEMO=--short

Everything goes through the ``accelbridge`` command, as a user would type it. Beside the held-out loss stands that
of a bigram model fitted here on the same training bytes: what a table of byte pairs already knows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from accelbridge.checkpoint.manifest import complete
from accelbridge.data.store import TokenStore
from accelbridge.train.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipes/demo.yaml"
SHORT_STEPS = 60
ACCELBRIDGE = [sys.executable, "-m", "accelbridge"]


def main() -> None:
    """Run the demo; exits non-zero if training did not beat the bigram model by ``--margin``."""
    options = _options()
    os.chdir(ROOT)
    began = time.monotonic()
    settings = ["--set", f"train.steps={SHORT_STEPS}", "--set", "checkpoint.interval=20"] if options.short else []
    config = TrainConfig.load(RECIPE, settings[1::2])
    assert config.data.train is not None
    assert config.data.validation is not None
    output = Path(config.output.dir)
    if output.exists():  # an earlier demo: this folder belongs to it, see recipes/demo.yaml
        shutil.rmtree(output)
    data = Path(config.data.train).parent
    if not data.exists():
        build_corpus(data)

    train = [*ACCELBRIDGE, "train", RECIPE, "--backend", "cpu", "--nproc", "2", *settings]
    train_until_killed(train, output)
    say("resuming from the newest checkpoint")
    subprocess.run([*train, "--resume", "auto"], check=True)
    report = json.loads(run("report", str(output), "--json"))

    bigram = bigram_loss(TokenStore(config.data.train), TokenStore(config.data.validation))
    loss = validation_loss(output)
    say("done")
    print(f"held-out loss   {loss:.3f} nats per byte; bigram model {bigram:.3f}; {bigram - loss:.3f} below it")
    print(f"throughput      {report['median_tokens_per_second']:,.0f} tokens/s (median)")
    print(f"time            {time.monotonic() - began:.0f} s in all")
    print(f"picture         {report['report']}")
    if not options.short and bigram - loss < options.margin:
        sys.exit(f"the model should end at least {options.margin} nats per byte below the bigram model")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help=f"{SHORT_STEPS} steps: shows that it works, learns little")
    parser.add_argument("--margin", type=float, default=0.4, help="nats per byte to be better than the bigram model")
    return parser.parse_args()


def say(text: str) -> None:
    print(f"\n--- {text}", flush=True)


def run(*args: str) -> str:
    return subprocess.run([*ACCELBRIDGE, *args], check=True, stdout=subprocess.PIPE, text=True).stdout


def build_corpus(out: Path) -> None:
    """Token stores from the standard library of the Python that runs this."""
    say("building the data")
    source = sysconfig.get_paths()["stdlib"]
    arguments = ["data", "build", source, str(out), "--suffix", ".py", "--validation-fraction", "0.01"]
    for name in ("site-packages", "test", "tests", "idle_test"):
        arguments += ["--exclude", name]
    subprocess.run([*ACCELBRIDGE, *arguments], check=True)


def train_until_killed(command: list[str], output: Path) -> None:
    """Start training and SIGKILL every process of it shortly after a checkpoint is there."""
    say("training, to be killed after its second checkpoint")
    process = subprocess.Popen(command)
    try:
        while process.poll() is None and len(complete(output / "checkpoints")) < 2:
            time.sleep(0.1)
        if process.returncode is not None:
            sys.exit(f"training ended with code {process.returncode} before it could be killed")
        time.sleep(0.5)  # somewhere in a later step
    finally:
        if process.poll() is None:
            root = psutil.Process(process.pid)
            for victim in [*root.children(recursive=True), root]:
                victim.kill()
        process.wait()
    say(f"killed; complete checkpoints: {', '.join(p.name for p in complete(output / 'checkpoints'))}")


def validation_loss(output: Path) -> float:
    """Held-out loss in nats per target, from the last evaluation of the run."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line.get("event") == "evaluation"][-1]


def bigram_loss(train: TokenStore, validation: TokenStore) -> float:
    """Held-out loss in nats per byte of a bigram model with add-one smoothing, fitted on all training bytes."""
    vocabulary = train.vocab_size
    pairs = pair_counts(train, vocabulary)
    log_probability = np.log(pairs + 1.0) - np.log(pairs.sum(1, keepdims=True) + vocabulary)
    held_out = pair_counts(validation, vocabulary)
    return float(-(held_out * log_probability).sum() / held_out.sum())


def pair_counts(store: TokenStore, vocabulary: int) -> np.ndarray:
    """How often token b follows token a within a document, float64 [a, b]; the end-of-document token is a b only."""
    tokens = store.window(0, store.tokens)
    inside = tokens[:-1] != store.index.eod
    codes = tokens[:-1][inside] * vocabulary + tokens[1:][inside]
    return np.bincount(codes, minlength=vocabulary**2).reshape(vocabulary, vocabulary).astype(np.float64)


if __name__ == "__main__":
    main()
