"""Documents as clients send them to documents as collections take them: texts, HTML, and PDFs in base64."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvarn.server.schema.common import InvalidField

if TYPE_CHECKING:
    from kvarn.retrieval.types import Document
    from kvarn.server.pdfs import PdfReader
    from kvarn.server.schema.collections import DocumentBody

MAX_PDFS = 32  # in one request: each takes a process


async def read_documents(bodies: Sequence[DocumentBody], pdfs: PdfReader) -> list[Document]:
    """The documents, all of them readable and with ids of their own."""
    for number, body in enumerate(bodies):
        _check(body, f"documents.{number}")
    if sum(body.data is not None for body in bodies) > MAX_PDFS:
        raise InvalidField(f"documents has more than {MAX_PDFS} PDFs; send them in several requests", "documents")
    read = {number: await _read(body, number, pdfs) for number, body in enumerate(bodies) if body.data is not None}
    return await asyncio.to_thread(_documents, bodies, read)


def _check(body: DocumentBody, param: str) -> None:
    if (body.text is None) == (body.data is None):
        raise InvalidField(f"{param} needs either text or data; give one of them", param, "missing_field")
    if (body.data is not None) != (body.kind == "pdf"):
        raise InvalidField(f'{param}: kind "pdf" and data belong together; all other kinds are sent as text', param)


async def _read(body: DocumentBody, number: int, pdfs: PdfReader) -> str:
    assert body.data is not None
    data = await asyncio.to_thread(_decoded, body.data, f"documents.{number}.data")
    return await pdfs.text_of(data, body.source or body.id or f"document {number}")


def _decoded(text: str, param: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidField(f"{param} is not base64; send the bytes of the file in base64", param) from None


def _documents(bodies: Sequence[DocumentBody], read: dict[int, str]) -> list[Document]:
    """Runs in a worker thread."""
    from kvarn.retrieval.intake import as_document, require_own_ids

    documents = [as_document(_fields(body, read.get(number)), number) for number, body in enumerate(bodies)]
    require_own_ids(documents)
    return documents


def _fields(body: DocumentBody, read: str | None) -> dict[str, Any]:
    from kvarn.retrieval.ingest.html import html_to_text

    text = body.text if read is None else read
    assert text is not None
    return body.model_dump(exclude={"data"}) | {"text": html_to_text(text) if body.kind == "html" else text}
