"""Short runs under the spmd execution model, each with something that must be told, or nothing.

    python watch_worker.py FOLDER       writes FOLDER/found.json: by run, the counters after each step and its losses

The run's own log is in FOLDER/NAME/logs. All in one process: the runtime is started once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accelbridge import Trainer
from accelbridge_xla.watch import counters

STEPS, ROWS, LENGTHS = 6, 4, (24, 20, 12, 24, 23, 13)
MODEL = {"vocab_size": 16, "dim": 16, "layers": 1, "heads": 2, "ffn_dim": 24}
Extra = Callable[[Tensor, int], Any]
Trained = TypeVar("Trained", bound=Trainer)


def read(total: Tensor, _: int) -> float:
    return total.item()


def listed(total: Tensor, _: int) -> list[float]:
    return total.reshape(1).tolist()


def found(total: Tensor, _: int) -> Tensor:
    return torch.nonzero(total)  # how much it returns depends on values: torch_xla computes it on the host


def grown(total: Tensor, call: int) -> Tensor:
    return total.expand(call)  # another shape in each step


def nothing(total: Tensor, _: int) -> Tensor:
    return total


EXTRAS: dict[str, Extra] = {"nothing": nothing, "item": read, "tolist": listed, "nonzero": found, "grown": grown}


class Squares:
    """A loss that does something beside adding up squares."""

    def __init__(self, extra: Extra) -> None:
        self.extra, self.calls = extra, 0

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        self.calls += 1
        total = (model(batch["x"]) - batch["y"]).square().sum()
        beside = self.extra(total.detach(), self.calls)
        return total + beside.sum() * 0 if isinstance(beside, Tensor) else total

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.ones_like(batch["y"][:, 0]).sum()


class Points:
    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(6, generator=generator), "y": torch.randn(3, generator=generator)}


class Sentences:
    """Of other lengths in each batch."""

    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, MODEL["vocab_size"], (LENGTHS[index // ROWS] + 1,), generator=generator)
        return {"tokens": tokens[:-1], "targets": tokens[1:]}


class CountingTrainer(Trainer):
    """Notes the counters after each step."""

    counted: tuple[dict[str, int], ...] = ()

    def train_step(self, microbatches: list[dict[str, Tensor]]) -> dict[str, Any]:
        values = super().train_step(microbatches)
        self.counted = (*self.counted, counters())
        return values


def recipe(output: Path, backend: str) -> dict[str, dict[str, Any]]:
    return {
        "backend": {"name": backend},
        "train": {"steps": STEPS, "global_batch_size": ROWS, "seq_len": max(LENGTHS), "seed": 1},
        "data": {"shuffle": False},
        "metrics": {"interval": STEPS},
        "output": {"dir": str(output)},
    }


def lengths(output: Path, backend: str, kind: Callable[..., Trained]) -> Trained:
    """A language model, run over batches of several lengths."""
    trainer = kind(recipe(output, backend) | {"model": MODEL}, data=Sentences())
    trainer.fit()
    return trainer


def main(folder: Path) -> None:
    told: dict[str, Any] = {}
    for name, extra in EXTRAS.items():
        torch.manual_seed(0)
        run = CountingTrainer(recipe(folder / name, "xla"), model=nn.Linear(6, 3), data=Points(), loss=Squares(extra))
        run.fit()
        told[name] = run.counted
    told["lengths"] = lengths(folder / "lengths", "xla", CountingTrainer).counted
    (folder / "found.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
