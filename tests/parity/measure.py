"""Run rows on real processes."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accelbridge
from accelbridge import Trainer
from accelbridge.checkpoint.load import load
from accelbridge.checkpoint.manifest import complete
from tests import cli
from tests.parity.rows import FORCED, MODEL, SAVED, STEPS, Row
from tests.ranks import Rank, run_ranks
from tests.scenes import tensors
from tests.sim.backend import environment

Tensors = dict[str, Tensor]


@dataclass
class Run:
    """What one row did, on rank 0."""

    losses: dict[int, float]
    norms: dict[int, float]
    weights: Tensors
    forced_norms: dict[int, float] = field(default_factory=dict)
    forced_gradients: dict[int, Tensors] = field(default_factory=dict)
    same: str | None = None
    """How the run resumed on the same layout differs; "" if it doesn't."""
    moved_from: str = ""
    moved_losses: dict[int, float] = field(default_factory=dict)


def build_store(folder: Path) -> Path:
    """A token store of short documents of uneven length, so that every rank has another number of targets."""
    text = "".join(path.read_text() for path in sorted(Path(accelbridge.__file__).parent.glob("*.py")))
    lengths = torch.randint(4, 60, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    source = folder / "documents"
    source.mkdir(parents=True)
    for number, length in enumerate(lengths):
        (source / f"{number}.txt").write_text(text[40 * number : 40 * number + length])
    done = cli.run("data", "build", str(source), str(folder / "store"), "--suffix", ".txt")
    assert done.returncode == 0, done.stderr
    return folder / "store"


Fault = Callable[[], AbstractContextManager[Any]]
"""A deliberate fault, by patches; see :mod:`tests.parity.faults`."""


def measure(row: Row, folder: Path, store: Path, previous: str, fault: Fault = nullcontext) -> Run:
    """Run one row on this rank; ``previous`` names the row whose checkpoint it takes over ("": none)."""
    own, resumed = folder / row.name, folder / f"{row.name}, resumed"
    with fault():
        _fit(row, own, store)
        run = Run(*_trajectory(own), weights=_weights(own))
        if "forced" in row.parts:
            with _trainer(row, folder / f"{row.name}, forced", store) as trainer:
                for step in FORCED:
                    run.forced_norms[step], run.forced_gradients[step] = _forced(trainer, folder / row.reference, step)
        if "same" in row.parts:
            _fit(row, resumed, store, resume=checkpoint(own, SAVED))
            run.same = _difference(resumed, own)
        if "moved" in row.parts and previous:
            moved = folder / f"{row.name}, moved"
            _fit(row, moved, store, resume=checkpoint(folder / previous, SAVED))
            run.moved_from, run.moved_losses = previous, _trajectory(moved)[0]
    return run


def _trainer(row: Row, output: Path, store: Path, resume: str | Path = "none") -> Trainer:
    sections = {name: dict(values) for name, values in row.sections.items()}
    sections["backend"] = {"name": "cpu", **sections.get("backend", {})}  # the simulated ones would be preferred
    sections["checkpoint"] = {"interval": 5, "keep": 9, "asynchronous": False}
    recipe = cli.recipe(output, store, **sections)
    recipe["model"] = {**MODEL, **sections.get("model", {})}
    os.environ["TORCHELASTIC_RUN_ID"] = output.name
    own = _TorchDropout() if row.torch_dropout else None
    if own is not None:
        del recipe["model"]
    trainer = Trainer(recipe, model=own, resume=resume)
    trainer.setup()
    return trainer


class _TorchDropout(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Embedding(MODEL["vocab_size"], 16), nn.Dropout(0.2), nn.Linear(16, MODEL["vocab_size"]))


def _fit(row: Row, output: Path, store: Path, resume: str | Path = "none") -> None:
    with _trainer(row, output, store, resume) as trainer:
        trainer.fit()


def _forced(trainer: Trainer, reference: Path, step: int) -> tuple[float, Tensors]:
    """Norm and gradients of one step from the reference's state."""
    if step:
        state = {name: t for name, t in trainer._state().items() if not name.startswith("rng.")}
        load(checkpoint(reference, step), state, trainer.execution.control_group)
        trainer.execution.load_state(trainer.model, trainer.optimizer, state)
    trainer.step = step
    return gradients_of(trainer, trainer.loader.step(step))


def gradients_of(trainer: Trainer, microbatches: list[Tensors]) -> tuple[float, Tensors]:
    """Norm and gradients (as the optimizer meets them, clipped) of a step, which is done."""
    found: Tensors = {}
    with _before(trainer.optimizer, lambda: found.update(_gradients(trainer.model))):
        values = trainer.train_step(microbatches)
    return float(values["grad_norm"]), found


@contextmanager
def _before(optimizer: torch.optim.Optimizer, do: Callable[[], None]) -> Iterator[None]:
    handle = optimizer.register_step_pre_hook(lambda *_: do())
    try:
        yield
    finally:
        handle.remove()


def _gradients(model: nn.Module) -> Tensors:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on the host."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().cpu().clone()


def relative(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    """``||ours - theirs|| / max(||theirs||, floor)`` in float64."""
    a, b = ours.double(), theirs.double()
    return float((a - b).norm() / b.norm().clamp(min=max(floor, torch.finfo(torch.float64).tiny)))


def whole_norm(gradients: Tensors) -> float:
    """The 2-norm of all gradients together."""
    return math.sqrt(sum(float(tensor.double().norm()) ** 2 for tensor in gradients.values()))


def _trajectory(output: Path) -> tuple[dict[int, float], dict[int, float]]:
    steps = cli.steps_of(output)
    return {s: line["loss"] for s, line in steps.items()}, {s: line["grad_norm"] for s, line in steps.items()}


def checkpoint(output: Path, step: int) -> Path:
    return next(path for path in complete(output / "checkpoints") if path.name == f"step_{step}")


def _weights(output: Path) -> Tensors:
    return {name: t for name, t in tensors(checkpoint(output, STEPS)).items() if name.startswith("model.")}


def _difference(ours: Path, theirs: Path) -> str:
    """The first thing in which two runs that should be equal bit by bit are not."""
    losses, expected = _trajectory(ours)[0], _trajectory(theirs)[0]
    if wrong := [step for step, loss in losses.items() if loss != expected[step]]:
        return f"loss of step {wrong[0]}"
    a, b = tensors(checkpoint(ours, STEPS)), tensors(checkpoint(theirs, STEPS))
    return next((name for name in b if name not in a or not torch.equal(a[name], b[name])), "")


# ------------------------------------------------------------------------------------------------- many rows

Work = list[tuple[Row, str, Fault]]
"""Row, the row whose checkpoint it takes over, and its fault."""


def measure_all(ctx: Rank, folder: Path, store: Path, work: Work, simulated: bool) -> dict[str, Run]:
    """One rank of several rows, one after the other in the same processes."""
    ctx.launched()
    if simulated:
        sys.path.insert(0, str(folder / "site"))
        os.environ |= environment(folder)
    runs = {row.name: measure(row, folder, store, previous, fault) for row, previous, fault in work}
    return runs if ctx.rank == 0 else {}


def run_rows(
    rows: Sequence[Row],
    folder: Path,
    store: Path,
    faults: Mapping[str, Fault] | None = None,
    simulated: bool = False,
) -> dict[str, Run]:
    """Run rows, those of one device first, since they are the references; ``faults`` by row. ``simulated``: the
    simulated backends can be found in ``folder / "site"``."""
    runs: dict[str, Run] = {}
    last: dict[str, str] = {}
    for devices in sorted({row.devices for row in rows}):
        work: Work = []
        for row in (row for row in rows if row.devices == devices):
            work.append((row, last.get(row.reference, ""), (faults or {}).get(row.name, nullcontext)))
            if not faults and "moved" in row.parts:
                last[row.reference] = row.name
        runs |= run_ranks(measure_all, devices, folder, store, work, simulated, timeout=900)[0]
    return runs
