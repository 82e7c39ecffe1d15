"""What quantizing costs on the host and what it loses, beside a copy of memory and beside others' fp8.

    .venv/bin/python benchmarks/quantize.py --out benchmarks/results

Speed: ``quantize`` of a bfloat16 matrix to e4m3fn in the CPU backend's emulation, eager and compiled, in turns with a
copy of the same bytes into memory that is there already; one thread. No device's speed follows from it.

Numerics: signal over noise (SQNR, dB) against float64 of the same bfloat16 inputs, of one quantized matrix and of a
linear layer's output and gradients, with the formats of hybrid recipes (e4m3 forward, e5m2 for gradients of outputs) in
tensorwise scaling, e4m3 throughout in rowwise scaling. Beside it, where torchao is installed, its own layer with
``emulate=True`` on the same inputs (it needs no accelerator for that); the result says if it is not.

Delayed scaling: the recipe of Transformer Engine, which needs a GPU, worked out here from its documentation (source:
TE_SOURCE) and applied to matrices whose size drifts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from arms import Ratio, end_on_sigterm, head, machine, row, write
from torch import Tensor

from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.quantized import QuantizedTensor, shares

TE_SOURCE = (
    "Transformer Engine, DelayedScaling in transformer_engine/common/recipe/__init__.py: new_scaling_factor = "
    "(FP8_MAX / amax) / (2 ^ margin), of the largest or the most recent amax of amax_history_len steps; and "
    "https://nvidia.github.io/TransformerEngine/api/c/recipe.html: the largest magnitude becomes 2^-margin max_fp8"
)
BACKEND = EmulatedFp8("cpu")
E4M3, E5M2 = FORMATS["float8_e4m3fn"], FORMATS["float8_e5m2"]
SPEED_SCALINGS = ("tensor", "row", "block128x128", "mx")
NOISE_DB = 0.05
"""How far two right implementations differ: where a scale's last bit is another, a few elements round otherwise."""
LAYER = {"tensor": (E4M3, E5M2), "row_pow2": (E4M3, E4M3), "row": (E4M3, E4M3)}
"""Formats of inputs and weights, and of gradients of outputs, by scaling."""
RESULTS = ("output", "input gradient", "weight gradient", "tensor")
"""What is compared: a linear layer's, and one matrix on its own."""
TORCHAO = {"tensor": "tensorwise", "row_pow2": "rowwise"}
"""torchao's name of the recipe; its rowwise one rounds scales to powers of two."""


# ------------------------------------------------------------------------------------------------------------ speed


def quantizer(scaling: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        q = BACKEND.quantize(x, E4M3, scaling)
        return q.codes(E4M3.name), q.scale

    return run


def ways(x: Tensor) -> dict[str, Callable[[], object]]:
    """What takes turns, by name; "copy" is what the others are compared with."""
    target = torch.empty_like(x)
    found: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(x)}
    for scaling in SPEED_SCALINGS:
        eager = quantizer(scaling)
        compiled = torch.compile(eager, fullgraph=True, dynamic=False)
        for a, b in zip(eager(x), compiled(x), strict=True):
            assert torch.equal(a, b), f"{scaling}: compiled code gives other bits"
        found |= {f"{scaling}, eager": lambda f=eager: f(x), f"{scaling}, compiled": lambda f=compiled: f(x)}
    if find_spec("torchao"):
        found |= {f"torchao {TORCHAO[s]}, eager": lambda s=s: theirs_of(x, s) for s in TORCHAO}
    return found


def speed(size: int, turns: int) -> dict[str, list[float]]:
    """Processor seconds of each way in each turn; the order is reversed every time."""
    x = normal(size, size, seed=0)
    runs = ways(x)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for turn in range(turns):
        for name in runs if turn % 2 == 0 else reversed(runs):
            began = time.process_time()
            repeats = 10 if name == "copy" else 1
            for _ in range(repeats):
                runs[name]()
            taken[name].append((time.process_time() - began) / repeats)
    return taken


def speed_table(taken: dict[str, list[float]]) -> str:
    lines = [head("quantize bfloat16 to e4m3fn", "time / copy of the same bytes [95 %]")]
    copies = taken["copy"]
    lines += [row(name, Ratio.of(seconds, copies)) for name, seconds in taken.items() if name != "copy"]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- numerics


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def sqnr(got: Tensor, want: Tensor) -> float:
    noise = (got.double() - want.double()).square().sum()
    return (10.0 * torch.log10(want.double().square().sum() / noise)).item()


