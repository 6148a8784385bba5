"""Bodies and answers of /v1/collections, and the retrieval field of chats."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kvarn.server.api.openai.embeddings_schema import EmbeddingsUsage
from kvarn.server.api.schema import Answer, Body

MAX_DOCUMENTS = 1024
FILE_BYTES_PER_TOKEN = (
    1024  # of a file that is not read yet: most of it may be pictures; its text is charged once known
)
MAX_QUERIES = 64
MAX_HITS = 1000
MAX_HITS_TOGETHER = 8192  # of all queries of a request: each is as long as a chunk
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Scalar = str | int | float | bool
Filter = dict[str, Any]


class CollectionBody(Body):
    """A collection to begin."""

    name: str = Field(pattern=NAME)
    chunk_tokens: int = Field(200, ge=16, le=8192)
    overlap: int = Field(32, ge=0, le=4096)


class DocumentBody(Body):
    """A text to be found again, or a file; of HTML and files the readable text is kept."""

    text: str | None = Field(None, min_length=1)
    data: str | None = Field(
        None, min_length=1, description="The bytes of a PDF, Word document, EPUB or notebook in base64"
    )
    id: str | None = Field(None, min_length=1, max_length=1024)
    source: str = Field("", max_length=1024)
    metadata: dict[str, Scalar] = Field(default_factory=dict, max_length=256)
    kind: Literal["text", "markdown", "rst", "html", "pdf", "docx", "epub", "notebook", "csv", "code"] = "text"


class DocumentsBody(Body):
    """Documents to add, or to replace by id."""

    BYTES_PER_TOKEN: ClassVar[int] = FILE_BYTES_PER_TOKEN  # of what is no file more is taken: see least_cost
    documents: Annotated[list[DocumentBody], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class DeleteBody(Body):
    """Documents to remove."""

    ids: Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class HowBody(Body):
    """How to search."""

    k: int = Field(10, ge=1, le=MAX_HITS)
    mode: Literal["hybrid", "dense", "sparse"] = "hybrid"
    filter: Filter | None = None
    fusion: Literal["weighted", "rrf"] = "weighted"
    weights: Annotated[list[Annotated[float, Field(ge=0, le=1e6)]], Field(min_length=2, max_length=2)] | None = None
    per_document: int | None = Field(None, ge=1, le=MAX_HITS)
    min_score: float | None = Field(None, ge=-1e6, le=1e6)
    mmr: float | None = Field(None, ge=0, le=1)


class SearchBody(HowBody):
    """A question, or several."""

    query: (
        Annotated[str, Field(min_length=1, max_length=32_768)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=32_768)]], Field(min_length=1, max_length=MAX_QUERIES)
        ]
    )
    highlights: bool = False
    rerank: str | None = None  # a model that scores the candidates anew


class RetrievalBody(HowBody):
    """Where a chat looks things up."""

    collection: str = Field(pattern=NAME)
    k: int = Field(4, ge=1, le=100)
    max_context_tokens: int | None = Field(None, ge=1, le=2**24)
    query: str | None = Field(None, min_length=1, max_length=32_768)
    min_relevance: float | None = Field(
        None, ge=0, le=1, description="Of the best hit, else the answer is the refusal; 0: the model always answers"
    )
    refusal: str | None = Field(
        None, min_length=1, max_length=500, description="The answer where nothing relevant is found"
    )
    cite: Literal["free", "every_sentence"] | None = Field(
        None, description="every_sentence: each sentence of the answer ends with the number of a source"
    )
    return_passages: bool = Field(False, description="The citations have the text that the model read")


class CollectionAnswer(Answer):
    """What a collection holds."""

    object: Literal["collection"] = "collection"
    name: str
    documents: int
    chunks: int
    version: int


class CollectionsAnswer(Answer):
    """The caller's collections."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


class AddAnswer(Answer):
    """What became of the documents."""

    added: int
    updated: int
    unchanged: int
    chunks: int
    duplicates: dict[str, str]


class DeletedAnswer(Answer):
    """How many were there."""

    deleted: int


class SearchAnswer(Answer):
    """Hits, best first; for several queries a list of lists."""

    object: Literal["list"] = "list"
    data: list[Any]
    version: int
    usage: EmbeddingsUsage  # tokens of the queries, and of the prompts of a reranking model
