"""A decoder of 1.1 billion parameters trained by the Trainer's own steps: bfloat16, and fp8 with a scale per tensor.

Tokens are random and the first values come from a short list: nothing is learned here, and the time of a step does not
depend on it. No compilation, no recomputation, one device.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from arms import Ratio, head, row
from gpu.bench import UNKNOWN, Bench
from gpu.gemm import labelled, ratio, share
from torch import Tensor

from accelbridge.data.loader import Prefetcher
from accelbridge.train import trainer as trainer_module
from accelbridge.train.trainer import Trainer

TITLE = "A training step"
ROUNDS = 3
"""In which the timed steps are taken, for the spread."""
PERIOD = 1_000_003
"""Random values after which the first values of a parameter repeat: a prime, so that rows differ."""


class RandomTokens:
    """Samples of tokens that mean nothing."""

    def __init__(self, vocab_size: int, seq_len: int, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(vocab_size, (count, seq_len + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        return {"tokens": self._tokens[index, :-1], "targets": self._tokens[index, 1:]}


def quick_values(*_: Any) -> Callable[[str, tuple[int, ...], range], Tensor]:
    """In place of the Trainer's initial values, which are made one by one on the host, a minute for so many."""
    values = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0)) * 0.02

    def initialise(name: str, shape: tuple[int, ...], rows: range) -> Tensor:
        if len(shape) == 1:
            return torch.ones(len(rows))
        count = len(rows) * shape[1]
        return values.repeat(-(-count // PERIOD))[:count].view(len(rows), shape[1])

    return initialise


def recipe(bench: Bench, compute: str, microbatch: int, folder: str) -> dict[str, Any]:
    sizes = bench.sizes
    return {
        "model": sizes.decoder.model_dump(),
        "data": {"document_mask": False},
        "precision": {"compute": compute},
        "backend": {"on_unsupported": "fallback" if sizes.emulated else "error"},
        "train": {
            "steps": 10**6,
            "global_batch_size": microbatch,
            "microbatch_size": microbatch,
            "seq_len": sizes.seq_len,
        },
        "optimizer": {"lr": 1e-4, "schedule": "constant"},
        "output": {"dir": folder},
    }


def measure(bench: Bench) -> None:
    bench.fact(
        parameters=bench.sizes.decoder.parameter_count(),
        flops_per_token=bench.sizes.decoder.flops_per_token(bench.sizes.seq_len),
        seq_len=bench.sizes.seq_len,
        steps=bench.sizes.steps,
    )
    _ = bench.device
    plain: dict[str, Any] | None = None
    for compute in ("bfloat16", "fp8"):
        # What the first took with its set-up says what the second will take.
        if bench.has_time(compute, 10 if plain is None else 1.2 * plain["seconds"]):
            with bench.attempt(compute):
                found = _largest_that_fits(bench, compute, plain)
                plain = plain or found
                bench.row(**found, speed_over_bfloat16=_faster(plain, found))


def _faster(plain: dict[str, Any], found: dict[str, Any]) -> dict[str, Any] | None:
    if found is plain or plain["compute"] != "bfloat16":
        return None
    return vars(Ratio.of(plain["ms_rounds"], found["ms_rounds"]))


def _largest_that_fits(bench: Bench, compute: str, plain: dict[str, Any] | None) -> dict[str, Any]:
    """With the microbatch of ``plain``, else the first that the memory holds."""
    tried = bench.sizes.microbatches if plain is None else (plain["microbatch"],)
    for microbatch in tried:
        began = time.monotonic()
        try:
            return _train(bench, compute, microbatch) | {"seconds": time.monotonic() - began}
        except (RuntimeError, MemoryError) as error:
            if microbatch == tried[-1] or not bench.target.backend.device.is_out_of_memory(error):
                raise
            bench.leave_out(f"{compute}, {microbatch} sequences", f"out of memory: {str(error).splitlines()[0]}")
        gc.collect()
    raise AssertionError("the last one returns or raises")


def _train(bench: Bench, compute: str, microbatch: int) -> dict[str, Any]:
    sizes, device = bench.sizes, bench.target.backend.device
    data = RandomTokens(sizes.decoder.vocab_size, sizes.seq_len, 64)
    each = max(1, sizes.steps // ROUNDS)
    device.reset_peak_memory()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-training-"))
        trainer = Trainer(recipe(bench, compute, microbatch, folder), data=data, backend=bench.name)
        stack.callback(trainer.close)  # not its own context, which would save 1.1 billion parameters after an error
        with mock.patch.object(trainer_module, "initialiser", quick_values):
            trainer.setup()
        if trainer.fp8 is not None:
            trainer.fp8.count(False)  # as in steps whose metrics nobody reads
        batches = stack.enter_context(Prefetcher(trainer.loader, 0, sizes.warmup + ROUNDS * each))
        first, _, _ = timed_steps(trainer, batches, sizes.warmup, device.synchronize)
        rounds = [timed_steps(trainer, batches, each, device.synchronize) for _ in range(ROUNDS)]
        losses = [first.item(), rounds[-1][0].item()]
        choices = {op.op: op.implementation for op in trainer.plan.ops}
        level = trainer.prepared.fp8.recipe.support.level if trainer.prepared.fp8 is not None else "full"
    seconds = sorted(s for _, s, _ in rounds)
    rate = microbatch * sizes.seq_len / seconds[ROUNDS // 2]
    flops = rate * sizes.decoder.flops_per_token(sizes.seq_len)
    return {
        "compute": compute,
        "level": level,
        "microbatch": microbatch,
        "ms": 1e3 * seconds[ROUNDS // 2],
        "ms_rounds": [1e3 * s for _, s, _ in rounds],
        "host_ms": 1e3 * sorted(h for _, _, h in rounds)[ROUNDS // 2],
        "tokens_per_s": rate,
        "model_tflops": flops / 1e12,
        "mfu": bench.of_peak(flops, compute, level),
        "mfu_of_bfloat16": bench.of_peak(flops, "bfloat16", level),
        "memory_peak_bytes": bench.memory_peak(),
        "losses": losses,
        "ops": choices,
    }


def timed_steps(
    trainer: Trainer, batches: Prefetcher, count: int, synchronize: Callable[[], None]
) -> tuple[Tensor, float, float]:
    """(loss of the last step, seconds of one, seconds until the host had queued one)."""
    synchronize()
    began = time.perf_counter()
    values: dict[str, Any] = {}
    for _ in range(count):
        _, microbatches = next(batches)
        values = trainer.train_step(microbatches)
        trainer.step += 1
        trainer.updating = False
    queued = (time.perf_counter() - began) / count
    synchronize()
    return values["loss"], (time.perf_counter() - began) / count, queued


# ------------------------------------------------------------------------------------------------------- tables


def table(rows: list[dict[str, Any]]) -> str:
    names = (
        "compute",
        "sequences",
        "ms a step",
        "host, ms",
        "tokens/s",
        "model TFLOP/s",
        "MFU",
        "of bfloat16's peak",
        "speed over bfloat16",
        "peak memory, GiB",
        "losses",
    )
    lines = [head(*names)]
    for r in rows:
        memory = r["memory_peak_bytes"]
        lines.append(
            row(
                labelled(r["compute"], r["level"]),
                r["microbatch"],
                f"{r['ms']:.1f}",
                f"{r['host_ms']:.1f}",
                f"{r['tokens_per_s']:.0f}",
                f"{r['model_tflops']:.4g}",
                share(r["mfu"]),
                share(r["mfu_of_bfloat16"]),
                ratio(r["speed_over_bfloat16"]),
                UNKNOWN if memory is None else f"{memory / 2**30:.1f}",
                " .. ".join(f"{loss:.3f}" for loss in r["losses"]),
            )
        )
    return "\n".join(lines)
