"""The suite proves that it can fail: every pair of mutant and test is run, none is taken on trust."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from accelbridge.conformance.mutants import Mutant, mutants
from accelbridge.conformance.pool import Outcome, Target
from accelbridge.conformance.registry import Case, cases
from accelbridge.conformance.runner import run_cases
from accelbridge.conformance.status import Status, worst
from accelbridge.errors import ConfigError, did_you_mean

SUBJECT = "cpu"
DEVICES = 8
"""Ranks that the reference backend may stand for."""


@dataclass(frozen=True)
class Pair:
    """One test under one mutant."""

    mutant: Mutant
    test: str
    outcomes: tuple[Outcome, ...]

    @property
    def good(self) -> bool:
        """Killed at any world size by an assertion that the mutant names; of a benign variant: green at all of them."""
        if not self.mutant.kills:
            return worst(outcome.status for outcome in self.outcomes) in (Status.PASS, Status.NOT_SUPPORTED)
        expected = self.mutant.kills[self.test]
        return any(o.status == Status.FAIL and o.code in expected for o in self.outcomes)

    @property
    def verdict(self) -> str:
        if not self.mutant.kills:
            return "green" if self.good else "RED"
        if self.good:
            return "killed"
        found = worst(outcome.status for outcome in self.outcomes)
        return "SURVIVED" if found == Status.PASS else "WRONG REASON"

    @property
    def said(self) -> str:
        """Status and code of the gravest outcome, with its message."""
        gravest = max(self.outcomes, key=lambda o: list(Status).index(o.status))
        return f"{gravest.status.value} {gravest.code} {gravest.message}".strip()


def prove(only: Sequence[str], out: Path | None, say: Callable[[str], object], jobs: int = 1) -> int:
    """Run the pairs (of mutants or tests whose ids begin as ``only`` says), ``jobs`` mutants at a time, and print each;
    returns an exit code."""
    chosen = _chosen(only)
    unproven = [] if only else sorted(set(cases()) - {test for m in mutants().values() for test in m.kills})
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="accelbridge-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda job: run_mutant(job[0], job[1], Path(folder) / job[0].id), chosen):
            pairs += found
            for pair in found:
                what = pair.said if not pair.good else pair.mutant.what
                say(f"{pair.verdict:13} {pair.mutant.id:5} {pair.test:8} {what}")
    bad = [pair for pair in pairs if not pair.good]
    defects = {pair.mutant.id for pair in pairs if pair.mutant.kills}
    say(f"{len(pairs) - len(bad)} of {len(pairs)} pairs as expected, {len(defects)} mutants, {len(bad)} not")
    for test in unproven:
        say(f"no mutant turns {test} red")
    if out is not None:
        out.write_text(table(pairs, unproven), encoding="utf-8")
    return 1 if bad or unproven else 0


def _chosen(only: Sequence[str]) -> list[tuple[Mutant, list[Case]]]:
    known = mutants()
    for word in only:
        if word not in known and not any(id.startswith(word) for id in cases()):
            raise ConfigError(f'mutant or test "{word}" asked; there is none{did_you_mean(word, [*known, *cases()])}')
    picked = []
    for mutant in known.values():
        wanted = _tests(mutant)
        if only and mutant.id not in only:
            wanted = [case for case in wanted if case.id.startswith(tuple(w for w in only if w not in known) or ("-",))]
        if wanted:
            picked.append((mutant, wanted))
    return picked


def _tests(mutant: Mutant) -> list[Case]:
    if mutant.kills:
        return [cases()[test] for test in mutant.kills]
    return [case for case in cases().values() if case.id.startswith(mutant.green)]


def run_mutant(mutant: Mutant, tests: Sequence[Case], out: Path) -> list[Pair]:
    """Every test under one mutant."""
    outcomes: dict[str, list[Outcome]] = {case.id: [] for case in tests}
    for outcome in run_cases(Target(SUBJECT, mutant=mutant.id), tests, out, DEVICES):
        outcomes[outcome.id].append(outcome)
    return [Pair(mutant, test, tuple(found)) for test, found in outcomes.items()]


def table(pairs: Sequence[Pair], unproven: Sequence[str]) -> str:
    """The pairs as Markdown, one row per mutant."""
    bad = [pair for pair in pairs if not pair.good]
    lines = [
        "# The suite's self-proof",
        "",
        f"{datetime.now(UTC).date()}: {len(pairs)} pairs of seeded defect (or benign variant) and test, "
        f"{len(pairs) - len(bad)} as expected, {len(bad)} not; {len(unproven)} tests without a killing mutant"
        + (f" ({', '.join(unproven)})" if unproven else "")
        + ". Made by `accelbridge conform mutants --out`.",
        "",
        "| mutant | what is broken | tests: assertion that caught it |",
        "| --- | --- | --- |",
    ]
    by_mutant: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_mutant.setdefault(pair.mutant.id, []).append(pair)
    for id, found in by_mutant.items():
        cells = [f"{p.test}: {_caught(p)}" if p.mutant.kills else f"{p.test}: {p.verdict}" for p in found]
        lines.append(f"| {id} | {found[0].mutant.what} | {'; '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _caught(pair: Pair) -> str:
    codes = sorted({o.code for o in pair.outcomes if o.status == Status.FAIL})
    return ", ".join(codes) if pair.good else f"**{pair.verdict}**"
