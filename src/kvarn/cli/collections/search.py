"""`kvarn search`: the chunks of a collection that match a query best, here or on a running server."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvarn.cli.collections.options import Json, KeyFile, Model, Name, Url, remote_collection, require_one_place
from kvarn.cli.terminal.storage_options import StorageOptions
from kvarn.cli.terminal.text import printable, printable_name
from kvarn.errors import ConfigError

if TYPE_CHECKING:
    from kvarn.llm import LLM
    from kvarn.retrieval.collection_storage import CollectionStorage
    from kvarn.retrieval.types import Hit

SNIPPET_CHARS = 300


def search(
    collection: Name,
    query: Annotated[list[str], typer.Argument(metavar="QUERY...", help="What to look for.")],
    *,
    k: Annotated[int, typer.Option("-k", help="Number of hits.")] = 10,
    mode: Annotated[str, typer.Option(help="hybrid, dense or sparse.")] = "hybrid",
    condition: Annotated[
        str | None, typer.Option("--filter", help='Condition on metadata, as JSON: {"lang": "en"}.')
    ] = None,
    min_score: Annotated[float | None, typer.Option(help="Leave out hits below this score.")] = None,
    per_document: Annotated[int | None, typer.Option(help="Most hits of one document.")] = None,
    rerank: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Score the hits anew with a cross-encoder or a chat model.")
    ] = None,
    model: Model = None,
    url: Url = None,
    key_file: KeyFile = None,
    where: StorageOptions,
    as_json: Json = False,
) -> None:
    """Search a collection."""
    from kvarn.retrieval.types import Tuning, check_k, check_mode

    check_k("k", k)
    check_mode(mode)
    require_one_place(url, where)
    wanted, text = _parsed_filter(condition), " ".join(query)
    if url is not None:
        if model is not None:
            raise ConfigError("--model is for a collection of this machine; a server embeds with its own model")
        body = {"query": text, "k": k, "mode": mode, "filter": wanted, "min_score": min_score, "rerank": rerank}
        hits = remote_collection(url, collection, key_file).search({**body, "per_document": per_document})
    else:
        tuning = Tuning(min_score=min_score, per_document=per_document, highlights=True)
        hits = _found(where.storage(), (collection, model), rerank, (text, k, mode, wanted, tuning))
    _print_hits(hits, as_json)


def _print_hits(hits: list[Hit], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(hit) for hit in hits], indent=2, ensure_ascii=False))
        return
    for hit in hits:
        _print_hit(hit)
    if not hits:
        typer.echo("nothing was found", err=True)


def _found(
    storage: CollectionStorage, named: tuple[str, str | None], rerank: str | None, asked: tuple[Any, ...]
) -> list[Hit]:
    """named: the collection, and its embedding model."""
    with ExitStack() as stack:
        opened = stack.enter_context(storage.open_to_search(named[0], model=named[1]))
        reranker = None if rerank is None else stack.enter_context(_reranker(rerank))
        return opened.search(*asked, rerank=reranker)


def _reranker(name: str) -> LLM:
    from kvarn.llm import LLM

    return LLM(name)


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


def _print_hit(hit: Hit) -> None:
    heading = f"  {printable_name(hit.heading)}" if hit.heading else ""
    typer.echo(f"{hit.score:.4f}  {printable_name(hit.place)}{heading}")
    snippet = " ".join(hit.text.split())
    typer.echo(f"        {printable(snippet[:SNIPPET_CHARS])}{'…' if len(snippet) > SNIPPET_CHARS else ''}")
