"""torch.compile of shard units: the same losses, one graph for all layers, and no compilation once it runs."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch.fx import traceback

from accelbridge import Trainer
from accelbridge.data.loader import Prefetcher
from tests import cli
from tests.ranks import Rank, run_ranks

STEPS = 3
RECOMPUTE = "selective" if hasattr(traceback, "annotate") else "full"
"""A torch without annotations refuses to compile selective recomputation."""
RUNS: dict[str, tuple[bool, str]] = {
    "eager": (False, "none"),
    "compiled": (True, RECOMPUTE),
}


def train_all(ctx: Rank, folder: Path, store: Path, validation: Path, compiler: str) -> dict[str, Any]:
    """Losses of training and evaluation after every step, graphs compiled by then, and names of the state."""
    ctx.launched()
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # Most of the time goes to the C++ compiler: plain loops and headers read once are quicker for so little code.
    torch._inductor.config.cpp.simdlen = 0
    torch._inductor.config.cpp_cache_precompile_headers = False
    torch.compile = partial(torch.compile, backend=compiler)  # this process is the test's own
    return {name: train(folder / compiler / name, store, validation, *run) for name, run in RUNS.items()}


def train(output: Path, store: Path, validation: Path, compiled: bool, recompute: str) -> Any:
    os.environ["TORCHELASTIC_RUN_ID"] = output.name
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings: dict[str, Any] = {"train": {"steps": STEPS, "microbatch_size": 2, "compile": compiled}}
    recipe = cli.recipe(output, store, memory={"recompute": recompute}, **settings)
    recipe["data"]["validation"] = str(validation)
    with Trainer(recipe) as trainer:
        trainer.setup()
        losses, graphs = [], []
        steps = Prefetcher(trainer.loader, 0, STEPS)
        for _, microbatches in steps:
            losses += [trainer.train_step(microbatches)["loss"].item(), trainer.evaluate()]
            trainer.step += 1
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        steps.close()
        notes = [note for note in trainer.plan.notes if note.startswith("compile")]
        return losses, graphs, list(trainer.model.state_dict()), notes


WORLDS = [pytest.param("aot_eager", 2, id="two ranks, no code generated")]
WORLDS += [pytest.param("inductor", 1, id="one rank, C++", marks=pytest.mark.full)]


@pytest.mark.parametrize(("compiler", "ranks"), WORLDS)
def test_compiled_units_give_the_same_losses_and_compile_once(
    compiler: str, ranks: int, tmp_path: Path, store: Path
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a few words to look at between the steps " * 16)
    done = cli.run("data", "build", str(tmp_path / "text"), str(tmp_path / "short"), "--suffix", ".txt")
    assert done.returncode == 0, done.stderr
    for rank in run_ranks(train_all, ranks, tmp_path, store, tmp_path / "short" / "train", compiler, timeout=600):
        eager, (losses, graphs, names, notes) = (rank[name] for name in RUNS)
        assert eager[1] == [0] * STEPS
        assert eager[3] == []
        assert losses == pytest.approx(eager[0], rel=1e-5)
        assert len(set(graphs)) == 1, "all is compiled in the first step"
        # One for training and one for evaluation; torch 2.9 compiles them for each of the two layers.
        assert graphs[0] == (4 if torch.__version__.startswith("2.9") else 2)
        assert names == eager[2]
        assert notes == ["compile: each shard unit is one graph of torch.compile"]
