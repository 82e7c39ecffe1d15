"""The estimate as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from accelbridge.backend import Compiled
from accelbridge.estimate import ahead, arithmetic
from accelbridge.estimate.ahead import Ahead
from accelbridge.estimate.arithmetic import Arithmetic
from accelbridge.memory.advice import size_text
from accelbridge.render import columns
from accelbridge.train.prepare import Prepared


def as_dict(prepared: Prepared, found: Arithmetic, compiled: Ahead | None, target: str = "") -> dict[str, Any]:
    """What ``accelbridge estimate --json`` prints; bytes and FLOPs are per device and step."""
    config = prepared.config
    report: dict[str, Any] = {
        "recipe": {
            "parameters": found.parameters,
            "layout": prepared.layout.as_dict(),
            "devices": prepared.layout.size,
            "chip": prepared.target.capabilities.chip.name,
            "backend": prepared.plan.backend,
            "global_batch_size": config.train.global_batch_size,
            "microbatch_size": prepared.microbatch_size,
            "microbatches": prepared.microbatches,
            "seq_len": config.train.seq_len,
            "precision": config.precision.compute,
            "plan": prepared.plan.digest,
        },
        "arithmetic": {
            "evidence": arithmetic.EVIDENCE,
            "memory": {**found.memory, "total": found.total},
            "capacity": found.capacity,
            "fits": found.fits,
            "flops": found.flops,
            "options": [asdict(option) for option in found.options],
        },
    }
    if compiled is not None:
        parts = {str(layers): asdict(each) for layers, each in (compiled.parts or {}).items()}
        report["compiled"] = {
            "evidence": ahead.EVIDENCE,
            "target": target,
            **asdict(compiled.compiled),
            "layers": compiled.layers,
            "derived": compiled.derived,
            "parts": parts,
        }
    return report


def as_text(prepared: Prepared, found: Arithmetic, compiled: Ahead | None, target: str = "") -> str:
    config, layout = prepared.config, prepared.layout
    precision = config.precision.compute
    lines = [
        f"{_count(found.parameters)} parameters, {layout.describe()} on {layout.size} x "
        f"{prepared.target.capabilities.chip.name} ({prepared.plan.backend})",
        f"a step: {config.train.global_batch_size} sequences of {config.train.seq_len} tokens in {precision}, "
        f"{prepared.microbatches} microbatch{'es' * (prepared.microbatches != 1)} of {prepared.microbatch_size} per "
        "data-parallel coordinate",
        "",
        f"per device, by shapes ({arithmetic.EVIDENCE})",
        *_memory(found.memory, found.total, found.capacity, found.fits),
        *columns([("FLOPs of a step", f"{found.flops:.4g}")], indent=2),
    ]
    if found.options:
        lines += ["what would save some, most first:"]
        lines += [f"  {each.setting}: saves about {size_text(each.saves)}; {each.cost}" for each in found.options]
    if compiled is not None:
        lines += ["", *_compiled(compiled, target)]
    return "\n".join(lines)


def _compiled(found: Ahead, target: str) -> Iterable[str]:
    c = found.compiled
    software = ", ".join(f"{name} {version}" for name, version in c.software.items())
    yield f"per device, by the compiler for {target}: {c.devices} x {c.chip} ({ahead.EVIDENCE})"
    if found.derived:
        yield f"  DERIVED: {found.derived}"
    rest = {kind: size for kind, size in c.memory.items() if kind != "total"}
    yield from _memory(rest, c.memory["total"], c.capacity, c.fits)
    if c.flops is not None:
        yield from columns([("FLOPs of a step", f"{c.flops:.4g}")], indent=2)
    if c.collectives:
        yield from _traffic(c)
    took = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in c.seconds.items())
    host = f"; at most {size_text(c.host_bytes)} of this machine's memory" if c.host_bytes is not None else ""
    yield f"  made by {software}: {took}{host}"
    yield from (f"  note: {note}" for note in c.notes)


def _traffic(found: Compiled) -> Iterable[str]:
    rows = [("collectives", "calls", "bytes (the larger of in and out)")]
    rows += [(each.op, str(each.count), size_text(each.bytes)) for each in found.collectives]
    yield from columns(rows, indent=2)


def _memory(kinds: Mapping[str, int], total: int, capacity: int | None, fits: bool | None) -> list[str]:
    rows = [(kind, size_text(size)) for kind, size in kinds.items()]
    rows.append(("total", size_text(total)))
    if capacity is not None:
        rows.append(("the device has", size_text(capacity)))
    verdict = {True: "yes", False: "NO", None: "unknown: the device's memory is not known"}[fits]
    return columns([*rows, ("fits", verdict)], indent=2)


def _count(parameters: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if parameters >= unit:
            return f"{parameters / unit:.2f} {name}"
    return str(parameters)
