"""``accelbridge``: train, devices, explain, estimate, config, data, checkpoint, report, conform.

Exit codes: 0 done; 1 a bug or a crash; 2 something asked that cannot be, with a message, and never worth a retry; 3 a
loss or gradient that is not finite; 4 a loss spike; 5 out of memory; 75 stopped by SIGTERM or a time limit after a
checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from accelbridge.cli.checkpoint import app as checkpoint_app
from accelbridge.cli.config import app as config_app
from accelbridge.cli.conform import app as conform_app
from accelbridge.cli.data import app as data_app
from accelbridge.cli.report import report_command
from accelbridge.errors import AccelbridgeError

app = typer.Typer(
    name="accelbridge",
    help="One sharded PyTorch trainer for every accelerator.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help and usage errors: the same in a terminal, a pipe and a log
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(config_app, name="config")
app.add_typer(conform_app, name="conform")
app.command("report")(report_command)

BackendOption = Annotated[
    str | None,
    typer.Option("--backend", metavar="NAME", help="Backend by name; wins over ACCELBRIDGE_BACKEND and the recipe."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a setting of the recipe; repeatable."),
]
NprocOption = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, metavar="N", help="Processes on this host; default: all accelerators, or one on the CPU."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RecipeArgument = Annotated[Path, typer.Argument(help="A YAML recipe.", metavar="RECIPE")]


def main() -> None:
    """Run the command line; an AccelbridgeError becomes its message and exit code."""
    try:
        app(prog_name="accelbridge")
    except AccelbridgeError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        from accelbridge import __version__

        typer.echo(f"accelbridge {__version__}")
        raise typer.Exit


@app.command()
def train(
    recipe: RecipeArgument,
    nproc: NprocOption = None,
    backend: BackendOption = None,
    overrides: SetOption = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|PATH",
            help='"auto" (newest intact checkpoint of output.dir, if any), or a checkpoint; default: "none".',
            show_default=False,
        ),
    ] = "none",
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, metavar="PORT", help="Loopback port for the ranks to meet; default: a free one."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST", help="Chrome trace of these steps, per rank, in OUTPUT/profile: --profile 10:12."
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Start all processes again, from the newest checkpoint, when one was killed or crashed, up to N "
            "times; default: 0.",
        ),
    ] = None,
) -> None:
    """Train as RECIPE says. Under torchrun, Slurm, Kubernetes or Ray it joins the ranks that are there."""
    from accelbridge.cli.train import run

    settings = [*(overrides or []), *([f"metrics.profile={profile}"] if profile is not None else [])]
    sys.exit(run(recipe, settings, nproc, backend, resume, port, max_restarts))


@app.command()
def devices(as_json: JsonOption = False) -> None:
    """List every known backend: available or why not, where it comes from, and its devices."""
    from accelbridge.plugins import survey
    from accelbridge.render import devices_text

    candidates = survey()
    typer.echo(json.dumps([c.as_dict() for c in candidates], indent=1) if as_json else devices_text(candidates))


@app.command()
def explain(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A YAML recipe; absent: only the choice of backend.", metavar="[RECIPE]"),
    ] = None,
    nproc: NprocOption = None,
    backend: BackendOption = None,
    overrides: SetOption = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Of a host that is not here: chip=NAME, and if need be devices=N or a software's version; repeatable.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the execution plan: which implementation every op gets, and why not another. Starts nothing."""
    from accelbridge.cli.explain import explain_text

    typer.echo(explain_text(recipe, overrides or [], nproc, backend, as_json, assume or ()))


@app.command()
def estimate(
    recipe: RecipeArgument,
    nproc: NprocOption = None,
    backend: BackendOption = None,
    overrides: SetOption = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of a host that is not here, as for explain; repeatable."),
    ] = None,
    compile_for: Annotated[
        str | None,
        typer.Option(
            metavar="WORD:CHIP:TOPOLOGY",
            help="Also compile the whole step, by the vendor's compiler, for a machine that is not here.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, metavar="S", help="Limit of all compiling; what runs longer is ended.")
    ] = 900.0,
    layers: Annotated[
        str,
        typer.Option(
            metavar="auto|whole|few",
            help="Compile the whole model, or derive it from one and two layers; auto: the second where the first "
            "takes more than half of the seconds.",
        ),
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Print what a run would need per device: memory by kind, FLOPs, collectives. Runs nothing, takes no weights."""
    from accelbridge.cli.estimate import estimate_text

    typer.echo(
        estimate_text(recipe, overrides or [], nproc, backend, assume or (), compile_for, seconds, layers, as_json)
    )
