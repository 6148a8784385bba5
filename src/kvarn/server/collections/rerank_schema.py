"""Body and answer of /rerank."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kvarn.server.api.openai.embeddings_schema import EmbeddingsUsage
from kvarn.server.api.schema import COUNTED_BYTES_PER_TOKEN, Answer, Body

MAX_RERANKED = 1024


class DocumentText(Body):
    """A document as an object, as some clients send it."""

    text: str = Field(min_length=1)


class RerankBody(Body):
    """A query, and the documents to order by how well they answer it."""

    BYTES_PER_TOKEN: ClassVar[int] = COUNTED_BYTES_PER_TOKEN  # its prompts are longer: see num_bytes_read
    INERT: ClassVar[frozenset[str]] = frozenset({"user"})
    model: str
    query: str = Field(min_length=1, max_length=32_768)
    documents: Annotated[
        list[Annotated[str, Field(min_length=1)] | DocumentText], Field(min_length=1, max_length=MAX_RERANKED)
    ]
    top_n: int | None = Field(None, ge=1, le=MAX_RERANKED)
    return_documents: bool = True


class RerankedDocument(Answer):
    """The document itself."""

    text: str


class RerankResult(Answer):
    """One document; index is its place in the request."""

    index: int
    relevance_score: float
    document: RerankedDocument | None = None


class RerankAnswer(Answer):
    """The best documents, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingsUsage
