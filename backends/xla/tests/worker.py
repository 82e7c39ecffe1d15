"""Scenes that need the XLA runtime, in a process of their own: it is started once per process, with its devices.

    python worker.py train FOLDER   |   python worker.py layouts FOLDER

Each writes FOLDER/found.json (and tensors beside it), which the tests read.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from accelbridge import ops
from accelbridge.backend import Precision, Request, World
from accelbridge.errors import NonFiniteError
from accelbridge.models.config import ModelConfig
from accelbridge.models.decoder import Decoder
from accelbridge.models.dropout import Dropout
from accelbridge.models.init import initial_values
from accelbridge.parallel.layout import Layout
from accelbridge.train.trainer import Trainer
from accelbridge_xla.backend import XlaBackend
from accelbridge_xla.vendor import sdk

HALF = 10
"""The step of the checkpoint from which runs are resumed."""
_2X2 = Layout(dp_shard=2, tp=2)
_SEQUENCE_PARALLEL = Layout(dp_shard=2, tp=2, zero=1, sequence_parallel=True)
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "2x2": (_2X2, {}),
    "replicated": (Layout(dp_replicate=2, dp_shard=2, zero=2), {}),
    "sequence_parallel": (_SEQUENCE_PARALLEL, {}),
    "uneven": (_2X2, {"vocab_size": 61}),
    "tied": (_2X2, {"tie_embeddings": True}),
    "dropout": (_2X2, {"dropout": 0.1}),
    "dropout, sequence_parallel": (_SEQUENCE_PARALLEL, {"dropout": 0.1}),
}
"""Layout and settings of the model; a vocabulary of 61 is divided by nothing."""


def main(scene: str, folder: Path) -> None:
    found = {"train": train, "layouts": layouts}[scene](folder)
    (folder / "found.json").write_text(json.dumps(found))


# ------------------------------------------------------------------------------------------------- training


def copy_half(folder: Path, source: str, target: str) -> None:
    """The run ``target`` starts with the checkpoint that ``source`` wrote half way."""
    where = f"checkpoints/step_{HALF}"
    shutil.copytree(folder / f"run-{source}" / where, folder / f"run-{target}" / where)


def counters() -> dict[str, int]:
    """Compilations so far, and calls of operations that fell back to the host."""
    metrics = sdk("debug.metrics")
    compiled = metrics.metric_data("CompileTime")
    fallbacks = {name: metrics.counter_value(name) for name in metrics.counter_names() if "aten::" in name}
    return {"compiled": compiled[0] if compiled else 0, **fallbacks}


def places_of(trainer: Trainer) -> dict[str, list[str]]:
    """Sharding of each parameter and of its moments, as the runtime says."""
    spec = sdk()._XLAC._get_xla_sharding_spec
    state = trainer.optimizer.state
    return {n: [spec(p), spec(state[p]["exp_avg"])] for n, p in trainer.model.named_parameters() if p.requires_grad}


class CountingTrainer(Trainer):
    """Notes the counters after each step."""

    def train_step(self, microbatches: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        values = super().train_step(microbatches)
        self.counters = [*getattr(self, "counters", []), counters()]
        return values


def train(folder: Path) -> dict[str, Any]:
    """Twenty steps at 2 x 2; the last ten again from our own checkpoint, and from one of two ranks of the CPU."""
    found: dict[str, Any] = {}
    for name, source in {"whole": None, "own": "whole", "from_cpu": "two_ranks"}.items():
        if source is not None:
            copy_half(folder, source, name)
        resume = "auto" if source is not None else "none"
        trainer = CountingTrainer(folder / f"{name}.json", backend="xla", resume=resume)
        found[f"{name}_start"] = trainer.step
        trainer.fit()
        if name == "whole":
            found |= {"counters": trainer.counters, "places": places_of(trainer)}
    return found | {"guarded": guarded(folder / "guarded.json")}


class NanTrainer(Trainer):
    """The loss of the third update is not a number. Keeps the parameters from before it."""

    before: list[torch.Tensor]

    def accumulate(self, microbatches: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        bad = self.step == 2
        if bad:
            self.before = parameters_of(self)
        total, targets = super().accumulate(microbatches)
        return total * float("nan") if bad else total, targets


def parameters_of(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().cpu() for p in trainer.model.parameters()]


def guarded(recipe: Path) -> dict[str, Any]:
    """How a run ends whose third update must not be made, with another one after it before anybody looks."""
    trainer = NanTrainer(recipe, backend="xla")
    try:
        trainer.fit()
    except NonFiniteError as error:
        pairs = zip(trainer.before, parameters_of(trainer), strict=True)
        unchanged = all(torch.equal(a, b) for a, b in pairs)
        return {"error": str(error), "step": trainer.step, "unchanged": unchanged}
    return {"error": "", "step": trainer.step}


# -------------------------------------------------------------------------------------------------- layouts


def batch(vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (4, 17), generator=generator)
    segments = (torch.arange(16) > 8).to(torch.int32).expand(4, 16).contiguous()
    keys = ops.dropout_keys(3, 5, torch.tensor([0, 7, 2**40, 2**62]))
    tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return {"tokens": tokens, "targets": targets, "segments": segments, "keys": keys}


def config(settings: dict[str, Any]) -> ModelConfig:
    sizes = {"vocab_size": 64, "dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 48}
    return ModelConfig.model_validate({**sizes, **settings})


def gradients(model: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    with ops.dropout_stream(data["keys"]):
        logits = model(data["tokens"], data["segments"])
        loss = ops.cross_entropy(logits.flatten(0, -2), data["targets"].flatten())
        loss.backward()
    return loss.detach()


def masks(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What each dropout of ``model`` will have set to zero in its next forward pass, by its name."""
    dropped: dict[str, torch.Tensor] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        module.register_forward_hook(lambda _, args, output: dropped.update({name: (output == 0) & (args[0] != 0)}))

    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            watch(name, module)
    return dropped


def layouts(folder: Path) -> dict[str, Any]:
    """Gradients, norm and dropout masks of one batch in each layout."""
    found: dict[str, Any] = {}
    serving = [i for i in XlaBackend().implementations() if i.op in ops.NAMES and i.supports(Request(i.op, "float32"))]
    ops.bind({i.op: i.load() for i in serving})
    for name, (layout, settings) in LAYOUTS.items():
        with torch.device("meta"):
            model = Decoder(config(settings))

        def values(name: str, shape: tuple[int, ...], rows: range, model: Decoder = model) -> torch.Tensor:
            return initial_values(0, name, shape, rows, model.initialiser(name))

        execution = XlaBackend().execution
        execution.start(None, World(), layout, 60.0, False)  # type: ignore[arg-type] (spmd on one host needs no store)
        execution.realise(model, model.sharding_spec(), Precision(), values)
        dropped = masks(model)
        loss = gradients(model, execution.place(batch(model.config.vocab_size)))
        norm = execution.clip_grad_norm(model, None)
        execution.end_step()
        grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        torch.save({"gradients": grads, "masks": {n: m.cpu() for n, m in dropped.items()}}, folder / f"{name}.pt")
        found[name] = {"loss": loss.item(), "norm": norm.item(), "layout": asdict(layout)}
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
