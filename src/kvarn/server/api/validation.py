"""Why a body cannot be used, in plain words: of all that pydantic finds, what the client meant, by the name it sent.

Words of ours for every kind of error, so that no name of a class or function and no phrase of the library gets out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvarn.errors import shortened
from kvarn.server.api.schema import MAX_FOREIGN, UNKNOWN_TAG, BadItem, Body, InvalidField

B = TypeVar("B", bound=Body)
Path = list[str | int]
MAX_SHOWN = 60  # characters of one name or value
MAX_NAME = 160  # of a whole dotted name
MEDIA = {  # types of content that no dialect's bodies have here
    **dict.fromkeys(("image_url", "input_image", "image"), "images are"),
    **dict.fromkeys(("input_audio", "audio"), "audio is"),
    **dict.fromkeys(("video_url", "input_video", "video"), "videos are"),
    **dict.fromkeys(("file", "input_file", "document"), "files are"),
}
ADVICE: Mapping[str, str] = {  # what to give, by the type of the error; in braces what the schema says
    "bool_type": "give true or false",
    "dict_type": "give an object",
    "finite_number": "give a finite number",
    "float_type": "give a number",
    "greater_than": "give more than {gt}",
    "greater_than_equal": "give at least {ge}",
    "int_type": "give a whole number",
    "less_than": "give less than {lt}",
    "less_than_equal": "give at most {le}",
    "list_type": "give a list",
    "literal_error": "give {expected}",
    "model_attributes_type": "give an object",
    "model_type": "give an object",
    "none_required": "give null, or leave it out",
    "recursion_loop": "make it flatter",
    "string_pattern_mismatch": "give a text that matches {pattern}",
    "string_too_long": "give at most {max_length} character",
    "string_too_short": "give at least {min_length} character",
    "string_type": "give a text",
    "string_unicode": "give valid Unicode",
    "too_long": "give at most {max_length} item",
    "too_short": "give at least {min_length} item",
}
LENGTHS = frozenset({"string_too_long", "string_too_short", "too_long", "too_short"})
JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
OTHER_ADVICE = "give another, as the documentation has it"


def parse(model: type[B], data: Mapping[str, Any], *, is_lenient: bool = False, ignored: list[str] | None = None) -> B:
    """The body as its model, or InvalidField naming the first field that is wrong.

    is_lenient: drop unknown ones; ignored: gets the names of hints that were dropped.
    """
    try:
        return model.model_validate(data, extra="ignore" if is_lenient else "forbid", context=ignored)
    except ValidationError as error:
        raise refusal_of(data, error.errors(include_url=False)) from None


def refusal_of(data: Any, errors: Sequence[ErrorDetails]) -> InvalidField:
    """In a union every variant complains; meant is the one that got furthest, then one of the type that was sent."""
    paths = [_path(data, one) for one in errors]
    at = max(range(len(errors)), key=lambda index: (len(paths[index]), not _is_of_type(errors[index])))
    meant, path = errors[at], paths[at]
    if not _is_of_type(meant):
        return _refusal(data, path, meant, _advice(meant))
    others = [one for one, other in zip(errors, paths, strict=True) if other == path and _is_of_type(one)]
    return _refusal(data, path, meant, " or ".join(dict.fromkeys(map(_advice, others))).replace(" or give ", " or "))


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


def _refusal(data: Any, path: Path, error: ErrorDetails, advice: str) -> InvalidField:
    param = _dotted(path) or None
    name = repr(param)[1:-1] if param else "the body"
    match error["type"]:
        case "refused_field":
            return InvalidField(f"{name} {error['msg']}", param, "unsupported_parameter")
        case "extra_forbidden":
            return InvalidField(f"{name} is no field known here; leave it out", name, "unknown_field")
        case "many_fields":
            return InvalidField(
                f"{name} has {error['ctx']['number']:,} fields that are not known here, at most {MAX_FOREIGN} are "
                "looked at; leave them out",
                param,
                "too_many_fields",
            )
    if not _is_there(data, path):
        return InvalidField(f"{name} is missing; {advice}", param, "missing_field")
    if (media := _media(error)) is not None:
        return InvalidField(f"{name}: {media} not supported by this model; send text", param, "unsupported_content")
    if error["loc"] and error["loc"][-1] == "[key]":
        return InvalidField(f"{name} has a name that cannot be used; {advice} as the name", param, "invalid_value")
    return InvalidField(f"{name} is {_shown(_value(data, path), error)}; {advice}", param, "invalid_value")


def _advice(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        reason = str(context["error"])
        return reason[:1].lower() + reason[1:]
    if kind in ("missing", "union_tag_not_found"):
        return "give it"
    if kind.startswith(UNKNOWN_TAG):
        return f"give {error['msg']}" if isinstance(error["input"], dict) else ADVICE["model_type"]
    if kind == "union_tag_invalid":
        return "give " + " or ".join(context["expected_tags"].rsplit(", ", 1))
    words = ADVICE.get(kind, OTHER_ADVICE).format_map({name: _plain(value) for name, value in context.items()})
    return f"{words}s" if kind in LENGTHS and " 1 " not in words else words


def _plain(value: object) -> str:
    """What a schema says: a limit, or several choices."""
    if isinstance(value, int | float):
        return f"{int(value):,}" if value == int(value) else f"{value:g}"
    return JSON_WORDS.get(str(value), shortened(str(value), 400, 60))


def _shown(value: object, error: ErrorDetails) -> str:
    """A text is repeated only where it is one of a few words."""
    is_choice = error["type"] == "literal_error" or (_tag_field(error) and isinstance(error["input"], dict))
    if is_choice and isinstance(value, str):
        return _cut(repr(value))
    if error["type"] in LENGTHS and isinstance(value, str | list | dict) and value:
        return f"{show(value)} of length {len(value):,}"
    return show(value)


def _media(error: ErrorDetails) -> str | None:
    """The kind of content that is no text, if that is what is wrong."""
    if error["type"] != "literal_error" and _tag_field(error) is None:
        return None
    given = error["input"]
    kind = given.get("type") if isinstance(given, dict) else given if error["loc"][-1] == "type" else None
    return MEDIA.get(kind) if isinstance(kind, str) else None


def _is_of_type(error: ErrorDetails) -> bool:
    """Whether what was sent is of another type than the one that complains takes."""
    return error["type"].endswith("_type") or error["type"] == "none_required"


def _path(data: Any, error: ErrorDetails) -> Path:
    """The error's location without the names pydantic gives to the variants of a union."""
    path: Path = []
    for step in error["loc"]:
        if _has(data, step):
            path.append(step)
            data = data[step]
    context = error.get("ctx", {})
    match error["type"]:
        case "missing":
            path.append(error["loc"][-1])
        case "refused_field":
            path.append(context["field"])
        case "value_error" if isinstance(context["error"], BadItem):
            path.extend(context["error"].at)
        case _ if isinstance(data, dict) and (tag := _tag_field(error)) is not None:
            path.append(tag)
    return path


def _tag_field(error: ErrorDetails) -> str | None:
    """The field that should tell which of several kinds an object is, where it does not."""
    if error["type"].startswith(UNKNOWN_TAG):
        return error["type"].removeprefix(UNKNOWN_TAG)
    is_tag = error["type"] in ("union_tag_invalid", "union_tag_not_found")
    return str(error["ctx"]["discriminator"]).strip("'") if is_tag else None


def _has(data: Any, step: str | int) -> bool:
    if isinstance(data, list):
        return isinstance(step, int) and 0 <= step < len(data)
    return isinstance(data, dict) and step in data


def _is_there(data: Any, path: Path) -> bool:
    for step in path:
        if not _has(data, step):
            return False
        data = data[step]
    return True


def _value(data: Any, path: Path) -> Any:
    for step in path:
        data = data[step]
    return data


def _dotted(path: Path) -> str:
    return shortened(".".join(_cut(str(step)) or "''" for step in path), MAX_NAME, MAX_SHOWN)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