def inputs(seed: int, tokens: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Activations with a few large features, weights, and small gradients of the outputs."""
    x, w, dy = (
        normal(tokens, width, seed=seed),
        normal(width, width, seed=seed + 1),
        normal(tokens, width, seed=seed + 2),
    )
    x[:, :: width // 4] *= 8.0
    return x, (w * width**-0.5).bfloat16(), (dy * 1e-4).bfloat16()


def ours_layer(x: Tensor, w: Tensor, dy: Tensor, scaling: str) -> Iterator[Tensor]:
    """Output, gradient of the input, gradient of the weight; each operand quantized along its product's K."""
    forward, backward = LAYER[scaling]
    for a, b, format in ((x, w, forward), (dy, w.t(), backward), (dy.t(), x.t(), backward)):
        left, right = BACKEND.quantize(a, format, scaling), BACKEND.quantize(b, forward, scaling)
        yield BACKEND.scaled_mm(left, right.t(), torch.bfloat16)


def exact_layer(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    wide = [t.double() for t in (x, w, dy)]
    return wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0]


def theirs_of(x: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """``x`` quantized by torchao: float8 and the scale to divide by."""
    from torchao.float8.config import ScalingGranularity  # pyright: ignore[reportMissingImports]
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic  # pyright: ignore[reportMissingImports]
    from torchao.float8.float8_training_tensor import LinearMMConfig  # pyright: ignore[reportMissingImports]

    rows = scaling != "tensor"
    found = hp_tensor_to_float8_dynamic(
        x,
        torch.float8_e4m3fn,
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.AXISWISE if rows else ScalingGranularity.TENSORWISE,
        axiswise_dim=-1 if rows else None,
        round_scales_to_power_of_2=scaling.endswith("pow2"),
    )
    return found._data, found._scale


def theirs_layer(x: Tensor, w: Tensor, dy: Tensor, scaling: str) -> tuple[Tensor, ...]:
    from torchao.float8 import Float8LinearConfig  # pyright: ignore[reportMissingImports]
    from torchao.float8.float8_linear import Float8Linear  # pyright: ignore[reportMissingImports]

    config = Float8LinearConfig.from_recipe_name(TORCHAO[scaling])
    object.__setattr__(config, "emulate", True)
    layer = Float8Linear(w.shape[1], w.shape[0], bias=False, dtype=torch.bfloat16, config=config)
    layer.weight.data.copy_(w)
    given = x.clone().requires_grad_()
    y = layer(given)
    y.backward(dy)
    assert given.grad is not None
    return y.detach(), given.grad, layer.weight.grad


def numerics(seeds: Sequence[int], tokens: int, width: int) -> list[dict[str, Any]]:
    """A line for each scaling and result: ours, and torchao's where it is installed and has the recipe."""
    there, lines = find_spec("torchao") is not None, []
    for scaling in LAYER:
        results: dict[str, tuple[list[float], list[float]]] = {}
        for seed in seeds:
            x, w, dy = inputs(seed, tokens, width)
            quantized = BACKEND.quantize(x, E4M3, scaling).dequantize()
            want = dict(zip(RESULTS, (*exact_layer(x, w, dy), x), strict=True))
            mine = dict(zip(RESULTS, (*ours_layer(x, w, dy, scaling), quantized), strict=True))
            other: dict[str, Tensor] = {}
            if there and scaling in TORCHAO:
                data, scale = theirs_of(x, scaling)
                results_there = theirs_layer(x, w, dy, scaling)
                other = dict(zip(RESULTS, (*results_there, data.float() / scale), strict=True))
            for name, exact in want.items():
                found = results.setdefault(name, ([], []))
                found[0].append(sqnr(mine[name], exact))
                found[1].extend([sqnr(other[name], exact)] if other else [])
        lines += [{"scaling": scaling, "result": name, "ours": a, "torchao": b} for name, (a, b) in results.items()]
    return lines


def numerics_table(lines: Sequence[dict[str, Any]]) -> str:
    names = "scaling", "result", "SQNR, dB", "torchao, dB", f"ours - torchao, dB (right: >= -{NOISE_DB:g})"
    return "\n".join([head(*names), *(_numerics_row(line) for line in lines)])


def _numerics_row(line: dict[str, Any]) -> str:
    ours, theirs = line["ours"], line["torchao"]
    beside = ["", ""]
    if theirs:
        least, most = (pick(a - b for a, b in zip(ours, theirs, strict=True)) for pick in (min, max))
        verdict = "equal" if most <= NOISE_DB else "better"
        verdict = verdict if least >= -NOISE_DB else "WORSE"
        beside = [f"{statistics.median(theirs):.2f}", f"{least:+.3f} .. {most:+.3f}: {verdict}"]
    return row(line["scaling"], line["result"], f"{statistics.median(ours):.2f}", *beside)


def mx_agrees(x: Tensor) -> str:
    """Whether codes and scales of MX are bitwise torchao's (floor mode)."""
    if not find_spec("torchao"):
        return "torchao is not installed"
    from torchao.prototype.mx_formats.mx_tensor import to_mx  # pyright: ignore[reportMissingImports]

    scale, data = to_mx(x, torch.float8_e4m3fn, 32)
    q = BACKEND.quantize(x, E4M3, "mx")
    same = torch.equal(data.view(torch.uint8), q.codes(E4M3.name))
    return "equal" if same and torch.equal(scale.float().view_as(q.scale), q.scale) else "DIFFERENT"


# -------------------------------------------------------------------------------------------------- delayed scaling


def delayed_scale(history: Sequence[float], algorithm: str, margin: int) -> Tensor:
    """The scale to dequantize with, 1 / ((FP8_MAX / amax) / 2^margin), of the largest magnitudes of earlier steps,
    the newest last: see TE_SOURCE."""
    amax = max(history) if algorithm == "max" else history[-1]
    return torch.tensor([[amax / E4M3.max * 2.0**margin]])


def delayed(steps: int, width: int) -> list[dict[str, Any]]:
    """Each recipe on the same matrices, whose size drifts by 3 % a step, scatters by 10 % and jumps threefold once."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1.03**i * (1 + 0.1 * torch.randn((), generator=generator).item()) for i in range(steps)]
    sizes = [size * (3.0 if i >= steps // 2 else 1.0) for i, size in enumerate(sizes)]
    lines = []
    for algorithm, length, margin in (("current", 0, 0), ("most_recent", 1, 0), ("max", 16, 0), ("max", 16, 1)):
        history: list[float] = []
        found, saturated = [], []
        for i, size in enumerate(sizes):
            x = (normal(width, width, seed=i) * size).bfloat16()
            first = not history or algorithm == "current"
            scale = None if first else delayed_scale(history, algorithm, margin)
            q: QuantizedTensor = BACKEND.quantize(x, E4M3, "tensor", scale)
            found.append(sqnr(q.dequantize(), x))
            saturated.append(shares(x, q).saturated.item())
            history = [*history, x.abs().max().item()][-max(1, length) :]
        lines.append({"recipe": algorithm, "length": length, "margin": margin, "sqnr": found, "saturated": saturated})
    return lines


def delayed_table(lines: Sequence[dict[str, Any]]) -> str:
    names = ("delayed recipe", "history", "margin", "SQNR, dB: median [least]", "largest share saturated")
    cells = [
        row(
            line["recipe"],
            line["length"] or "",
            line["margin"],
            f"{statistics.median(line['sqnr']):.2f} [{min(line['sqnr']):.2f}]",
            f"{max(line['saturated']):.1e}",
        )
        for line in lines
    ]
    return "\n".join([head(*names), *cells])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "torchao": version("torchao") if find_spec("torchao") else "not installed",
        "speed": speed(options.size, options.turns),
        "numerics": numerics(range(0, 3 * options.seeds, 3), options.tokens, options.width),
        "mx_beside_torchao": mx_agrees(normal(256, 1024, seed=0)),
        "delayed": delayed(options.steps, options.width),
        "delayed_source": TE_SOURCE,
    }


def table(found: dict[str, Any]) -> str:
    notes = f"torchao: {found['torchao']}; codes and scales of MX beside torchao's: {found['mx_beside_torchao']}"
    source = f"Delayed scaling after {found['delayed_source']}"
    parts = (
        speed_table(found["speed"]),
        numerics_table(found["numerics"]),
        notes,
        delayed_table(found["delayed"]),
        source,
    )
    return "\n\n".join(parts)


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of what is timed")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32, help="of delayed scaling")
    parser.add_argument("--out", type=Path, help="folder for the results, for example benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine() | {"ranks": 1}
    found = measure(options)
    text = table(found)
    print(text)
    if options.out:
        date = time.strftime("%Y-%m-%d")
        title = f"Quantizing on the host, {date}; {options.turns} turns, {options.seeds} sets of inputs"
        write(options.out, f"quantize-{date}", {"date": date, "machine": facts, **found}, title, text, facts)


if __name__ == "__main__":
    main()
