"""Options of the commands for collections, and the way to a collection of a running server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvarn.cli.terminal.storage_options import StorageOptions
from kvarn.errors import ConfigError

if TYPE_CHECKING:
    from kvarn.cli.collections.remote_collection import RemoteCollection, RemoteCollections
    from kvarn.retrieval.collection import OnAdded

Name = Annotated[str, typer.Option("--collection", "-c", metavar="NAME", help="Name of the collection.")]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Embedding model; by default the collection's own, minilm at first.")
]
Url = Annotated[str | None, typer.Option("--url", help="A collection of a running server, as http://127.0.0.1:8000.")]
KeyFile = Annotated[
    Path | None, typer.Option(readable=False, help="File with the server's API key; by default KVARN_API_KEY, if set.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def require_one_place(url: str | None, where: StorageOptions) -> None:
    """Refuse a server beside a Milvus."""
    if url is not None and where.milvus_uri is not None:
        raise ConfigError("--url names a server, which has a storage of its own; leave out --url or --milvus-uri")


def remote_collections(url: str, key_file: Path | None) -> RemoteCollections:
    """The collections of a running server."""
    from kvarn.cli.collections.remote_collection import RemoteCollections
    from kvarn.cli.serving.top import read_key
    from kvarn.config import client_key

    return RemoteCollections(url, client_key() if key_file is None else read_key(key_file))


def remote_collection(url: str, name: str, key_file: Path | None) -> RemoteCollection:
    """One of them."""
    from kvarn.cli.collections.remote_collection import RemoteCollection

    return RemoteCollection(remote_collections(url, key_file), name)


@contextmanager
def indexing_bar(num_files: int | None) -> Iterator[OnAdded | None]:
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
