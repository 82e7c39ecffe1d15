"""Products of a Llama's linear layers, through ``backend.matmul``: bfloat16, and fp8 as far as the chip's table says.

What quantizing costs stands apart, beside a copy of the same bytes. Products of one shape take turns, so that each has
a ratio to bfloat16's of the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from arms import Ratio, head, row
from gpu.bench import EMULATED, Bench, rotating, sqnr_db
from gpu.timing import Calls, Timing, copies_for
from torch import Tensor

from accelbridge.backend import Capabilities, Support, unsupported
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.recipe import VARIANTS

TITLE = "Products of linear layers"
SCALINGS = {
    "tensor": (("tensor", "tensor"),),
    "row": (("row", "row"),),
    "block": (("block1x128", "block128x128"),),
    "mx": (("mx_pow2", "mx_pow2"), ("mx", "mx")),
}
"""Scalings of activations and of weights, as recipes name them; the first that the chip has. Each but MX is also tried
with scales that are powers of two, for chips that take no others."""
LEVELS = ("full", "emulated", "unsupported")


@dataclass(frozen=True)
class Shape:
    """[m, k] times [n, k]^T."""

    model: str
    layer: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.model} {self.layer}, m={self.m}"

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class Fp8:
    """One way to do a product in fp8."""

    name: str
    format: str
    scalings: tuple[str, str]
    product: Support
    quantize: Support


def shapes(bench: Bench) -> Iterator[Shape]:
    for name, llama in bench.sizes.llamas.items():
        for m in bench.sizes.tokens:
            for layer, (n, k) in llama.layers().items():
                yield Shape(name, layer, m, n, k)


def ways_of(capabilities: Capabilities, shape: Shape) -> list[Fp8]:
    """The best that the chip's table has of each scaling, unsupported ones with their reason."""
    variants = str(capabilities.facts.get("fp8.variant", "")).split()
    return [_best(capabilities, shape, name, variants) for name in SCALINGS]


def _best(capabilities: Capabilities, shape: Shape, name: str, variants: list[str]) -> Fp8:
    found = [
        _cells(capabilities, shape, name, VARIANTS[variant][0], pair)
        for variant in variants
        for pair in (*SCALINGS[name], *(_power_of_two(pair) for pair in SCALINGS[name] if name != "mx"))
    ]
    if not found:
        return Fp8(name, "", ("", ""), unsupported(f"{capabilities.chip.name} has no fp8 products"), unsupported(""))
    return min(found, key=lambda fp8: LEVELS.index(fp8.product.level))  # of equals, the first


def _power_of_two(pair: tuple[str, str]) -> tuple[str, str]:
    return f"{pair[0]}_pow2", f"{pair[1]}_pow2"


def _cells(capabilities: Capabilities, shape: Shape, name: str, format: str, pair: tuple[str, str]) -> Fp8:
    quantize = max((capabilities.support("quantize", format, s) for s in pair), key=lambda s: LEVELS.index(s.level))
    mixed = pair[0] if pair[0] == pair[1] else " x ".join(pair)
    sizes = {"m": shape.m, "n": shape.n, "k": shape.k}
    product = capabilities.support("scaled_mm", format, mixed, sizes) if quantize else quantize
    return Fp8(name, format, pair, product, quantize)


# ---------------------------------------------------------------------------------------------------- measuring


def measure(bench: Bench) -> None:
    with torch.no_grad():
        for shape in shapes(bench):
            if bench.has_time(str(shape), 2 * bench.sizes.seconds + 1):
                with bench.attempt(str(shape)):
                    _shape(bench, shape)


def _shape(bench: Bench, shape: Shape) -> None:
    matmul = bench.target.backend.matmul
    fp8 = [way for way in ways_of(bench.target.capabilities, shape) if _wanted(bench, shape, way)]
    operands = rotating(
        lambda: (bench.normal(shape.m, shape.k), bench.normal(shape.n, shape.k, scale=shape.k**-0.5)),
        copies_for(2 * shape.k * (shape.m + shape.n), bench.rotate_bytes),
    )
    plain: Calls = [partial(matmul.matmul, x, w.t()) for x, w in operands]
    ways: dict[str, Calls | None] = {"bfloat16": bench.working(f"{shape}: bfloat16", lambda: plain)}
    ways |= {way.name: bench.working(f"{shape}: fp8 {way.name}", partial(_scaled, bench, way, operands)) for way in fp8}
    timings = bench.take_turns(ways)
    want = plain[0]() if ways["bfloat16"] is not None else None
    for name, timing in timings.items():
        way = next((way for way in fp8 if way.name == name), None)
        calls = ways[name]
        noise = None if want is None or way is None or calls is None else sqnr_db(_tensor(calls[0]), _tensor_of(want))
        bench.row(**_product(bench, shape, way, timing, timings.get("bfloat16")), sqnr_db=noise)
    if shape.m == bench.sizes.tokens[0]:
        del ways, plain
        _quantizing(bench, shape, fp8, operands)


