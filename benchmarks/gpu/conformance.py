"""The conformance suite on this device, with a time limit: what was not reached is named.

A run of single tests, not a certificate: most collectives need more devices than the one here, and end as
RESOURCE_ERROR.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from arms import head, row
from gpu.bench import BUDGET, Bench

from accelbridge.conformance.certify import chosen_cases
from accelbridge.conformance.status import Status

TITLE = "Conformance"
LEAVE_S = 8.0
"""Before the section's end the suite is asked to stop, so that it ends its own processes."""
FINE = (Status.PASS, Status.NOT_SUPPORTED, Status.WAIVED, Status.RESOURCE_ERROR)


def measure(bench: Bench) -> None:
    levels, only = bench.sizes.conform_levels, bench.sizes.conform_only
    with tempfile.TemporaryDirectory(prefix="gpu-conformance-") as folder:
        out = Path(folder) / "report"
        command = [sys.executable, "-m", "accelbridge", "conform", "run", "--backend", bench.name, "--level", levels]
        command += ["--out", str(out), *(["--only", only] if only else [])]
        # Its output is in the events, and in this section's log.
        process = subprocess.Popen(command)
        try:
            code: int | None = process.wait(max(1.0, bench.left() - LEAVE_S))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        events = _events(out)
    _report(bench, events, code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the suite, which then ends its ranks; kill it where it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S / 2)
    process.kill()
    process.wait()


def _events(out: Path) -> list[dict[str, Any]]:
    path = out / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be torn


def _report(bench: Bench, events: list[dict[str, Any]], code: int | None) -> None:
    levels, only = bench.sizes.conform_levels, bench.sizes.conform_only
    introduction = next((event for event in events if event["event"] == "introduction"), {})
    ended = [event for event in events if event["event"] == "end"]
    statuses = Counter(str(event["status"]) for event in ended)
    bench.fact(
        mode="run",
        levels=levels,
        only=only,
        strength=introduction.get("strength", "unknown"),
        exit_code="ended by the time limit" if code is None else code,
    )
    if not ended:
        raise RuntimeError(f"the suite ended with exit code {code} before its first test; see the section's log")
    bench.row(
        tests=len({event["id"] for event in ended}),
        statuses=dict(statuses),
        troubled=[
            {key: event[key] for key in ("id", "world", "status", "code", "message")}
            for event in ended
            if event["status"] not in FINE
        ],
        on_device=dict(Counter(str(event["on_device"]) for event in ended)),
        emulated=sorted({event["id"] for event in ended if event.get("emulated")}),
        seconds=round(sum(event.get("duration_s") or 0.0 for event in ended), 1),
    )
    chosen = [case.id for case in chosen_cases(levels.split(","), tuple(filter(None, only.split(","))))]
    left = [id for id in chosen if id not in {event["id"] for event in ended}]
    if left:
        bench.leave_out(f"{len(left)} of {len(chosen)} tests: {', '.join(left)}", BUDGET)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [head("tests", "outcomes, by number of ranks", "emulated", "not fine")]
    for r in rows:
        outcomes = ", ".join(f"{count} {status}" for status, count in sorted(r["statuses"].items()))
        trouble = "; ".join(f"{t['id']} on {t['world']}: {t['status']} {t['code']}" for t in r["troubled"])
        lines.append(row(r["tests"], outcomes, len(r["emulated"]), trouble or "none"))
    return "\n".join(lines)
