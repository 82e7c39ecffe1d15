"""``accelbridge checkpoint``: list, verify, export, convert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from accelbridge.errors import CheckpointError, ConfigError

app = typer.Typer(help="List, verify, export and convert checkpoints.", no_args_is_help=True, rich_markup_mode=None)

CheckpointPath = Annotated[Path, typer.Argument(help="A checkpoint: OUTPUT/checkpoints/step_N.", show_default=False)]
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "fp32": "float32"}
_DTYPES |= {"bf16": "bfloat16", "fp16": "float16"}


@app.command()
def export(
    path: CheckpointPath,
    out: Annotated[Path, typer.Argument(help="A folder to make; it is never overwritten.", show_default=False)],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", show_default="as they are", metavar="DTYPE")
    ] = None,
    shard_bytes: Annotated[int, typer.Option(min=1, help="Begin a new file above this size.")] = 5 * 10**9,
    quantize: Annotated[
        str | None, typer.Option(help="Format for matrices: float8_e4m3fn, ...", show_default="none", metavar="FORMAT")
    ] = None,
    scaling: Annotated[
        str | None, typer.Option(help="How scales are made, with --quantize.", show_default="block128x128")
    ] = None,
    include: Annotated[
        str | None,
        typer.Option(help="Names of what is quantized: a pattern.", show_default="in numbered modules: layers.0.*"),
    ] = None,
) -> None:
    """Write the model's weights at PATH as safetensors, with a config.json, into OUT.

    Works on one process, whatever layout wrote the checkpoint. OUT appears whole or not at all. With --quantize,
    matrices of layers take a byte an element, with scales; embeddings, the head and vectors stay as they are.
    """
    if quantize is None and (scaling or include):
        raise ConfigError("--scaling or --include asked without --quantize; they say how and what is quantized; add it")
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype} asked; there are float32, bfloat16 and float16; choose one of them")
    from accelbridge.checkpoint.export import Quantize
    from accelbridge.checkpoint.export import export as export_weights

    how = None if quantize is None else Quantize(quantize, scaling or "block128x128", include or "")
    done = export_weights(path, out, None if dtype is None else _DTYPES[dtype], shard_bytes, how)
    typer.echo(f"{out}: {done.parameters:,} parameters in {done.tensors} tensors, {done.bytes:,} bytes")
    for name in done.files:
        typer.echo(f"  {name}")


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(help="A safetensors file with quantized tensors.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="A file to make; it is never overwritten.", show_default=False)],
    format: Annotated[str, typer.Option(help="The variant to write: float8_e4m3fnuz, ...", metavar="FORMAT")],
    no_convert: Annotated[bool, typer.Option("--no-convert", help="Refuse, if anything had to be converted.")] = False,
) -> None:
    """Write FILE to OUT with its quantized tensors in another variant of their format, and say what that did."""
    from accelbridge.checkpoint.variants import convert_file

    said = convert_file(file, out, format, convert=not no_convert)
    for line in said or [f"all of it is {format} already"]:
        typer.echo(line)


@app.command()
def verify(path: CheckpointPath) -> None:
    """Read every byte of the checkpoint at PATH and compare the checksums. Exit code 2 if it is damaged."""
    from accelbridge.checkpoint import manifest as manifests
    from accelbridge.checkpoint.load import damage
    from accelbridge.checkpoint.metadata import read_metadata

    manifest = manifests.read(path)
    found = damage(path, manifest, None)
    for name, entry in sorted(manifest.files.items()):
        bad = any(str(path / name) in line for line in found)
        typer.echo(f"{'DAMAGED' if bad else 'ok':8}{entry['bytes']:>16,}  {name}")
    if found:
        raise CheckpointError("; ".join(found))
    entries = len(read_metadata(path, manifest).state_dict_metadata)
    typer.echo(f"{path}: step {manifest.step}, {entries} entries, {manifest.bytes:,} bytes; all checksums match")


@app.command("list")
def list_(
    output: Annotated[Path, typer.Argument(help="Output directory of a run.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, one object per checkpoint.")] = False,
) -> None:
    """List the checkpoints of a run, oldest first, and what was set aside. Reads no shards: see verify."""
    from accelbridge.train.resume import CHECKPOINTS

    root = output / CHECKPOINTS if (output / CHECKPOINTS).is_dir() else output
    if not root.is_dir():
        raise ConfigError(f"{output} asked; there is no such folder; give the output.dir of a run")
    rows = _rows(root)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        losses = "".join(f"  {name} {value:.4f}" for name, value in row.get("metrics", {}).items())
        size = f"{row['bytes']:,} bytes of {row['ranks']} rank{'s' * (row['ranks'] != 1)}" if "bytes" in row else ""
        typer.echo(f"{row['name']:20}{row['state']:12}{size}{losses}{row.get('fault', '')}")
    if not rows:
        typer.echo(f"{root}: no checkpoints")


def _rows(root: Path) -> list[dict[str, Any]]:
    from accelbridge.checkpoint import manifest as manifests

    rows = [_row(path) for path in manifests.published(root)]
    known = {row["name"] for row in rows}
    for path in sorted(root.iterdir()):
        if path.is_dir() and "step_" in path.name and path.name not in known:
            partial = path.name.endswith(".partial")
            rows.append({"name": path.name, "state": "unfinished" if partial else "set aside"})
    return rows


def _row(path: Path) -> dict[str, Any]:
    from accelbridge.checkpoint import manifest as manifests

    try:
        manifest = manifests.read(path)
    except CheckpointError as error:
        return {"name": path.name, "state": "unusable", "fault": str(error)}
    row = {
        "name": path.name,
        "state": "complete",
        "step": manifest.step,
        "bytes": manifest.bytes,
        "ranks": manifest.world_size,
        "release": manifest.release,
        "metrics": dict(manifest.metrics),
    }
    found = manifests.quick_faults(path, manifest)
    return row if not found else {"name": path.name, "state": "unusable", "fault": "; ".join(found)}
