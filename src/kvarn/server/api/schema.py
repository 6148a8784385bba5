"""What all bodies share: strict types, and four kinds of names a client may send that are no fields of ours.

INERT names cannot change the answer and are dropped. HINTS say how it had best be made, which we cannot honour: they
are dropped too, and named in a header of the response. REFUSED ones ask for another answer: 400 by name. Unknown ones
are 400, unless the server was started with --unknown-fields ignore. Whatever the name, null is the same as leaving it
out: official clients write the fields of their own types so when they send an answer back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Discriminator, GetCoreSchemaHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from kvarn.errors import ConstraintError, InvalidParameter, PromptTooLong

# What a body costs at least, whatever it says: bytes for which a token is reserved before it is read ...
BYTES_PER_TOKEN = 16  # ... as words of which a model makes a single token have
COUNTED_BYTES_PER_TOKEN = 160  # ... of which nothing is computed but the tokens themselves
MAX_VALUES = 65_536  # numbers, texts, ... of a body: what Python makes of more takes too long and too much memory ...
MAX_TOKEN_IDS = 300_000  # ... besides token ids, which are cheap; as many as OpenAI takes in one request
MAX_TOKEN_VALUES = MAX_TOKEN_IDS + MAX_VALUES  # of a body with token ids
MAX_FOREIGN = 64  # names in one object that are no fields of ours: each would become an error of its own
UNKNOWN_TAG = "unknown_tag."  # and the field that tells which of several kinds an object is: a type of errors
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
EVENT_STREAM: dict[str, Any] = {"text/event-stream": {"itemSchema": _EVENT}}  # in OpenAPI, in addition to JSON


class BadItem(ValueError):
    """For validators: why one part of a value cannot be used; at: the way to it."""

    def __init__(self, message: str, *at: str | int) -> None:
        super().__init__(message)
        self.at = at


class InvalidField(InvalidParameter):
    """A field of a request's body has a value we cannot use.

    field: its dotted name in a ChatBody, or in the body it was sent in; mentions: the names of fields in the message,
    which a dialect may have to replace by its own. Without any, that is the field itself.
    """

    def __init__(
        self, message: str, field: str | None, code: str | None = None, *, mentions: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, field=field)
        self.code = code
        self.mentions = mentions or (() if field is None else (field,))


class ConstraintRefused(InvalidField):
    """The field of a body that asks for a constraint which cannot be used."""


@contextmanager
def field_at_fault(field: str | None) -> Iterator[None]:
    """A constraint that cannot be used is the fault of the field that asks for it."""
    try:
        yield
    except ConstraintError as error:
        raise ConstraintRefused(f"{field or 'the constraint'}: {error}", field, "constraint_error") from None


@contextmanager
def item_at_fault(name: str) -> Iterator[None]:
    """One of several texts that cannot be used is told by its place; name: with its number, as in prompt.3."""
    try:
        yield
    except (PromptTooLong, InvalidParameter) as error:
        if error.field not in ("prompt", "text", "texts", name.partition(".")[0]) or error.field == name:
            raise  # of all texts
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else getattr(error, "code", None)
        raise InvalidField(f"{name}: {error}", name, code) from None


def _fail_fast(schema: Any) -> None:
    """Let every list and dict stop at its first error: one for each of a million items takes seconds and gigabytes."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("type") in ("list", "dict"):
                part["fail_fast"] = True
            parts.extend(part.values())
        elif isinstance(part, list | tuple):
            parts.extend(part)


class Body(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )
    INERT: ClassVar[frozenset[str]] = frozenset()
    HINTS: ClassVar[frozenset[str]] = frozenset()
    REFUSED: ClassVar[frozenset[str]] = frozenset()
    MAX_VALUES: ClassVar[int] = MAX_VALUES  # in a whole body of this kind
    BYTES_PER_TOKEN: ClassVar[int] = BYTES_PER_TOKEN
    _FIELDS: ClassVar[frozenset[str]] = frozenset()  # as clients call them

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._FIELDS = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _without_foreign_names(cls, data: Any, info: ValidationInfo) -> Any:
        foreign = data.keys() - cls._FIELDS if isinstance(data, dict) else ()
        if not foreign:
            return data
        if len(foreign) > MAX_FOREIGN:
            raise PydanticCustomError("many_fields", "", {"number": len(foreign)})
        for name in cls.REFUSED & foreign:
            if data[name] is not None:
                raise PydanticCustomError("refused_field", "is not supported here; leave it out", {"field": name})
        left_out = {name for name in foreign if data[name] is None or name in cls.INERT or name in cls.HINTS}
        if info.context is not None:
            info.context.extend(name for name in sorted(cls.HINTS & foreign) if data[name] is not None)
        return {name: data[name] for name in data if name not in left_out} if left_out else data


def tagged(tag_of: Callable[[Any], str], name: str, tags: str) -> Discriminator:
    """Which of several kinds of objects it is, told by a function; the field and its values are those in messages."""
    return Discriminator(tag_of, custom_error_type=UNKNOWN_TAG + name, custom_error_message=tags)


class Answer(BaseModel):
    """Base of what we send; only the OpenAPI document uses these classes, answers are written as plain dicts."""

    model_config = ConfigDict(extra="allow")


BODIES: dict[str, type[Body]] = {}  # of routes that read theirs themselves, by title; filled when they are imported


def body_of(model: type[Body]) -> dict[str, Any]:
    """openapi_extra of a route that reads its body itself: its title, as the schema is written with the document."""
    BODIES[model.__name__] = model
    schema = {"title": model.__name__}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
