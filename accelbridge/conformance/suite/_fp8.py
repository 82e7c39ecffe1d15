"""What the tests of fp8 share: operands, the products to try, and what the suite itself reads an operand as."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from accelbridge.backend import Format, Request
from accelbridge.conformance.bench import Abandoned, Bench
from accelbridge.conformance.oracle import scaled
from accelbridge.conformance.oracle.formats import E4M3, TABLES, Table
from accelbridge.precision.quantized import QuantizedTensor

WHOLE = (-1, -1)
"""Block of one scale for all."""
_PARTNER = {"float8_e4m3fn": "float8_e5m2", "float8_e4m3fnuz": "float8_e5m2fnuz", "float8_e4m3": "float8_e5m2"}


def declared(t: Bench, names: tuple[str, ...], scaling: str = "tensor", op: str = "quantize") -> list[Table]:
    """Tables of the formats of ``names`` that the backend says it has; none is a failure."""
    found = [TABLES[name] for name in names if t.supported(op, name, scaling)]
    if not found:
        t.fail("CAPABILITY", f"{op} {scaling}: at least one of {', '.join(names)} is mandatory here")
        raise Abandoned
    return found


def pair(a: str, b: str) -> str:
    """How the capability table names two formats or scalings."""
    return a if a == b else f"{a} x {b}"


def pairs(t: Bench, scaling: str = "tensor") -> list[tuple[Table, Table]]:
    """Formats whose product is declared: each e4m3 with itself (at least one must be), with its e5m2 in either order,
    and e5m2 with itself."""
    found = [(table, table) for table in declared(t, E4M3, scaling, "scaled_mm")]
    for e4m3, e5m2 in _PARTNER.items():
        for a, b in ((e4m3, e5m2), (e5m2, e4m3), (e5m2, e5m2)):
            if t.supported("scaled_mm", pair(a, b), scaling) and (TABLES[a], TABLES[b]) not in found:
                found.append((TABLES[a], TABLES[b]))
    return found


def partner_of(t: Bench, table: Table) -> Table:
    """A format that ``table`` may be multiplied with on the right."""
    found = next((b for a, b in pairs(t) if a.name == table.name), None)
    if found is None:
        t.fail("CAPABILITY", f"{table.name} can be quantized to, but no product takes it on the left")
        raise Abandoned
    return found


def products(t: Bench, a: Table, b: Table, scaling: str) -> list[tuple[str, Callable[..., Tensor]]]:
    """Everything that claims to multiply these: the interface, and each candidate."""
    request = Request("scaled_mm", pair(a.name, b.name), variant=scaling)
    return [("interface", t.backend.matmul.scaled_mm), *t.candidates(request)]


def quantize(t: Bench, x: Tensor, table: Table, scaling: str, format: Format | None = None) -> QuantizedTensor:
    """The host tensor ``x``, quantized by the backend; to ``table.format`` if no other policy is asked."""
    format = format or table.overflowing(policies(t)[0])
    q = t.run(t.backend.matmul.quantize, t.put(x), format, scaling)
    if not isinstance(q, QuantizedTensor):
        t.fail("PAYLOAD", f"quantize returned {type(q).__name__}, not a QuantizedTensor")
        raise Abandoned
    codes = t.run(q.codes, table.name)
    if codes.dtype != torch.uint8 or tuple(codes.shape) != tuple(x.shape):
        found = f"{tuple(codes.shape)} {codes.dtype}"
        t.fail("PAYLOAD", f"codes are {found}; one byte for each of {tuple(x.shape)} expected")
        raise Abandoned
    return q


def from_codes(
    t: Bench, codes: Tensor, table: Table, scale: Tensor | None = None, block: tuple[int, int] = WHOLE
) -> QuantizedTensor:
    """A quantized tensor on the device from host ``codes``; scale 1 if not given."""
    scale = torch.ones(1, 1) if scale is None else scale.to(torch.float32)
    return QuantizedTensor.of_codes(t.put(codes), t.put(scale), table.format, block)


def canonical(t: Bench, q: QuantizedTensor, table: Table) -> Tensor:
    """The codes on the device, every NaN by the same code."""
    return t.put(table.canonical)[q.codes(table.name).long()]


def read(q: QuantizedTensor, table: Table) -> Tensor:
    """float64 on the host: what ``q`` is by the suite's own table."""
    values = table.decode(q.codes(table.name).to("cpu"))
    rows, columns = q.shape
    return values * scaled.spread(q.scale.to("cpu").double(), q.block, (rows, columns))


def policies(t: Bench) -> tuple[bool, ...]:
    """Which overflow the backend says it can do: False saturates, True makes infinity or NaN."""
    known = {"saturate": (False,), "nonfinite": (True,), "asked": (False, True)}
    return known[str(t.capabilities.facts.get("fp8.overflow", "saturate"))]


def accumulator(t: Bench) -> scaled.Accumulator:
    """What the backend says it adds in."""
    facts = t.capabilities.facts
    return scaled.Accumulator(int(facts.get("fp8.accumulator_bits", 24)), int(facts.get("fp8.promotion", 128)))
