"""What one accelerator does with this: conformance, products, attention, training, in one command under 8 minutes.

    .venv/bin/python benchmarks/gpu/run.py                     an accelerator; results go to benchmarks/results
    .venv/bin/python benchmarks/gpu/run.py --quick             less of it, under 4 minutes
    .venv/bin/python benchmarks/gpu/run.py --sections kernels  every family of kernels beside its floor
    .venv/bin/python benchmarks/gpu/run.py --tiny --out DIR    in miniature, also on a host processor: no speeds

One device of whatever backend is chosen as everywhere (--backend, ACCELBRIDGE_BACKEND, the accelerator that is there).
Each section is a process with a time limit; one that fails or runs over leaves what it had, and the others go on.
Reads and writes: see ../README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BENCHMARKS))

from arms import end_on_sigterm, machine, write  # noqa: E402
from gpu.bench import BUDGET  # noqa: E402
from gpu.sizes import FULL, QUICK, SIZES, TINY, Sizes  # noqa: E402

from accelbridge.errors import AccelbridgeError  # noqa: E402
from accelbridge.train.config import TrainConfig  # noqa: E402
from accelbridge.train.prepare import Target, choose_target  # noqa: E402

SECTIONS = tuple(FULL.budgets)
"""In the order in which they run: modules of this folder."""
ASKED = ("kernels",)
"""Of them, those that run only where they are asked for: they would take the time of the others."""
LEAST_S = 5.0
"""A section is not started with less."""
END_S = 10.0
"""Of a section's time: between its own end, the signal, and being killed."""
LOG_LINES = 40


