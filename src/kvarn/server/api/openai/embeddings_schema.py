"""Body and answer of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from kvarn.server.api.schema import MAX_TOKEN_VALUES, Answer, Body
from kvarn.server.api.text_inputs import Texts, listed_texts, texts_schema

MAX_INPUTS = 2048


def _listed(given: Any) -> Texts:
    return listed_texts(given, MAX_INPUTS)


class EmbeddingsBody(Body):
    """What to embed, and how."""

    MAX_VALUES: ClassVar[int] = MAX_TOKEN_VALUES
    INERT: ClassVar[frozenset[str]] = frozenset({"user"})
    model: str
    input: Annotated[Any, PlainValidator(_listed), WithJsonSchema(texts_schema(MAX_INPUTS))]  # Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=2**20)
    pooling: Literal["mean", "cls", "last"] | None = None
    normalize: bool = True
    prompt_name: str | None = Field(None, max_length=64)


class Embedding(Answer):
    """One vector: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Answer):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Answer):
    """One vector for each input, in order."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingsUsage
