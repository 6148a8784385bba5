"""The JSON value that a text stands for, by the schema of its argument: XML formats write strings without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvarn.formats.strict_json import parse_value
from kvarn.server.chat.output.call_forms.cursor import Impossible, TextCursor
from kvarn.server.chat.output.call_forms.literals import PYTHON, read_value
from kvarn.server.chat.output.schema_fit import fits

_END = "\0"  # ends a literal that is whole


def restored(text: str, schema: object, key: str, is_string: bool | None = None) -> Any:
    """What an argument is; schema: of all arguments, is_string: where the format itself tells."""
    if is_string:
        return text
    try:
        value = _parsed(text)
    except ValueError:
        return text
    if isinstance(value, str) and is_string is None:
        return text  # quotes of a string are a part of it
    return value if is_string is False or _fits(schema, key, value) or not _fits(schema, key, text) else text


def coerced(value: Any, schema: object, key: str) -> Any:
    """A value whose text stands in quotes though the schema wants no text."""
    is_text = isinstance(value, str) and not _fits(schema, key, value)
    return restored(value, schema, key) if is_text else value


def _fits(schema: object, key: str, value: object) -> bool:
    """Whether a value may be the argument of this name."""
    return fits(_member_schema(schema, key), value, root=schema)


def _member_schema(schema: object, key: str) -> object:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key, True) if isinstance(properties, Mapping) else True


def _parsed(text: str) -> Any:
    """JSON, or the literal that Python writes for it."""
    try:
        return parse_value(text, is_finite=True)
    except RecursionError as error:
        raise ValueError from error
    except ValueError:
        return _python(text)


def _python(text: str) -> Any:
    cursor = TextCursor(0)
    cursor.text = text.strip() + _END
    reading = read_value(cursor, PYTHON)
    try:
        next(reading)
    except StopIteration as read:
        if cursor.at == len(cursor.text) - 1:
            return read.value
    except Impossible:
        pass
    raise ValueError
