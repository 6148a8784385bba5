"""What all bodies share: strict types, and four kinds of names a client may send that are no fields of ours.

INERT names cannot change the answer and are dropped. HINTS say how it had best be made, which we cannot honour: they
are dropped too, and named in a header of the response. REFUSED ones ask for another answer: 400 by name. Unknown ones
are 400, unless the server was started with --unknown-fields ignore. Whatever the name, null is the same as leaving it
out: official clients write the fields of their own types so when they send an answer back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, ValidationInfo, model_validator
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from kvarn.errors import ConstraintError, InvalidParameter

B = TypeVar("B", bound="Body")
MAX_SHOWN = 60
# What a body costs at least, whatever it says: bytes for which a token is reserved before it is read ...
BYTES_PER_TOKEN = 16  # ... as words of which a model makes a single token have
COUNTED_BYTES_PER_TOKEN = 160  # ... of which nothing is computed but the tokens themselves
MAX_VALUES = 65_536  # numbers, texts, ... of a body: what Python makes of more takes too long and too much memory ...
MAX_TOKEN_IDS = 300_000  # ... besides token ids, which are cheap; as many as OpenAI takes in one request
MAX_TOKEN_VALUES = MAX_TOKEN_IDS + MAX_VALUES  # of a body with token ids
MAX_FOREIGN = 64  # names in one object that are no fields of ours: each would become an error of its own
MEDIA = {  # types of content that no dialect's bodies have here
    **dict.fromkeys(("image_url", "input_image", "image"), "images are"),
    **dict.fromkeys(("input_audio", "audio"), "audio is"),
    **dict.fromkeys(("video_url", "input_video", "video"), "videos are"),
    **dict.fromkeys(("file", "input_file", "document"), "files are"),
}
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
EVENT_STREAM: dict[str, Any] = {"text/event-stream": {"itemSchema": _EVENT}}  # in OpenAPI, in addition to JSON


def check_token_ids(lists: Sequence[Sequence[Any]]) -> None:
    """Refuse more token ids than one request may have; ValueError, for validators."""
    number = sum(map(len, lists))
    if number > MAX_TOKEN_IDS:
        raise ValueError(f"there are {number:,} token ids, at most {MAX_TOKEN_IDS:,} are read; send several requests")


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


class Answer(BaseModel):
    """Base of what we send; only the OpenAPI document uses these classes, answers are written as plain dicts."""

    model_config = ConfigDict(extra="allow")


def parse(model: type[B], data: Mapping[str, Any], *, is_lenient: bool = False, ignored: list[str] | None = None) -> B:
    """The body as its model, or InvalidField naming the first field that is wrong.

    is_lenient: drop unknown ones; ignored: gets the names of hints that were dropped.
    """
    try:
        return model.model_validate(data, extra="ignore" if is_lenient else "forbid", context=ignored)
    except ValidationError as error:
        meant = max(error.errors(include_url=False), key=lambda one: _nearness(data, one))
        raise _as_invalid_field(data, meant) from None


def body_of(model: type[Body]) -> dict[str, Any]:
    """openapi_extra of a route that reads its body itself; make_app moves the definitions to the components."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}", mode="validation")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def show(value: object) -> str:
    """A value as an error message may repeat it: numbers and the like; of texts and collections only the kind.

    Messages are logged, and a text may be a prompt.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return f"{value}" if abs(value) < 10**20 else "a number of more than 20 digits"
    if isinstance(value, float):
        return f"{value!r}"
    kind = "a string" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"
    return kind if value else f"{kind} of length 0"


def _as_invalid_field(data: Mapping[str, Any], error: ErrorDetails) -> InvalidField:
    path = _path(data, error)
    param = ".".join(map(str, path)) or None
    name = ascii(param)[1:-1][:MAX_SHOWN] if param else "the body"
    if error["type"] == "refused_field":
        return InvalidField(f"{name} {error['msg']}", param, "unsupported_parameter")
    if error["type"] == "extra_forbidden":
        return InvalidField(f"{name} is no field known here; leave it out", name, "unknown_field")
    if error["type"] == "many_fields":
        return InvalidField(
            f"{name} has {error['ctx']['number']:,} fields that are not known here, at most {MAX_FOREIGN} are looked "
            "at; leave them out",
            param,
            "too_many_fields",
        )
    if error["type"] == "missing":
        return InvalidField(f"{name} is missing; give it", param, "missing_field")
    if (media := _media(error)) is not None:
        return InvalidField(f"{name}: {media} not supported by this model; send text", param, "unsupported_content")
    reason = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    return InvalidField(f"{name} is {show(_value(data, path))}; {_lower(reason)}", param, "invalid_value")


def _media(error: ErrorDetails) -> str | None:
    """The kind of content that is no text, if that is what is wrong."""
    if error["type"] not in ("literal_error", "union_tag_invalid"):
        return None
    given = error["input"]
    kind = given.get("type") if isinstance(given, dict) else given if error["loc"][-1] == "type" else None
    return MEDIA.get(kind) if isinstance(kind, str) else None


def _nearness(data: Any, error: ErrorDetails) -> tuple[int, bool]:
    """In a union every variant complains; meant is the one that got furthest, then one of the type that was sent."""
    return len(_path(data, error)), not error["type"].endswith("_type")


def _path(data: Any, error: ErrorDetails) -> list[str | int]:
    """The error's location without the names pydantic gives to the variants of a union."""
    path: list[str | int] = []
    for step in error["loc"]:
        is_there = (isinstance(data, dict) and step in data) or (isinstance(data, list) and isinstance(step, int))
        if is_there:
            path.append(step)
            data = data[step]
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    if error["type"] == "unknown_role" and isinstance(data, dict) and "role" in data:
        path.append("role")
    if error["type"] == "union_tag_invalid" and "type" in data:
        path.append("type")
    if error["type"] == "refused_field":
        path.append(error["ctx"]["field"])
    return path


def _value(data: Any, path: Sequence[str | int]) -> Any:
    for step in path:
        data = data[step]
    return data


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
