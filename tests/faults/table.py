"""docs/faults.md from docs/faults.json: what every fault did when it was last played."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from tests.faults.measure import Outcome, faults_of
from tests.faults.scenes import LIMIT_S, SCENES, UNHARMED, Scene

DOCS = Path(__file__).parents[2] / "docs"
MARKDOWN, DATA = DOCS / "faults.md", DOCS / "faults.json"
_WIDTH = 300
_HEAD = f"""# Faults, and what becomes of a run

Written by `python -m tests.faults` (`make faults`), which plays every row: a real run through the `accelbridge` command
on the CPU backend, into which the fault is put. `parallel.timeout` and `parallel.heartbeat_timeout` are {LIMIT_S:g} s
here (300 s and 10 s by default). Seconds are those from the fault until every process of the run has ended, so by then
the error is there on every rank; a run that goes on has no such time. "What is read" is what the launcher prints; what
another rank writes into its log stands beside it, both shortened. A row that did not do what its scene demands says so.

A rank that is stopped, or that holds the interpreter's lock, reacts to nothing; torch's agent gives it 30 s before it
kills it, which are in the seconds. Seconds grow with what else the machine does, and
include the start of Python where the fault is there before the run.

| fault | outcome | exit code | seconds | what is read | in another rank's log | played |
| --- | --- | --- | --- | --- | --- | --- |
"""


class Line(TypedDict):
    """One row."""

    outcome: str
    code: int | None
    seconds: float
    said: str
    log: str
    wrong: list[str]
    date: str


def line(scene: Scene, outcome: Outcome) -> Line:
    """The row of a scene that has just been played."""
    return {
        "outcome": scene.outcome,
        "code": outcome.code,
        "seconds": outcome.seconds,
        "said": _said(scene, outcome.said),
        "log": _logged(scene, outcome.logs),
        "wrong": faults_of(scene, outcome),
        "date": time.strftime("%Y-%m-%d"),
    }


def _said(scene: Scene, text: str) -> str:
    found = re.search(r"^error: .*", text, re.MULTILINE | re.DOTALL)
    if found:
        return _short(found[0])
    shown = re.search(scene.says, text) if scene.says else None
    start = text.rfind("\n", 0, shown.start()) + 1 if shown else 0
    return _short(text[start:].partition("\n")[0]) if shown else ""


def _logged(scene: Scene, logs: Mapping[int, str]) -> str:
    """What the first rank that has to say something says about the others."""
    for rank in scene.logs:
        if found := re.search(r"^found: .*?(?=^do: )", logs.get(rank, ""), re.MULTILINE | re.DOTALL):
            return _short(f"rank {rank}: {found[0]}")
    return ""


def _short(text: str) -> str:
    """One line without machine paths, process numbers and stacks."""
    text = re.sub(r"\nTraceback .*?\n(?=\w+(\.\w+)*: )", "\n", text, flags=re.DOTALL)
    text = re.sub(r"(?<!\w)(/[\w.\-+]+)*/([\w.\-+]+)", r"\2", text)
    text = re.sub(r"\(\S+, process \d+\)|\[127\.0\.0\.1\]:\d+", "", text)
    text = re.sub(r"\s+", " ", text).strip()
    return text if len(text) <= _WIDTH else text[:_WIDTH].rstrip() + " ..."


def read() -> dict[str, Line]:
    """The rows as they were last measured."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}


def write(lines: Mapping[str, Line]) -> None:
    """Write both files, in the order of the scenes."""
    kept: dict[str, Any] = {scene.name: lines[scene.name] for scene in SCENES if scene.name in lines}
    DATA.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    MARKDOWN.write_text(_HEAD + "".join(_row(name, row) for name, row in kept.items()), encoding="utf-8")


def _row(name: str, row: Line) -> str:
    outcome = row["outcome"] if not row["wrong"] else f"**not as demanded**: {'; '.join(row['wrong'])}"
    seconds = "" if row["outcome"] == UNHARMED else f"{row['seconds']:.1f}"
    cells = (name, outcome, str(row["code"]), seconds, row["said"], row["log"], row["date"])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
