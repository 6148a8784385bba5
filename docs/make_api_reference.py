"""Write docs/api-reference.md from the server's OpenAPI document: `python docs/make_api_reference.py`.

A test fails when the file is not what this writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvarn.server.api.schema import Body
from kvarn.server.app import make_app
from kvarn.server.process.serve import make_state
from kvarn.server.process.settings import ServerConfig

TARGET = Path(__file__).parent / "api-reference.md"
HEAD = """# API reference

Written by `docs/make_api_reference.py` from the OpenAPI document, which a server also gives at `/openapi.json`.
How to call it is in [api.md](api.md).

A field in **bold** must be given; where `null` is taken it is the same as leaving a field out.
A name that an object does not have is refused, unless its value is `null`: official clients send answers back with the
empty fields of their own types.
Every path but `/health*`, `/docs` and the page at `/` needs a key if the server has any.
Errors are an `Error` object, under `/v1/messages` an `AnthropicError`, under `/api` an `OllamaError`.
"""


def render() -> str:
    """The whole page."""
    document = make_app(make_state(ServerConfig())).openapi()
    schemas = document["components"]["schemas"]
    bodies = {model.__name__: model for model in _subclasses(Body)}
    lines = [HEAD, "## Paths", ""]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += _operation(method, path, operation)
    lines += ["## Objects", ""]
    for name in sorted(schemas):
        lines += _object(name, schemas[name], bodies.get(name))
    return "\n".join(lines).rstrip() + "\n"


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {method.upper()} {path}"
    yield ""
    yield _one_line(operation.get("description") or operation["summary"])
    asked = _media(operation.get("requestBody", {}))
    told = _media(operation["responses"]["200"])
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "query":
            yield f"Query `{parameter['name']}`: {_type(parameter['schema'])}, {parameter['description']}."
    if asked:
        yield f"Body: {', '.join(asked)}."
    yield f"Answer: {', '.join(told) or 'text'}."
    yield ""


def _media(message: dict[str, Any]) -> list[str]:
    found = []
    for kind, content in message.get("content", {}).items():
        if kind == "application/json":
            found.append(_type(content["schema"]))
        elif kind == "text/event-stream":
            found.append("with `stream` a stream of events")
    return found


def _object(name: str, schema: dict[str, Any], model: type[Body] | None) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    if schema.get("description"):
        yield _one_line(schema["description"])
        yield ""
    fields = schema.get("properties", {})
    if fields:
        yield "| field | type | |"
        yield "|---|---|---|"
    required = schema.get("required", [])
    for field, value in fields.items():
        title = f"**`{field}`**" if field in required else f"`{field}`"
        yield f"| {title} | {_type(value)} | {_one_line(value.get('description', ''))} |"
    if fields:
        yield ""
    if model is not None:
        yield from _foreign("Accepted, without effect", model.INERT)
        yield from _foreign("Dropped, and named in the header `x-kvarn-warning`", model.HINTS)
        yield from _foreign("Refused by name", model.REFUSED)


def _foreign(words: str, names: frozenset[str]) -> Iterator[str]:
    if names:
        yield f"{words}: {', '.join(f'`{name}`' for name in sorted(names))}."
        yield ""


def _type(schema: dict[str, Any]) -> str:
    """A JSON Schema in few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts = [_type(part) for part in schema[key] if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(parts)) or "null"
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{value!r}`".replace("'", '"') for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(one for one in kind if one != "null")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}{_bounds(schema, 'minItems', 'maxItems')}"
    if kind == "string":
        return f"string{_bounds(schema, 'minLength', 'maxLength')}"
    return f"{kind}{_bounds(schema, 'minimum', 'maximum')}"


def _bounds(schema: dict[str, Any], low: str, high: str) -> str:
    """Both ends of a range; one so far out that nobody meets it is left out."""
    ends = [schema.get(low), schema.get(high)]
    first, last = (None if end is None or abs(end) >= 2**31 - 1 else f"{end:g}" for end in ends)
    if first is not None and last is not None:
        return f", {first} to {last}"
    return f", from {first}" if first is not None else f", up to {last}" if last is not None else ""


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def _subclasses(model: type[Body]) -> Iterator[type[Body]]:
    for child in model.__subclasses__():
        yield child
        yield from _subclasses(child)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
