"""Calls as a model writes them in its form: for templates that do not, the tool prompt and the documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvarn.server.chat.output.call_forms.form import GEMMA_QUOTE, CallForm, PairForm, Piece, Word

Call = tuple[str, Mapping[str, Any]]  # name, arguments


def written(form: CallForm, calls: Sequence[Call]) -> str:
    """The text of calls, with everything around them."""
    texts = [_json_call(form, call) if is_json(form) else _named_call(form, call) for call in calls]
    end = "".join(form.end)
    if form.is_bare:
        return form.join.join(texts)
    if form.holds_many:
        inside = form.join.join(texts)
        return form.begin + (f"[{inside}]" if is_json(form) and form.join == ", " else inside) + end
    return form.between.join(form.begin + text + end for text in texts)


def is_json(form: CallForm) -> bool:
    """Whether calls are objects with a name and arguments."""
    return form.body == "json" or (form.takes_json and form.holds_many)


def _json_call(form: CallForm, call: Call) -> str:
    return "{" + _pieces(form.head) + _json({form.name_key: call[0], form.arguments_key: call[1]})[1:]


def _named_call(form: CallForm, call: Call) -> str:
    name, arguments = call
    head, after = (_pieces(pieces) for pieces in (form.head, form.after_name))
    return head + name + after + _arguments(form, arguments) + "".join(form.tail)


def _pieces(pieces: Sequence[Piece]) -> str:
    return "".join(
        piece if isinstance(piece, str) else piece.example for piece in pieces if isinstance(piece, str | Word)
    )


def _arguments(form: CallForm, arguments: Mapping[str, Any]) -> str:
    if form.pairs is not None:
        return "".join(_pair(form.pairs, key, value) for key, value in arguments.items())
    if form.body == "python":
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    if form.body == "gemma":
        return ",".join(f"{key}:{_gemma(value)}" for key, value in arguments.items())
    return _json(arguments)


def _pair(form: PairForm, key: str, value: Any) -> str:
    is_string = isinstance(value, str)
    close = next(text for text, told in form.key_closes if told in (None, is_string) and _names_type(text, value))
    text = value if is_string else _json(value)
    if is_string and form.quotes is not None:
        text = form.quotes[0] + text + form.quotes[1]
    return form.open + key + close + form.value_open + form.pad + text + form.pad + form.close


def _names_type(key_close: str, value: Any) -> bool:
    if 'type="' not in key_close:
        return True
    names = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return f'type="{names.get(type(value), "null")}"' in key_close


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return GEMMA_QUOTE + value + GEMMA_QUOTE
    if isinstance(value, list):
        return f"[{','.join(map(_gemma, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma(one)}' for key, one in value.items())}}}"
    return _json(value)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
