"""``accelbridge data``: build, check and show token stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from accelbridge.data.build import BuildSummary
    from accelbridge.data.store import TokenStore

app = typer.Typer(name="data", help="Build, check and show token stores.", no_args_is_help=True, rich_markup_mode=None)

StorePath = Annotated[Path, typer.Argument(help="A token store, or the OUT of a build.", metavar="PATH")]


@app.command()
def build(
    source: Annotated[Path, typer.Argument(help="A folder of text files, a text file, or a .jsonl file.")],
    out: Annotated[Path, typer.Argument(help="A new folder; gets OUT/train and OUT/validation.")],
    tokenizer: Annotated[str, typer.Option(help='"bytes", or the path of a tokenizer.json.')] = "bytes",
    eod: Annotated[
        str | None,
        typer.Option(help="The token that ends a document, if the tokenizer.json has no usual one."),
    ] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of the documents (of a text file: of its end) to hold out.")
    ] = 0.0,
    suffix: Annotated[
        list[str] | None, typer.Option(help='Take only files that end so, such as ".py"; repeatable.')
    ] = None,
    text_key: Annotated[str, typer.Option(help="The key of a JSONL line that has the document.")] = "text",
    exclude: Annotated[
        list[str] | None,
        typer.Option(help='Leave out files and folders that match, such as "tests" or "*.min.js"; repeatable.'),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses other documents for validation.")] = 0,
) -> None:
    """Tokenize SOURCE into token stores under OUT.

    A .jsonl file has one document per line; any other file is one document. Binary, empty and undecodable
    files are left out and counted. OUT appears whole or not at all, and is never overwritten.
    """
    from accelbridge.data.build import build as build_stores

    summary = build_stores(
        source,
        out,
        tokenizer=tokenizer,
        eod=eod,
        validation_fraction=validation_fraction,
        text_key=text_key,
        suffixes=suffix or (),
        exclude=exclude or (),
        seed=seed,
        show_progress=True,
    )
    for line in _describe_build(summary):
        typer.echo(line)


@app.command()
def verify(path: StorePath) -> None:
    """Read every byte of the stores at PATH and compare the checksums."""
    from accelbridge.data.store import TokenStore

    for folder in _store_folders(path):
        store = TokenStore(folder, verify="checksum")
        typer.echo(f"{folder}: all checksums match ({store.tokens:,} tokens in {len(store.index.shards)} shards)")


@app.command()
def show(
    path: StorePath,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, one object per store.")] = False,
) -> None:
    """Show what the stores at PATH hold."""
    from accelbridge.data.store import TokenStore

    facts = [_facts(TokenStore(folder)) for folder in _store_folders(path)]
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for store in facts:
        typer.echo(store["path"])
        for name, value in store.items():
            if name != "path":
                shown = f"{value:,}" if isinstance(value, int | float) else value
                typer.echo(f"  {name.replace('_', ' '):22}{shown}")


def _store_folders(path: Path) -> list[Path]:
    """The stores that a build put into ``path``; else ``path`` itself, which is a store or an error."""
    splits = [path / name for name in ("train", "validation")]
    return [split for split in splits if (split / "index.json").exists()] or [path]


def _facts(store: TokenStore) -> dict[str, Any]:
    index = store.index
    return {
        "path": str(store.path),
        "documents": index.documents,
        "tokens": index.tokens,
        "source_bytes": index.source_bytes,
        "tokens_per_document": round(index.tokens / index.documents, 1),
        "tokenizer": index.tokenizer.get("kind", "unknown"),
        "vocab_size": index.vocab_size,
        "eod": index.eod,
        "dtype": index.dtype,
        "shards": len(index.shards),
        "fingerprint": store.fingerprint,
    }


def _describe_build(summary: BuildSummary) -> list[str]:
    lines = [
        f"{split.path}: {split.documents:,} documents, {split.tokens:,} tokens from {split.bytes:,} bytes"
        for split in summary.splits.values()
    ]
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in summary.skipped.items())
    if skipped:
        lines.append(f"left out: {skipped}")
    return [*lines, f"built in {summary.seconds:.1f} s"]
