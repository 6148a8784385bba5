"""Documents as clients send them to documents as collections take them: texts, HTML, and PDFs in base64."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvarn.server.api.schema import InvalidField

if TYPE_CHECKING:
    from kvarn.retrieval.types import Document
    from kvarn.server.collections.document_reader import DocumentReader
    from kvarn.server.collections.schema import DocumentBody
    from kvarn.server.process.worker_threads import WorkerThreads

MAX_PDFS = 32  # in one request: each takes a process
QUICK_CHARS = 16_384  # of HTML are read in milliseconds, whatever they are; more in a process that can be ended


async def read_documents(
    bodies: Sequence[DocumentBody], pdfs: DocumentReader, workers: WorkerThreads
) -> list[Document]:
    """The documents, all of them readable and with ids of their own."""
    for number, body in enumerate(bodies):
        _check(body, f"documents.{number}")
    if sum(body.data is not None for body in bodies) > MAX_PDFS:
        raise InvalidField(f"documents has more than {MAX_PDFS} PDFs; send them in several requests", "documents")
    read = {number: await _pdf(body, number, pdfs) for number, body in enumerate(bodies) if body.data is not None}
    read |= await _pages(bodies, pdfs)
    return await workers.run(_documents, bodies, read)


def _check(body: DocumentBody, param: str) -> None:
    if (body.text is None) == (body.data is None):
        raise InvalidField(f"{param} needs either text or data; give one of them", param, "missing_field")
    if (body.data is not None) != (body.kind == "pdf"):
        raise InvalidField(f'{param}: kind "pdf" and data belong together; all other kinds are sent as text', param)


async def _pdf(body: DocumentBody, number: int, pdfs: DocumentReader) -> str:
    assert body.data is not None
    data = await asyncio.to_thread(_decoded, body.data, f"documents.{number}.data")
    return await pdfs.text_of(data, _name(body, number))


async def _pages(bodies: Sequence[DocumentBody], pdfs: DocumentReader) -> dict[int, str]:
    """The texts of all pages by number, if they take a process; it reads all of them."""
    pages = {number: body.text for number, body in enumerate(bodies) if body.kind == "html" and body.text is not None}
    if sum(map(len, pages.values())) <= QUICK_CHARS:
        return {}
    number = next(iter(pages))
    source = _name(bodies[number], number) if len(pages) == 1 else "HTML"
    return dict(zip(pages, await pdfs.texts_of_html(list(pages.values()), source), strict=True))


def _name(body: DocumentBody, number: int) -> str:
    return body.source or body.id or f"document {number}"


def _decoded(text: str, param: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidField(f"{param} is not base64; send the bytes of the file in base64", param) from None


def _documents(bodies: Sequence[DocumentBody], read: Mapping[int, str]) -> list[Document]:
    """Runs in a worker thread."""
    from kvarn.retrieval.ingest.validation import as_document, require_own_ids

    documents = [as_document(_fields(body, read.get(number)), number) for number, body in enumerate(bodies)]
    require_own_ids(documents)
    return documents


def _fields(body: DocumentBody, read: str | None) -> dict[str, Any]:
    from kvarn.retrieval.ingest.html import html_to_text

    text = read
    if text is None:
        assert body.text is not None
        text = html_to_text(body.text) if body.kind == "html" else body.text
    return body.model_dump(exclude={"data"}) | {"text": text}
