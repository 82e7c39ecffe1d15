"""Graph capture at microbatch 1: the Trainer's own steps with ``train.capture`` off and on, and a bare experiment,
forward and backward of a decoder's layers launched one by one and as a graph that was captured before.

What lies between the two of the bare experiment is what launching costs here: the most that capturing could save.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from arms import Ratio, head, row
from gpu.bench import Bench, sqnr_db
from gpu.gemm import milliseconds, number, ratio
from gpu.timing import Calls
from gpu.training import ROUNDS, RandomTokens, quick_values, recipe, timed_steps
from torch import Tensor, nn

from accelbridge import ops
from accelbridge.backend import Mask
from accelbridge.data.loader import Prefetcher
from accelbridge.models.config import ModelConfig
from accelbridge.models.decoder import Context, Layer
from accelbridge.models.requests import decoder_requests
from accelbridge.plan import PlanInputs, resolve
from accelbridge.train import trainer as trainer_module
from accelbridge.train.trainer import Trainer

TITLE = "Graph capture at microbatch 1"
EAGER, GRAPH = "launched one by one", "captured graph"
OFF, ON = "Trainer, capture off", "Trainer, capture on"
ACCUMULATED = 4
"""Microbatches of a step of the Trainer."""
ONE_DTYPE = {"compute": "bfloat16", "params": "bfloat16", "reduce": "bfloat16"}
"""What ``train.capture`` takes."""


class Stack(nn.Module):
    """The layers of a decoder: bfloat16 [1, S, M] to the same. Two stacks may share ``layers``."""

    def __init__(self, layers: nn.ModuleList, config: ModelConfig, sequence: int, device: torch.device) -> None:
        super().__init__()
        self.layers = layers
        positions_S = torch.arange(sequence, device=device)
        cos_SP, sin_SP = ops.rope_table(positions_S, config.resolved_head_dim, config.rope_theta)
        self._context = Context(cos_SP, sin_SP, Mask())

    def forward(self, x_BSM: Tensor) -> Tensor:
        for layer in self.layers:
            x_BSM = layer(x_BSM, self._context)
        return x_BSM


def measure(bench: Bench) -> None:
    config = bench.sizes.decoder
    layers = nn.ModuleList(_layer(bench, config) for _ in range(config.layers))
    for sequence in bench.sizes.stack_sequences:
        if bench.has_time(f"{sequence} tokens", 2 * bench.sizes.seconds + 2):
            with bench.attempt(f"{sequence} tokens"):
                _measure(bench, config, layers, sequence)
    del layers
    for sequence in bench.sizes.stack_sequences[:1]:
        _measure_trainer(bench, sequence)


def _measure_trainer(bench: Bench, sequence: int) -> None:
    off: dict[str, Any] | None = None
    for name, capture in ((OFF, False), (ON, True)):
        if bench.has_time(f"{sequence} tokens: {name}", 5 if off is None else 1.2 * off["seconds"]):
            with bench.attempt(f"{sequence} tokens: {name}"):
                found = _train(bench, name, sequence, capture)
                gc.collect()
                off = off or found
                faster = None if off is found else vars(Ratio.of(off["ms_rounds"], found["ms_rounds"]))
                same = None if off is found else found["losses"] == off["losses"]
                bench.row(**found, speed_over_off=faster, same_losses=same)


def _train(bench: Bench, name: str, sequence: int, capture: bool) -> dict[str, Any]:
    """Steps of :data:`ACCUMULATED` microbatches of one sequence each."""
    sizes, device, began = bench.sizes, bench.target.backend.device, time.monotonic()
    data = RandomTokens(sizes.decoder.vocab_size, sequence, 64)
    each = max(1, sizes.steps // ROUNDS)
    with ExitStack() as stack:
        settings = recipe(bench, "bfloat16", 1, stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-graphs-")))
        settings["precision"] = dict(ONE_DTYPE)
        settings["train"] |= {"seq_len": sequence, "global_batch_size": ACCUMULATED, "capture": capture}
        trainer = Trainer(settings, data=data, backend=bench.name)
        stack.callback(trainer.close)
        with mock.patch.object(trainer_module, "initialiser", quick_values):
            trainer.setup()
        batches = stack.enter_context(Prefetcher(trainer.loader, 0, sizes.warmup + ROUNDS * each))
        first, _, _ = timed_steps(trainer, batches, sizes.warmup, device.synchronize)
        rounds = [timed_steps(trainer, batches, each, device.synchronize) for _ in range(ROUNDS)]
        losses = [first.item(), rounds[-1][0].item()]
        attention = next(op.implementation for op in trainer.plan.ops if op.op == "attention")
    return {
        "what": name,
        "sequence": sequence,
        "attention": attention,
        "ms": 1e3 * sorted(s for _, s, _ in rounds)[ROUNDS // 2],
        "ms_rounds": [1e3 * s for _, s, _ in rounds],
        "host_ms": 1e3 * sorted(h for _, _, h in rounds)[ROUNDS // 2],
        "losses": losses,
        "seconds": time.monotonic() - began,
    }


def _layer(bench: Bench, config: ModelConfig) -> Layer:
    with torch.device("meta"):
        layer = Layer(config).to(torch.bfloat16)
    layer.to_empty(device=bench.device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    return layer


def _bind(bench: Bench, config: ModelConfig, sequence: int) -> dict[str, str]:
    """Make the ops those that the plan of such a decoder has; their names."""
    requests = decoder_requests(config, "bfloat16", sequence, document_mask=False)
    inputs = PlanInputs(requests=requests, layout={}, wire=())
    plan = resolve(bench.target.selection, bench.target.backend, bench.target.capabilities, inputs)
    plan.bind()
    return {choice.op: choice.implementation for choice in plan.ops}


def _measure(bench: Bench, config: ModelConfig, layers: nn.ModuleList, sequence: int) -> None:
    chosen = _bind(bench, config, sequence)
    x, grad = (bench.normal(1, sequence, config.dim) for _ in range(2))
    x.requires_grad_()
    stacks = {EAGER: Stack(layers, config, sequence, bench.device)}
    captured = _captured(bench, Stack(layers, config, sequence, bench.device), x, sequence)
    if captured is not None:
        stacks[GRAPH] = captured
    ways: dict[str, Calls | None] = {}
    for name, stack in stacks.items():
        calls = [partial(_step, stack, x, grad)]
        ways[name] = bench.working(f"{sequence} tokens: {name}", lambda calls=calls: calls)
    timings = bench.take_turns(ways)
    eager = timings.get(EAGER)
    with torch.no_grad():
        want = stacks[EAGER](x)
    for name, timing in timings.items():
        faster = None if eager is None or timing is eager else vars(Ratio.of(eager.rounds, timing.rounds))
        # A graph replays into the same memory, so it is run once more here; it takes no other path without gradients.
        noise = None if name == EAGER else sqnr_db(stacks[name](x).detach(), want)
        bench.row(
            what=name,
            sequence=sequence,
            layers=config.layers,
            dim=config.dim,
            attention=chosen["attention"],
            **timing.as_dict(),
            speed_over_eager=faster,
            sqnr_db=noise,
        )


def _captured(bench: Bench, stack: Stack, x: Tensor, sequence: int) -> Stack | None:
    """``stack`` as graphs of its forward and backward passes; None, with the reason said, where that cannot be had."""
    what = f"{sequence} tokens: {GRAPH}"
    module = torch.get_device_module(bench.device.type)
    capture: Callable[..., Stack] | None = getattr(module, "make_graphed_callables", None)
    if capture is None:
        bench.leave_out(what, f"torch.{bench.device.type} has no make_graphed_callables: it captures no graphs")
        return None
    with bench.attempt(what):
        return capture(stack, (x.detach().clone().requires_grad_(),))
    return None


def _step(stack: Stack, x: Tensor, grad: Tensor) -> None:
    for parameter in stack.parameters():
        parameter.grad = None
    x.grad = None
    stack(x).backward(grad)


# ------------------------------------------------------------------------------------------------------- tables


def table(rows: list[dict[str, Any]]) -> str:
    steps = [r for r in rows if "losses" in r]
    parts = [_table_of_layers([r for r in rows if "losses" not in r]), _table_of_steps(steps)]
    return "\n\n".join(filter(None, parts))


def _table_of_layers(rows: list[dict[str, Any]]) -> str:
    names = ("layers, forward and backward", "tokens", "attention", "ms", "host, ms", "speed over one by one")
    lines = [head(*names)] if rows else []
    for r in rows:
        faster = ratio(r["speed_over_eager"])
        lines.append(row(r["what"], r["sequence"], r["attention"], milliseconds(r), number(r["host_ms"]), faster))
    return "\n".join(lines)


def _table_of_steps(rows: list[dict[str, Any]]) -> str:
    names = (
        f"a step of {ACCUMULATED} microbatches",
        "tokens",
        "ms",
        "host, ms",
        "speed over off",
        "losses are those of off",
    )
    lines = [head(*names)] if rows else []
    for r in rows:
        same = {None: "", True: "yes, in all bits", False: "NO"}[r["same_losses"]]
        ms, host, faster = f"{r['ms']:.1f}", f"{r['host_ms']:.1f}", ratio(r["speed_over_off"])
        lines.append(row(r["what"], r["sequence"], ms, host, faster, same))
    return "\n".join(lines)
