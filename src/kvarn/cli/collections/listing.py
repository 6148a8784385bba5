"""`kvarn index ls` and `stats`: what the collections hold, of this machine or of a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvarn.cli.collections.options import Json, KeyFile, Url, remote_collection, remote_collections, require_one_place
from kvarn.cli.terminal.storage_options import StorageOptions
from kvarn.cli.terminal.text import printable_name

NO_COLLECTIONS = "no collections; make one with kvarn index add"


def index_ls(
    collection: Annotated[
        str | None, typer.Option("--collection", "-c", metavar="NAME", help="List its documents.")
    ] = None,
    url: Url = None,
    key_file: KeyFile = None,
    *,
    where: StorageOptions,
    as_json: Json = False,
) -> None:
    """List the collections, or the documents of one."""
    require_one_place(url, where)
    if collection is None:
        names = _names(url, key_file, where)
        typer.echo(json.dumps(names) if as_json else "\n".join(map(printable_name, names)) or NO_COLLECTIONS)
        return
    documents = _documents(collection, url, key_file, where)
    if as_json:
        typer.echo(json.dumps(documents, indent=2))
        return
    for document in documents:
        typer.echo(f"{document['chunks']:6,}  {printable_name(document['id'])}")


def index_stats(
    collection: Annotated[
        str | None, typer.Option("--collection", "-c", metavar="NAME", help="Only this one; by default all.")
    ] = None,
    url: Url = None,
    key_file: KeyFile = None,
    *,
    where: StorageOptions,
    as_json: Json = False,
) -> None:
    """Print what a collection holds, or what all of them hold."""
    require_one_place(url, where)
    names = _names(url, key_file, where) if collection is None else [collection]
    stats = [_stats(name, url, key_file, where) for name in names]
    if as_json:
        typer.echo(json.dumps(stats if collection is None else stats[0]))
    else:
        typer.echo("\n\n".join(map(_as_lines, stats)) or NO_COLLECTIONS)


def _names(url: str | None, key_file: Path | None, where: StorageOptions) -> list[str]:
    return list(where.storage().names()) if url is None else remote_collections(url, key_file).names()


def _documents(name: str, url: str | None, key_file: Path | None, where: StorageOptions) -> list[dict[str, Any]]:
    if url is not None:
        return remote_collection(url, name, key_file).documents()
    with where.storage().open_to_search(name) as opened:
        return opened.documents()


def _stats(name: str, url: str | None, key_file: Path | None, where: StorageOptions) -> dict[str, Any]:
    if url is not None:
        return remote_collection(url, name, key_file).stats()
    with where.storage().open_to_search(name) as opened:
        return opened.stats()


def _as_lines(stats: dict[str, Any]) -> str:
    values = {
        name: f"{value:,}" if isinstance(value, int) else printable_name(str(value)) for name, value in stats.items()
    }
    return "\n".join(f"{name:10}  {value}" for name, value in values.items())
