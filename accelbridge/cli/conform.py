"""``accelbridge conform``: a backend proves what it claims.

Exit codes: 0 held (or done), 1 not held, 2 something asked that cannot be, or a fault of the suite itself, 3 nothing
ran (no usable backend or device).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelbridge.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from accelbridge.conformance.pool import Outcome, Target

app = typer.Typer(
    name="conform",
    help="Prove a backend: probe, list, run, certify, verify, diff, mutants.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Backend = Annotated[str, typer.Option("--backend", metavar="NAME", help="Backend by name.")]
Levels = Annotated[
    str,
    typer.Option(
        "--level", metavar="LEVEL[,LEVEL]", help="core, train, fp8, offload, scale; each brings what it needs."
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder for the report.")]
Options = Annotated[
    list[str] | None, typer.Option("--option", metavar="A=B", help="Option of the backend (YAML value); repeatable.")
]


@app.command()
def probe(backend: Backend, option: Options = None, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """What the backend says of itself: devices, capabilities, facts. Starts one process of it and no test."""
    import tempfile

    from accelbridge.conformance.runner import Runner

    target = target_of(backend, option)
    with tempfile.TemporaryDirectory() as folder, Runner(target, Path(folder)) as runner:
        try:
            said = runner.introduce()
        except BackendError as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(3)
    if as_json:
        typer.echo(json.dumps(said, indent=1))
        return
    about = said["backend"]
    typer.echo(f"{about['name']}: {about['distribution']} {about['version']}, {about['execution']}, on {said['chip']}")
    typer.echo(f"{said['device_count']} devices; evidence here would be: {said['strength']}")
    for name in said["patched"]:
        typer.echo(f"it has replaced a function of torch: {name}")
    for cell in said["cells"]:
        note = cell["reason"] or (f"lowering {cell['lowering']}" if cell["lowering"] else "")
        typer.echo(f"  {cell['op']:28} {cell['dtype']:16} {cell['variant']:12} {cell['level']:12} {note}".rstrip())


@app.command("list")
def list_tests(level: Levels = "core,train,fp8,offload,scale") -> None:
    """The tests of a level and of those it rests upon."""
    from accelbridge.conformance.certify import check_levels, chosen_cases

    for case in chosen_cases(check_levels(_split(level)), ()):
        worlds = ",".join(map(str, case.worlds))
        typer.echo(f"{case.id:8} {case.level:8} ranks {worlds:6} {case.asserted()}")
        if case.spmd is not None:
            no_question = f"no question: {case.spmd}" if isinstance(case.spmd, str) else ""
            typer.echo(f"{'':8} {'':8} {'spmd':12} {no_question or case.asserted('spmd')}")


@app.command()
def run(
    backend: Backend,
    out: Out,
    level: Levels = "core",
    only: Annotated[str, typer.Option("--only", metavar="ID[,ID]", help="Ids or their beginnings: MM, COL-001.")] = "",
    option: Options = None,
) -> None:
    """Run tests, all of a level or some: for development. The report says what was left out."""
    _perform(backend, level, out, option, _split(only), certify=False)


@app.command()
def certify(backend: Backend, out: Out, level: Levels = "core", option: Options = None) -> None:
    """Run everything that a level needs, each test once more on corrupted outputs, and write the report."""
    _perform(backend, level, out, option, (), certify=True)


@app.command()
def verify(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a report.")]) -> None:
    """Re-check a report: complete, unchanged, and its conclusions follow from its tests and events."""
    from accelbridge.conformance.report.verify import load, verify

    faults, notes = verify(folder)
    report = load(folder)
    typer.echo(f"{report.backend.name}: {report.headline}")
    for text in notes:
        typer.echo(f"note: {text}")
    for text in faults:
        typer.echo(f"fault: {text}")
    levels = report.levels.values()
    held = report.run.mode == "certify" and bool(levels) and all(level.held for level in levels)
    typer.echo("the report agrees with itself" if not faults else f"{len(faults)} faults: do not trust this report")
    sys.exit(0 if held and not faults else 1)


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD")], new: Annotated[Path, typer.Argument(metavar="NEW")]
) -> None:
    """What changed between two reports. Exit code 1 where something did."""
    from accelbridge.conformance.report.verify import difference, load

    lines = difference(load(old), load(new))
    typer.echo("\n".join(lines) or "no difference")
    sys.exit(1 if lines else 0)


@app.command()
def mutants(
    only: Annotated[str, typer.Option("--only", metavar="ID[,ID]", help="Mutants or beginnings of test ids.")] = "",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the table as Markdown.")] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Mutants at a time; each is up to 4 processes.")] = 1,
) -> None:
    """The suite's self-proof: every test must turn red under each seeded defect that it names, by the right assertion,
    and stay green on every benign variant."""
    from accelbridge.conformance.selfproof import prove

    sys.exit(prove(_split(only), out, typer.echo, jobs))


def _perform(
    backend: str, level: str, out: Path, option: list[str] | None, only: tuple[str, ...], *, certify: bool
) -> None:
    from accelbridge.conformance.certify import Asked, check_levels, exit_code, perform

    asked = Asked(target_of(backend, option), check_levels(_split(level)), only, certify)
    report = perform(asked, out, _say)
    typer.echo(f"\n{report.headline}")
    for name, found in report.levels.items() if certify else ():
        typer.echo(f"{name}: {'held' if found.held else 'NOT held: ' + ', '.join(found.blocking)}")
    typer.echo(f"report: {out / 'report.html'}")
    sys.exit(exit_code(report))


def _say(outcome: Outcome, red: bool | None) -> None:
    ranks = f"{outcome.world} rank{'s' if outcome.world > 1 else ''}"
    trouble = "" if outcome.status == "PASS" else f"  {outcome.code} {outcome.message}"
    typer.echo(f"{outcome.id:8} {ranks:8} {outcome.status.value:14} {outcome.duration_s:6.1f} s{trouble}".rstrip())


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def target_of(backend: str, option: list[str] | None) -> Target:
    """What is tested. BackendError for a backend that is not installed, ConfigError for an option that is none."""
    from accelbridge.conformance.pool import Target
    from accelbridge.plugins import check_known

    check_known(backend)
    return Target(backend, _options(option or []))


def _options(pairs: list[str]) -> dict[str, Any]:
    from accelbridge.train.yaml_core import scalar

    options = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ConfigError(f'--option "{pair}" asked; an option is NAME=VALUE')
        options[name] = scalar(value)
    return options
