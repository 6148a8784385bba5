"""Validation of what callers pass to a collection: documents, in batches, and queries. Knows no index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvarn.checks import is_iterable, short
from kvarn.errors import InvalidParameter
from kvarn.retrieval.types import MAX_QUERY_CHARS, Document, check_text

DocumentInput = str | Document | Mapping[str, Any]
BATCH_DOCUMENTS = 512  # committed together: what a crash may lose
BATCH_CHARS = 200_000  # seconds of embedding
MAX_QUERIES = 1024


def checked_batches(documents: DocumentInput | Iterable[DocumentInput]) -> Iterator[list[Document]]:
    """Documents in batches that are committed together; raises if two have the same id."""
    return _batches(_checked(documents, set()))


def checked_queries(queries: Sequence[str]) -> list[str]:
    """The queries; raises if there are too many, or if one is empty or too long."""
    if isinstance(queries, str) or not isinstance(queries, Sequence) or len(queries) > MAX_QUERIES:
        raise InvalidParameter(
            f"queries is {short(queries)}; give a list of at most {MAX_QUERIES:,} texts", field="query"
        )
    for query in queries:
        check_text("the query", query, MAX_QUERY_CHARS, "query")
        if not query.strip():
            raise InvalidParameter("the query is empty; say what to look for", field="query")
    return list(queries)


def require_unique_ids(documents: Iterable[Document]) -> None:
    """Raise if two documents have the same id."""
    for _ in _checked(documents, set()):
        pass


def as_document(given: object, number: int) -> Document:
    """A document from a text or a mapping of its fields. number: its index, for error messages."""
    if isinstance(given, str):
        given = Document(given)
    elif isinstance(given, Mapping):
        unknown = set(given) - {"text", "id", "source", "metadata", "kind"}
        if unknown or "text" not in given:
            raise InvalidParameter(
                f"document {number} has the fields {', '.join(map(repr, sorted(map(str, given))))}; "
                "use text, and id, source, metadata and kind if you like",
                field="documents",
            )
        given = Document(**given)
    if not isinstance(given, Document):
        raise InvalidParameter(f"document {number} is {short(given)}; give a text or a document", field="documents")
    if not given.text.strip():
        raise InvalidParameter(f"document {number} ({short(given.key)}) is empty; leave it out", field="documents")
    return given


def _checked(documents: DocumentInput | Iterable[DocumentInput], seen: set[str]) -> Iterator[Document]:
    given = [documents] if isinstance(documents, str | Document | Mapping) else documents
    if not is_iterable(given):
        raise InvalidParameter(f"documents is {short(documents)}; give texts or documents", field="documents")
    for number, one in enumerate(given):
        document = as_document(one, number)
        key = document.key  # may be a hash of a long text
        if key in seen and document.id is not None:
            raise InvalidParameter(f"two documents have the id {short(key)}; give each its own", field="documents")
        if key not in seen:
            seen.add(key)
            yield document


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_chars = 0
    for document in documents:
        batch.append(document)
        num_chars += len(document.text)
        if len(batch) >= BATCH_DOCUMENTS or num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch
