"""Document bodies of a request to documents of a collection: texts, HTML, and files in base64; and what they cost."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

from kvarn.errors import Cancelled, DocumentError, InvalidParameter
from kvarn.server.api.schema import BYTES_PER_TOKEN, InvalidField
from kvarn.server.collections.document_reader import FileKind
from kvarn.server.collections.schema import FILE_BYTES_PER_TOKEN

if TYPE_CHECKING:
    import threading

    from kvarn.retrieval.embedder import Embedder, Role
    from kvarn.retrieval.types import Document, Float32
    from kvarn.server.access.priority_semaphore import Claim
    from kvarn.server.collections.document_reader import DocumentReader
    from kvarn.server.collections.schema import DocumentBody
    from kvarn.server.process.worker_threads import WorkerThreads

PIECE_CHARS = 32_768  # counted at a time: longer texts in pieces, between which the caller may have left
EMBEDDED_AT_ONCE = 32  # chunks
MAX_FILES = 32  # in one request: each takes a process
MAX_INLINE_HTML_CHARS = 16_384  # parsed here, in milliseconds at worst; more in a child that can be killed


async def read_documents(
    bodies: Sequence[DocumentBody], reader: DocumentReader, workers: WorkerThreads, claim: Claim
) -> list[Document]:
    """Read all documents of a request; raises if one cannot be read, or if two have the same id."""
    for number, body in enumerate(bodies):
        _check(body, f"documents.{number}")
    files = {number: body for number, body in enumerate(bodies) if body.data is not None}
    if len(files) > MAX_FILES:
        raise InvalidField(f"documents has more than {MAX_FILES} files; send them in several requests", "documents")
    texts = {number: await _file_text(body, number, reader, claim) for number, body in files.items()}
    texts |= await _html_texts(bodies, reader, claim)
    return await workers.run(claim, _documents, bodies, texts)


class WantedEmbedder:
    """An Embedder that stops, between two texts, when nobody waits for its work any more. For worker threads."""

    def __init__(self, inner: Embedder, ended: threading.Event) -> None:
        self._inner = inner
        self._ended = ended

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def max_tokens(self) -> int:
        return self._inner.max_tokens

    def count(self, text: str) -> int:
        """Of a text longer than any chunk it is the sum of its pieces, so that a word at a cut may count twice."""
        pieces = [text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS)]
        return sum(map(self._count, pieces))

    def _count(self, text: str) -> int:
        self._require_wanted()
        return self._inner.count(text)

    def embed(self, texts: Sequence[str]) -> Float32:
        return self._embed(texts, None)

    def embed_as(self, texts: Sequence[str], role: Role) -> Float32:
        return self._embed(texts, role)

    def _embed(self, texts: Sequence[str], role: Role | None) -> Float32:
        import numpy as np

        from kvarn.retrieval.embedder import embed_as

        parts = []
        for start in range(0, max(len(texts), 1), EMBEDDED_AT_ONCE):
            self._require_wanted()
            parts.append(embed_as(self._inner, texts[start : start + EMBEDDED_AT_ONCE], role))
        return np.concatenate(parts)

    def until(self, ended: threading.Event) -> WantedEmbedder:
        """The same embedder, for as long as somebody else waits."""
        return WantedEmbedder(self._inner, ended)

    def close(self) -> None:
        """It is the other embedder's to close."""

    def _require_wanted(self) -> None:
        if self._ended.is_set():
            raise Cancelled("the client left")


def least_cost(bodies: Sequence[DocumentBody]) -> int:
    """What documents are charged at least, in tokens, before they are read."""
    return sum(cost_in_bytes(body.text or "") + len(body.data or "") // FILE_BYTES_PER_TOKEN for body in bodies)


def cost_in_bytes(text: str) -> int:
    """The least a text is charged, in tokens."""
    return -(-num_bytes_of(text) // BYTES_PER_TOKEN)


def num_bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _check(body: DocumentBody, param: str) -> None:
    if (body.text is None) == (body.data is None):
        raise InvalidField(f"{param} needs either text or data; give one of them", param, "missing_field")
    if (body.data is not None) != (body.kind in get_args(FileKind)):
        kinds = ", ".join(get_args(FileKind))
        raise InvalidField(f"{param}: data is for the kinds {kinds}; all other kinds are sent as text", param)


async def _file_text(body: DocumentBody, number: int, reader: DocumentReader, claim: Claim) -> str:
    assert body.data is not None
    name = f"documents.{number}.data"
    data = await asyncio.to_thread(_decoded, body.data, name)
    try:
        return await reader.file_text(cast(FileKind, body.kind), data, _name(body, number), claim)
    except DocumentError as error:
        raise InvalidField(str(error), name, "retrieval_error") from None


async def _html_texts(bodies: Sequence[DocumentBody], reader: DocumentReader, claim: Claim) -> dict[int, str]:
    """The texts of all HTML documents by number, parsed by one child process; none if they are short enough."""
    pages = {number: body.text for number, body in enumerate(bodies) if body.kind == "html" and body.text is not None}
    if sum(map(len, pages.values())) <= MAX_INLINE_HTML_CHARS:
        return {}
    number = next(iter(pages))
    source = _name(bodies[number], number) if len(pages) == 1 else "HTML"
    texts = await reader.html_texts(list(pages.values()), source, claim)
    return dict(zip(pages, texts, strict=True))


def _name(body: DocumentBody, number: int) -> str:
    return body.source or body.id or f"document {number}"


def _decoded(text: str, param: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidField(f"{param} is not base64; send the bytes of the file in base64", param) from None


def _documents(bodies: Sequence[DocumentBody], texts: Mapping[int, str]) -> list[Document]:
    """Runs in a worker thread."""
    from kvarn.retrieval.ingest.validation import require_unique_ids

    documents = [_document(body, texts.get(number), number) for number, body in enumerate(bodies)]
    require_unique_ids(documents)
    return documents


def _document(body: DocumentBody, text: str | None, number: int) -> Document:
    from kvarn.retrieval.ingest.validation import as_document

    try:
        return as_document(_fields(body, text), number)
    except InvalidParameter as error:
        name = f"documents.{number}" + (f".{error.field}" if error.field in body.model_fields_set else "")
        raise InvalidField(f"{name}: {error}", name) from None


def _fields(body: DocumentBody, text: str | None) -> dict[str, Any]:
    """text: of a document that a child process has read."""
    from kvarn.retrieval.ingest.readers.html import html_to_text

    if text is None:
        assert body.text is not None
        text = html_to_text(body.text) if body.kind == "html" else body.text
    return body.model_dump(exclude={"data"}) | {"text": text}
