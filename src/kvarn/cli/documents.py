"""`kvarn index` and `kvarn search`: collections of local documents. Knows files and the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn.cli.terminal.text import printable
from kvarn.errors import ConfigError, DocumentError

if TYPE_CHECKING:
    from kvarn.retrieval.collection import OnAdded
    from kvarn.retrieval.types import AddReport, Document, Hit

Name = Annotated[str, typer.Option("--collection", "-c", metavar="NAME", help="Name of the collection.")]
Model = Annotated[str, typer.Option("--model", "-m", help="Embedding model.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SNIPPET_CHARS = 300
NO_COLLECTIONS = "no collections; make one with kvarn index add"


def index_add(
    collection: Name,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files or folders to index.")],
    *,
    model: Model = "minilm",
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Longest chunk, in tokens of the embedding model; by default 200, or as before.")
    ] = None,
    overlap: Annotated[int | None, typer.Option(help="Tokens repeated between chunks; by default 32.")] = None,
    as_json: Json = False,
) -> None:
    """Add files to a collection, or bring those that changed up to date."""
    from kvarn.retrieval.collection import Collection
    from kvarn.retrieval.ingest.chunking import Chunking
    from kvarn.retrieval.ingest.files import list_files

    files = list_files(paths)
    if not files:
        raise ConfigError(f"there is nothing to index in {', '.join(map(str, paths))}; give files or other folders")
    failed: dict[str, str] = {}
    chunking = None
    if chunk_tokens is not None or overlap is not None:
        chunking = Chunking(chunk_tokens or Chunking().tokens, Chunking().overlap if overlap is None else overlap)
    with (
        Collection(collection, model=model, chunking=chunking) as opened,
        _bar(len(files)) as on_added,
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
) -> None:
    """Remove documents by id, file or folder, or a whole collection."""
    from kvarn.retrieval.collection import Collection
    from kvarn.retrieval.storage import paths

    if drop_all == bool(documents):
        raise ConfigError("name the documents to remove, or say --all to remove the whole collection")
    if drop_all:
        paths.drop(collection)
        typer.echo(f"removed the collection {collection}")
        return
    paths.existing_folder(collection)
    with Collection(collection) as opened:
        ids = {id_ for given in documents or () for id_ in (given, *opened.ids_from(Path(given).as_posix()))}
        num_removed = opened.delete(sorted(ids))
    typer.echo(f"removed {num_removed:,} documents")
    if not num_removed:
        raise typer.Exit(1)


def index_ls(
    collection: Annotated[
        str | None, typer.Option("--collection", "-c", metavar="NAME", help="List its documents.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the collections, or the documents of one."""
    from kvarn.retrieval.collection import Collection
    from kvarn.retrieval.storage import paths

    if collection is None:
        names = paths.list_names()
        typer.echo(json.dumps(names) if as_json else "\n".join(names) or NO_COLLECTIONS)
        return
    with Collection.open(collection) as opened:
        documents = opened.documents()
    if as_json:
        typer.echo(json.dumps(documents, indent=2))
        return
    for document in documents:
        typer.echo(f"{document['chunks']:6,}  {printable(document['id'])}")


def index_stats(
    collection: Annotated[
        str | None, typer.Option("--collection", "-c", metavar="NAME", help="Only this one; by default all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what a collection holds, or what all of them hold."""
    from kvarn.retrieval.storage import paths

    names = paths.list_names() if collection is None else [collection]
    stats = [_stats(name) for name in names]
    if as_json:
        typer.echo(json.dumps(stats if collection is None else stats[0]))
    else:
        typer.echo("\n\n".join(map(_as_lines, stats)) or NO_COLLECTIONS)


def _stats(name: str) -> dict[str, Any]:
    from kvarn.retrieval.collection import Collection

    with Collection.open(name) as opened:
        return opened.stats()


def _as_lines(stats: dict[str, Any]) -> str:
    return "\n".join(f"{name:10}  {f'{value:,}' if isinstance(value, int) else value}" for name, value in stats.items())


def search(
    collection: Name,
    query: Annotated[list[str], typer.Argument(metavar="QUERY...", help="What to look for.")],
    *,
    k: Annotated[int, typer.Option("-k", help="Number of hits.")] = 10,
    mode: Annotated[str, typer.Option(help="hybrid, dense or sparse.")] = "hybrid",
    where: Annotated[
        str | None, typer.Option("--filter", help='Condition on metadata, as JSON: {"lang": "en"}.')
    ] = None,
    model: Model = "minilm",
    as_json: Json = False,
) -> None:
    """Search a collection."""
    from kvarn.retrieval.collection import Collection
    from kvarn.retrieval.types import Tuning, check_k, check_mode

    check_k("k", k)
    check_mode(mode)
    condition = _parsed_filter(where)
    with Collection.open(collection, model=model) as opened:
        hits = opened.search(" ".join(query), k, mode, condition, Tuning(highlights=True))  # type: ignore[arg-type]
    if as_json:
        typer.echo(json.dumps([asdict(hit) for hit in hits], indent=2, ensure_ascii=False))
        return
    for hit in hits:
        _print_hit(hit)
    if not hits:
        typer.echo("nothing was found", err=True)


def _readable(files: list[Path], failed: dict[str, str]) -> Iterator[Document]:
    """The documents of readable files; failed gets the reason of every other, by source."""
    from kvarn.retrieval.ingest.files import read_file

    for path in files:
        try:
            yield read_file(path)
        except DocumentError as error:
            failed[error.source] = str(error)


def _parsed_filter(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ConfigError(f'--filter is no JSON ({error}); write for example {{"lang": "en"}}') from None
    if not isinstance(parsed, dict):
        raise ConfigError('--filter must be a JSON object such as {"lang": "en"}')
    return parsed


def _print_report(report: AddReport, failed: dict[str, str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**asdict(report), "failed": failed}))
        return
    for reason in failed.values():
        typer.echo(f"kvarn: {printable(reason)}", err=True)
    for id_, owner in report.duplicates.items():
        typer.echo(f"kvarn: {printable(id_)} equals {printable(owner)} and was left out", err=True)
    typer.echo(
        f"{report.added:,} added, {report.updated:,} updated, {report.unchanged:,} unchanged, {report.chunks:,} chunks"
        + (f", {len(failed):,} could not be read" if failed else "")
    )


def _print_hit(hit: Hit) -> None:
    where = printable(hit.source or hit.document)
    heading = f"  {printable(hit.heading)}" if hit.heading else ""
    typer.echo(f"{hit.score:.4f}  {where}:{hit.span[0]}-{hit.span[1]}{heading}")
    snippet = " ".join(hit.text.split())
    typer.echo(f"        {printable(snippet[:SNIPPET_CHARS])}{'…' if len(snippet) > SNIPPET_CHARS else ''}")


@contextmanager
def _bar(num_files: int) -> Iterator[OnAdded | None]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("indexing", total=num_files)
        yield lambda num_done: progress.update(task, completed=num_done)