class Section:
    """One section: its process, and what it said."""

    def __init__(self, name: str, sizes: Sizes, backend: str, seconds: float, folder: Path) -> None:
        self.name, self.budget = name, seconds
        self._report, self._log = folder / f"{name}.jsonl", folder / f"{name}.log"
        self._asked = {
            "section": name,
            "size": sizes.name,
            "backend": backend,
            "seconds": seconds - min(END_S, seconds / 4),
            "report": str(self._report),
        }

    def run(self) -> dict[str, Any]:
        """Run it to its end, or to the end of its time."""
        began = time.monotonic()
        path = os.pathsep.join(filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "gpu.section", json.dumps(self._asked)]
        self._report.touch()
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
            try:
                over = not _ends_within(process, self.budget)
            finally:
                _end(process)
        return self._result(over, process.returncode, time.monotonic() - began)

    def _result(self, over: bool, code: int, seconds: float) -> dict[str, Any]:
        said = [json.loads(line) for line in self._report.read_text().splitlines(keepends=True) if line.endswith("\n")]
        rows, left_out, errors = (
            [line["value"] for line in said if line["kind"] == kind] for kind in ("row", "left_out", "error")
        )
        facts = {key: value for line in said if line["kind"] == "fact" for key, value in line["value"].items()}
        if over:
            left_out.append({"what": "what was to come after this", "why": BUDGET})
        elif all(line["kind"] != "end" for line in said):
            text = f"its process ended with {_code(code)} before it was done"
            errors.append({"what": "the section", "error": text, "traceback": self._tail()})
        return {
            "status": _status(rows, left_out, errors),
            "budget_s": round(self.budget, 1),
            "seconds": round(seconds, 1),
            "facts": facts,
            "rows": rows,
            "left_out": left_out,
            "errors": errors,
        }

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end; kill it, and what it started, where that takes too long."""
    if process.poll() is None:
        process.terminate()
        _ends_within(process, END_S / 2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _code(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _status(rows: Sequence[Any], left_out: Sequence[Any], errors: Sequence[Any]) -> str:
    if rows:
        return "partly measured" if left_out or errors else "measured"
    return "error" if errors else "left out"


def not_run(why: str) -> dict[str, Any]:
    """The result of a section that was not started."""
    left_out = [{"what": "the section", "why": why}]
    return {
        "status": "left out",
        "budget_s": 0,
        "seconds": 0,
        "facts": {},
        "rows": [],
        "left_out": left_out,
        "errors": [],
    }


# ------------------------------------------------------------------------------------------------- what is written


def device_facts(target: Target) -> dict[str, Any]:
    """What the figures are of, without a context on the device."""
    probe, chip = target.selection.probe, target.capabilities.chip
    return {
        "backend": target.backend.name,
        "chip": chip.name,
        "devices_here": len(probe.devices),
        "peak_flops": dict(chip.peak_flops) or "unknown",
        "memory_bytes": chip.memory_bytes or "unknown",
        "software": dict(probe.software),
        "facts": {key: value for key, value in probe.facts.items() if key != "host"},
    }


def section_text(name: str, result: dict[str, Any]) -> str:
    """A section of the table: what was measured, and what was not, each with its reason."""
    module = importlib.import_module(f"gpu.{name}")
    spent = f"{result['status']}; {result['seconds']} of {result['budget_s']} s"
    facts = "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in result["facts"].items() if value != "")
    parts = [f"## {module.TITLE}", f"{spent}{'; ' if facts else ''}{facts}"]
    parts += [module.table(result["rows"])] if result["rows"] else []
    by_reason: dict[str, list[str]] = {}
    for entry in result["left_out"]:
        by_reason.setdefault(entry["why"], []).append(entry["what"])
    notes = [f"- left out: {'; '.join(names)}: {why}" for why, names in by_reason.items()]
    notes += [f"- error: {entry['what']}: {_one_line(entry['error'])}" for entry in result["errors"]]
    parts += ["\n".join(notes)] if notes else []
    return "\n\n".join(parts)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def title_of(sizes: Sizes, target: Target, date: str) -> str:
    size = "" if sizes is FULL else f" ({sizes.name})"
    title = f"# {target.capabilities.chip.name}, {date}{size}"
    notes = [
        "Medians of rounds in which what is compared takes turns; in brackets an interval of the true median with 95 % "
        "(the smallest and the greatest of fewer than 6 rounds). A share of the peak is of the vendor's dense peak for "
        "that dtype; (host): the host needed as long to queue the work as the device to do it."
    ]
    if not target.backend.accelerator:
        notes.append("On a host processor and in miniature: this shows that the program runs, and nobody's speed.")
    return "\n\n".join((title, *notes))


# ------------------------------------------------------------------------------------------------------ the command


class Results:
    """What is written, anew after every section: whoever ends this program keeps what it had."""

    def __init__(self, sizes: Sizes, target: Target, out: Path) -> None:
        self._date, self._out = time.strftime("%Y-%m-%d"), out
        self._facts = {key: value for key, value in machine().items() if key not in ("ranks", "threads_per_rank")}
        self._device = device_facts(target)
        self._size = sizes.name
        size = "" if sizes is FULL else f"-{sizes.name}"
        self.stem = f"gpu-{slug(target.capabilities.chip.name)}{size}-{self._date}"
        self._title, self._texts = title_of(sizes, target, self._date), list[str]()
        self._sections: dict[str, Any] = {}

    def seconds(self) -> float:
        """Since this process was started."""
        return time.time() - psutil.Process().create_time()

    def add(self, name: str, result: dict[str, Any]) -> str:
        """Keep the result of a section, and return its text."""
        self._sections[name] = result
        self._write()  # the figures first: no fault of a table shall lose them
        self._texts.append(section_text(name, result))
        self._write()
        return self._texts[-1]

    def _write(self) -> None:
        seconds = round(self.seconds(), 1)
        result = {"date": self._date, "size": self._size, "seconds": seconds, "machine": self._facts}
        result |= {"device": self._device, "sections": self._sections}
        shown = {"seconds": seconds, **self._device["software"], **self._facts}
        write(self._out, self.stem, result, self._title, "\n\n".join(self._texts), shown)


def main() -> None:
    end_on_sigterm()
    options = _options()
    sizes = SIZES[options.size]
    try:
        target = choose_target(TrainConfig(), options.backend)
    except AccelbridgeError as error:
        sys.exit(f"error: {error}")
    if not target.backend.accelerator and not sizes.host:
        reasons = "; ".join(f"{c.name}: {c.probe.reason}" for c in target.selection.candidates)
        sys.exit(f"error: an accelerator is what this measures; found {reasons}; give --tiny to see it run on a host")
    results = Results(sizes, target, options.out)
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as folder:
        for name in SECTIONS:
            seconds = min(sizes.budgets[name], sizes.total_s - results.seconds())
            if name not in options.sections:
                found = not_run("not asked")
            elif seconds < LEAST_S:
                found = not_run(BUDGET)
            else:
                found = Section(name, sizes, target.backend.name, seconds, Path(folder)).run()
            print(results.add(name, found), end="\n\n", flush=True)
    print(f"{results.seconds():.0f} s; {options.out / results.stem}.json and .md")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const=QUICK.name, help="fewer sizes")
    size.add_argument("--tiny", dest="size", action="store_const", const=TINY.name, help="miniatures, for a host, too")
    parser.add_argument("--backend", help="by name; default: as 'accelbridge train' chooses")
    default = ",".join(name for name in SECTIONS if name not in ASKED)
    parser.add_argument("--sections", default=default, help=f"some of them, with commas; besides, {', '.join(ASKED)}")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results", help="folder for the results")
    parser.set_defaults(size=FULL.name)
    options = parser.parse_args()
    options.sections = options.sections.split(",")
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"--sections {name} asked; there are {', '.join(SECTIONS)}")
    return options


if __name__ == "__main__":
    main()
