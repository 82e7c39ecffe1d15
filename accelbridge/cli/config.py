"""``accelbridge config``: recipes from the files of other trainers."""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer

from accelbridge.errors import ConfigError

app = typer.Typer(help="Recipes from other trainers' files.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def config() -> None:
    """Recipes from other trainers' files."""


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="A DeepSpeed config, JSON or YAML.", show_default=False)],
    onto: Annotated[
        Path | None,
        typer.Option(
            metavar="RECIPE",
            help="Take what FILE does not say, as model and data, from it.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Data-parallel ranks, where batch sizes need it.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write the recipe there, not to stdout.", show_default=False),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is at --out.")] = False,
    leave_out: Annotated[
        bool, typer.Option("--leave-out-refused", help="Make the recipe without the keys that are refused.")
    ] = False,
) -> None:
    """Turn a DeepSpeed config into a recipe. On stderr: what became of every key, and why.

    A key is honoured (it is in the recipe), ignored (it changes no number of the run), refused (it would change one,
    and there is no such setting), or open (the file leaves it to you). One refused key: no recipe, exit code 2.
    """
    from accelbridge.imports.deepspeed import import_deepspeed

    if overwrite and out is None:
        raise ConfigError("--overwrite asked without --out; stdout is never overwritten; add --out PATH")
    source = import_deepspeed(file, devices)
    typer.echo(source.report(), err=True)
    refused = [finding.key for finding in source.refused()]
    if refused and not leave_out:
        raise ConfigError(
            f"{file}: {len(refused)} key{'s' * (len(refused) > 1)} refused, see above: {', '.join(refused)}; "
            "remove or change them, or give --leave-out-refused to go without"
        )
    text = _recipe_text(source.recipe, file, onto)
    if out is None:
        typer.echo(text, nl=False)
    else:
        _write(out, text, overwrite)


def _recipe_text(imported: dict[str, dict[str, Any]], file: Path, onto: Path | None) -> str:
    """A recipe that validates: ``imported`` over what ``onto`` says. Raises ConfigError."""
    from ruamel.yaml import YAML

    from accelbridge.train.config import TrainConfig
    from accelbridge.train.places import Places
    from accelbridge.train.recipe import validate

    tree: dict[str, Any] = TrainConfig.load(onto).model_dump(exclude_unset=True) if onto else {}
    if imported.get("optimizer", {}).get("schedule", "wsd") != "wsd":
        for setting in ("decay_steps", "decay_shape"):  # of another schedule
            tree.get("optimizer", {}).pop(setting, None)
    for section, values in imported.items():
        tree[section] = {**tree.get(section, {}), **values}
    validate(tree, Places(source=f"the recipe made from {file}"))
    stream = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(tree, stream)
    beside = f" and {onto.name}" if onto else ""
    return f"# Made from {file.name}{beside} by accelbridge config import.\n{stream.getvalue()}"


def _write(out: Path, text: str, overwrite: bool) -> None:
    asked = f"--out {out} asked"
    if out.exists() and not overwrite:
        raise ConfigError(f"{asked}; it exists; give another path, or --overwrite")
    try:
        temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out)
    except OSError as error:
        raise ConfigError(f"{asked}; it cannot be written: {error.strerror}; give another path") from None
