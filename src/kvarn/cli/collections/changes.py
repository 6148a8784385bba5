"""`kvarn index add` and `rm`: files into a collection, here or on a server, and documents out of it. Knows files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn.cli.collections.options import (
    Json,
    KeyFile,
    Model,
    Name,
    Url,
    indexing_bar,
    remote_collection,
    require_one_place,
)
from kvarn.cli.terminal.storage_options import StorageOptions
from kvarn.cli.terminal.text import printable_name
from kvarn.cli.terminal.worker_options import WorkerOptions
from kvarn.errors import ConfigError, DocumentError

if TYPE_CHECKING:
    from kvarn.retrieval.ingest.chunking import Chunking
    from kvarn.retrieval.types import AddReport, Document


def index_add(
    collection: Name,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files or folders to index.")],
    *,
    model: Model = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Longest chunk, in tokens of the embedding model; by default 200, or as before.")
    ] = None,
    overlap: Annotated[int | None, typer.Option(help="Tokens repeated between chunks; by default 32.")] = None,
    url: Url = None,
    key_file: KeyFile = None,
    where: StorageOptions,
    who: WorkerOptions,
    as_json: Json = False,
) -> None:
    """Add files to a collection, or bring those that changed up to date."""
    from kvarn.retrieval.ingest.files import list_files
    from kvarn.retrieval.types import AddReport

    files = list_files(paths)
    if not files:
        raise ConfigError(f"there is nothing to index in {', '.join(map(str, paths))}; give files or other folders")
    failed: dict[str, str] = {}
    require_one_place(url, where)
    if url is not None:
        who.refuse()
        remote = remote_collection(url, collection, key_file)
        remote.create({"chunk_tokens": chunk_tokens, "overlap": overlap})
        added, failed = remote.add(files)
        _print_report(AddReport(**added), failed, as_json)
        raise typer.Exit(1 if failed else 0)
    chunking = _chunking(chunk_tokens, overlap)
    with (
        where.storage().open(collection, model=who.embedder(model), chunking=chunking) as opened,
        indexing_bar(len(files)) as on_added,
    ):
        report = opened.add(_readable(files, failed), on_added=on_added)
    _print_report(report, failed, as_json)
    if failed:
        raise typer.Exit(1)


def index_rm(
    collection: Name,
    documents: Annotated[
        list[str] | None, typer.Argument(metavar="[DOCUMENT]...", help="Ids, files or folders.")
    ] = None,
    drop_all: Annotated[bool, typer.Option("--all", help="Remove the whole collection.")] = False,
    url: Url = None,
    key_file: KeyFile = None,
    *,
    where: StorageOptions,
) -> None:
    """Remove documents by id, file or folder, or a whole collection."""
    require_one_place(url, where)
    if drop_all == bool(documents):
        raise ConfigError("name the documents to remove, or say --all to remove the whole collection")
    if url is not None:
        if drop_all:
            raise ConfigError("--all is for a collection of this machine; a server's is removed by DELETE over HTTP")
        num_removed = remote_collection(url, collection, key_file).delete(
            [Path(one).as_posix() for one in documents or ()]
        )
        typer.echo(f"removed {num_removed:,} documents")
        raise typer.Exit(0 if num_removed else 1)
    storage = where.storage()
    if drop_all:
        storage.drop(collection)
        typer.echo(f"removed the collection {collection}")
        return
    storage.require(collection)
    with storage.open(collection) as opened:
        ids = {id_ for given in documents or () for id_ in (given, *opened.ids_from(Path(given).as_posix()))}
        num_removed = opened.delete(sorted(ids))
    typer.echo(f"removed {num_removed:,} documents")
    if not num_removed:
        raise typer.Exit(1)


def _readable(files: list[Path], failed: dict[str, str]) -> Iterator[Document]:
    """The documents of readable files; failed gets the reason of every other, by source."""
    from kvarn.retrieval.ingest.files import read_file

    for path in files:
        try:
            yield read_file(path)
        except DocumentError as error:
            failed[error.source] = str(error)


def _print_report(report: AddReport, failed: dict[str, str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**asdict(report), "failed": failed}))
        return
    for reason in failed.values():
        typer.echo(f"kvarn: {printable_name(reason)}", err=True)
    for id_, owner in report.duplicates.items():
        typer.echo(f"kvarn: {printable_name(id_)} equals {printable_name(owner)} and was left out", err=True)
    typer.echo(
        f"{report.added:,} added, {report.updated:,} updated, {report.unchanged:,} unchanged, {report.chunks:,} chunks"
        + (f", {len(failed):,} could not be read" if failed else "")
    )


def _chunking(tokens: int | None, overlap: int | None) -> Chunking | None:
    from kvarn.retrieval.ingest.chunking import Chunking

    if tokens is None and overlap is None:
        return None
    return Chunking(tokens or Chunking().tokens, Chunking().overlap if overlap is None else overlap)
