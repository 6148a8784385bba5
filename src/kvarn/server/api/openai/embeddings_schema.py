"""Body and answer of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from kvarn.server.api.schema import MAX_TOKEN_IDS, MAX_TOKEN_VALUES, Answer, Body, check_token_ids

MAX_INPUTS = 2048
Inputs = list[str] | list[list[int]]  # of one kind, none of them empty


def _listed(given: Any) -> Any:
    """Texts or lists of token ids, at least one and at most MAX_INPUTS; a single one becomes a list."""
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise ValueError("give a text, token ids, or a list of them that is not empty")
    if _is_id(given[0]):
        given = [given]
    if len(given) > MAX_INPUTS:
        raise ValueError(f"there are {len(given):,} inputs, at most {MAX_INPUTS:,} are allowed; send several requests")
    is_text = isinstance(given[0], str)
    if not is_text:
        check_token_ids([one for one in given if isinstance(one, list)])
    for index, one in enumerate(given):
        if not (isinstance(one, str) if is_text else isinstance(one, list) and all(map(_is_id, one))):
            raise ValueError(f"input {index} is not {'a text' if is_text else 'a list of token ids'} as the first one")
        if not one:
            raise ValueError(f"input {index} is empty; leave it out")
    return given


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_TOKEN_IDS}
_TEXT = {"type": "string", "minLength": 1}
_INPUT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_INPUTS},
    ]
}


class EmbeddingsBody(Body):
    """What to embed, and how."""

    MAX_VALUES: ClassVar[int] = MAX_TOKEN_VALUES
    INERT: ClassVar[frozenset[str]] = frozenset({"user"})
    model: str
    input: Annotated[Any, PlainValidator(_listed), WithJsonSchema(_INPUT_SCHEMA)]  # Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=2**20)
    pooling: Literal["mean", "cls", "last"] | None = None
    normalize: bool = True


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
