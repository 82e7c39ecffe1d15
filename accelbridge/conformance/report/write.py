"""The files of a report: ``report.json``, and what is derived from it and from nothing else."""

from __future__ import annotations

import hashlib
import json
import math
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from accelbridge.conformance.registry import NEEDS
from accelbridge.conformance.report.model import Report, Test
from accelbridge.conformance.status import Status

_OUTCOME = {Status.PASS: "passed", Status.WAIVED: "passed", Status.NOT_SUPPORTED: "skipped"}
_ERRORS = {Status.CRASH, Status.TIMEOUT, Status.DEVICE_LOST, Status.INTERNAL_ERROR, Status.MISSING}


def write(report: Report, out: Path) -> None:
    """Write every file of the report into ``out``, and last the digests of all that lies there."""
    for name, text in render(report).items():
        (out / name).write_text(text, encoding="utf-8")
    (out / "SHA256SUMS").write_text(digests(out))


def leave_out_places(logs: Path) -> None:
    """Name files of installed packages, of the interpreter and of the suite from there on only: a report is shown to
    others, and where a machine keeps its software is nobody's business."""
    for log in logs.glob("*.log"):
        text = log.read_text(encoding="utf-8", errors="replace")
        for root in _ROOTS:
            text = text.replace(root, "")
        log.write_text(text, encoding="utf-8")


_ROOTS = sorted(
    {f"{Path(place)}/" for name in ("purelib", "platlib", "stdlib") if (place := sysconfig.get_path(name))}
    | {f"{Path(__file__).resolve().parents[3]}/"},
    key=len,
    reverse=True,  # site-packages lies below the standard library
)


def render(report: Report) -> dict[str, str]:
    """Name -> text of the report's files."""
    makers: Mapping[str, Callable[[Report], str]] = {
        "report.json": as_json,
        "junit.xml": as_junit,
        "report.html": as_html,
        "badge.svg": as_badge,
    }
    return {name: make(report) for name, make in makers.items()}


def digests(out: Path) -> str:
    """Lines as ``sha256sum`` writes them, of every file in ``out`` but the list itself."""
    paths = sorted(p for p in out.rglob("*") if p.is_file() and p.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(out).as_posix()}" for p in paths]
    return "\n".join(lines) + "\n"


def as_json(report: Report) -> str:
    return json.dumps(report.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"


def as_junit(report: Report) -> str:
    """JUnit XML: one test case per id; the exact status is its failure's type."""
    suite = ET.Element(
        "testsuite",
        name=f"accelbridge conformance: {report.backend.name}",
        tests=str(len(report.tests)),
        failures=str(sum(_kind(t) == "failure" for t in report.tests)),
        errors=str(sum(_kind(t) == "error" for t in report.tests)),
        skipped=str(sum(_kind(t) == "skipped" for t in report.tests)),
        time=f"{sum(t.duration_s for t in report.tests):.3f}",
        timestamp=report.run.started.isoformat(),
    )
    for test in report.tests:
        row = ET.SubElement(suite, "testcase", classname=test.level, name=test.id, time=f"{test.duration_s:.3f}")
        kind = _kind(test)
        if kind != "passed":
            text = f"{test.status.value} {test.code}".strip()
            ET.SubElement(row, kind, type=text, message=test.message).text = test.property
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _kind(test: Test) -> str:
    return _OUTCOME.get(test.status, "error" if test.status in _ERRORS else "failure")


def as_badge(report: Report) -> str:
    """An SVG badge: the highest level that is held, with the weakest evidence for it."""
    held = [
        level for level in report.run.levels if all(n in report.levels and report.levels[n].held for n in NEEDS[level])
    ]
    complete = report.run.mode == "certify"
    if held and complete:
        label = f"{' + '.join(held)} ({report.levels[held[-1]].evidence})"
    else:
        label = "not certified" if complete else "a run with filters"
    return (
        _environment()
        .get_template("badge.svg")
        .render(left=f"accelbridge {report.backend.name}", right=label, good=bool(held) and complete)
    )


def as_html(report: Report) -> str:
    """One page that needs nothing else: failures first."""
    order = list(Status)
    by_gravity = sorted(report.tests, key=lambda t: (-order.index(t.status), t.id))
    troubled = [t for t in by_gravity if t.status not in (Status.PASS, Status.NOT_SUPPORTED)]
    return (
        _environment()
        .get_template("report.html")
        .render(
            r=report, troubled=troubled, families=_families(report), matrix=_matrix(report), margins=_margins(report)
        )
    )


def _families(report: Report) -> dict[str, list[Test]]:
    families: dict[str, list[Test]] = {}
    for test in report.tests:
        families.setdefault(test.id.split("-")[0], []).append(test)
    return families


def _matrix(report: Report) -> dict[str, Any]:
    """Cells by (op, variant) and dtype."""
    dtypes = sorted({cell.dtype for cell in report.cells}, key=lambda d: (d.startswith("float8"), d))
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for cell in report.cells:
        rows.setdefault((cell.op, cell.variant), {})[cell.dtype] = cell
    return {"dtypes": dtypes, "rows": rows}


def _margins(report: Report) -> list[dict[str, Any]]:
    """Numeric margins: how much of its limit each measurement used, on a logarithmic axis from 1/1000 to 10."""
    points = []
    for test in report.tests:
        for metric in test.metrics:
            used = math.inf if isinstance(metric.margin, str) else metric.margin
            if used > 0:
                place = min(1.0, max(0.0, (math.log10(used) + 3.0) / 4.0)) if used != math.inf else 1.0
                points.append({"test": test, "metric": metric, "used": used, "x": round(100 * place, 1)})
    return sorted(points, key=lambda p: -p["used"])


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("accelbridge.conformance.report"),
        autoescape=select_autoescape(["html", "svg"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