def _wanted(bench: Bench, shape: Shape, way: Fp8) -> bool:
    """Whether to time it: what is only emulated says nothing of the chip."""
    if way.product.level == "full" or (way.product and bench.sizes.emulated):
        return True
    kind = f"{EMULATED}: " if way.product else ""
    bench.leave_out(f"{shape}: fp8 {way.name}", kind + way.product.reason)
    return False


def _scaled(bench: Bench, way: Fp8, operands: list[tuple[Tensor, Tensor]]) -> list[Callable[[], Tensor]]:
    matmul, format = bench.target.backend.matmul, FORMATS[way.format]
    a, b = way.scalings
    pairs = [(matmul.quantize(x, format, a), matmul.quantize(w, format, b)) for x, w in operands]
    return [partial(matmul.scaled_mm, x, w.t(), torch.bfloat16) for x, w in pairs]


def _tensor(call: Callable[[], object]) -> Tensor:
    return _tensor_of(call())


def _tensor_of(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _product(bench: Bench, shape: Shape, way: Fp8 | None, timing: Timing, plain: Timing | None) -> dict[str, Any]:
    level = "full" if way is None else way.product.level
    flops = shape.flops / timing.seconds
    faster = None if plain is None or way is None else vars(Ratio.of(plain.rounds, timing.rounds))
    return {
        "what": "product",
        **vars(shape),
        "kind": "bfloat16" if way is None else f"fp8 {way.name}",
        "level": level,
        "format": "bfloat16" if way is None else way.format,
        "scalings": [] if way is None else list(way.scalings),
        **timing.as_dict(),
        "tflops": flops / 1e12,
        "of_peak": bench.of_peak(flops, "bfloat16" if way is None else "fp8", level),
        "speed_over_bfloat16": faster,
    }


def _quantizing(bench: Bench, shape: Shape, fp8: list[Fp8], operands: list[tuple[Tensor, Tensor]]) -> None:
    """Quantizing activations and weights, each in turns with a copy of them."""
    for index, operand in enumerate(("activation", "weight")):
        matrices = [pair[index] for pair in operands]
        if not fp8 or not bench.has_time(f"{shape}: quantizing the {operand}", bench.sizes.seconds + 1):
            continue
        target = torch.empty_like(matrices[0])
        ways: dict[str, Calls | None] = {"copy": [partial(target.copy_, x) for x in matrices]}
        by_name = {f"fp8 {way.name}": way for way in fp8}
        for name, way in by_name.items():
            calls = [partial(_quantize, bench, way, index, x) for x in matrices]
            ways[name] = bench.working(f"{shape}: quantizing the {operand}, {name}", lambda calls=calls: calls)
        timings = bench.take_turns(ways)
        copy = timings.pop("copy")
        for name, timing in timings.items():
            bench.row(
                what="quantize",
                model=shape.model,
                layer=shape.layer,
                operand=operand,
                rows=matrices[0].shape[0],
                columns=matrices[0].shape[1],
                kind=name,
                level=by_name[name].quantize.level,
                scaling=by_name[name].scalings[index],
                **timing.as_dict(),
                over_copy=vars(Ratio.of(timing.rounds, copy.rounds)),
            )


def _quantize(bench: Bench, way: Fp8, index: int, x: Tensor) -> object:
    return bench.target.backend.matmul.quantize(x, FORMATS[way.format], way.scalings[index])


# ------------------------------------------------------------------------------------------------------- tables


def table(rows: list[dict[str, Any]]) -> str:
    products = [r for r in rows if r["what"] == "product"]
    quantizing = [r for r in rows if r["what"] == "quantize"]
    names = ("model", "layer", "m", "n", "k", "product", "ms", "TFLOP/s", "of peak", "speed over bfloat16", "SQNR, dB")
    lines = [head(*names), *(_product_row(r) for r in products)]
    if quantizing:
        lines += [
            "",
            head("model", "layer", "operand", "elements", "quantized to", "ms", "time / copy of it"),
        ]
        lines += [_quantize_row(r) for r in quantizing]
    return "\n".join(lines)


def labelled(kind: str, level: str) -> str:
    return kind if level == "full" else f"{kind} ({level})"


def share(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1%}"


def ratio(value: dict[str, Any] | None) -> str:
    return "" if value is None else str(Ratio(**value))


def number(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def milliseconds(r: dict[str, Any]) -> str:
    """With a mark where the host took as long as the device."""
    return f"{r['ms']:.3f}" + (" (host)" if r["host_bound"] else "")


def _product_row(r: dict[str, Any]) -> str:
    return row(
        *(r[key] for key in ("model", "layer", "m", "n", "k")),
        labelled(r["kind"], r["level"]),
        milliseconds(r),
        f"{r['tflops']:.4g}",
        share(r["of_peak"]),
        ratio(r["speed_over_bfloat16"]),
        number(r["sqnr_db"]),
    )


def _quantize_row(r: dict[str, Any]) -> str:
    return row(
        r["model"],
        r["layer"],
        r["operand"],
        f"{r['rows']} x {r['columns']}",
        f"{labelled(r['kind'], r['level'])}: {r['scaling']}",
        milliseconds(r),
        ratio(r["over_copy"]),
    )
