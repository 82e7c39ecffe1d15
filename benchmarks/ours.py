"""The Trainer as one side of a comparison: ``fit`` as it is, with a gate before each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bare_loop import build, start
from gate import Gate

from accelbridge.train.trainer import Trainer


class Gated(Trainer):
    """A Trainer that stands still where the controller says."""

    gate: Gate

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.gate(self.step)
        return super().train_step(*args, **kwargs)


def recipe(case: dict[str, Any]) -> dict[str, Any]:
    """The case as a recipe. With ``own_model``, the model is the recipe's, otherwise that of bare_loop.py."""
    config: dict[str, Any] = {
        "data": {"train": str(Path(case["folder"]) / "store"), "document_mask": case.get("documents", True)},
        "parallel": case["parallel"],
        "precision": {"compute": case["compute"]},
        "train": {key: case[key] for key in ("steps", "seed", "global_batch_size", "seq_len")},
        "optimizer": {key: case[key] for key in ("lr", "warmup_steps", "weight_decay", "clip_norm")},
        "metrics": {"interval": case["metrics_interval"]},
        "output": {"dir": case["output"]},
    }
    return config | ({"model": case["model"]} if case["own_model"] else {})


def main() -> None:
    case, rank, _ = start()
    model = None if case["own_model"] else build(case)
    trainer = Gated(recipe(case), model=model, backend=case.get("backend", "cpu"))
    trainer.gate = Gate(trainer.prepared.target.backend.device.synchronize)
    trainer.fit()
    losses: list[float] = []
    if rank == 0:
        lines = [json.loads(line) for line in (Path(case["output"]) / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "event" not in line]
    trainer.gate.finish(losses)


if __name__ == "__main__":
    main()
