"""A parameter of the engine is told by the field of the body that it came from."""

from __future__ import annotations

from typing import Any

import pytest

from kvarn.errors import InvalidParameter, KvarnError, ModelNotFound, PromptTooLong, TemplateError
from kvarn.server.api.field_names import NO_FIELDS, given_fields
from kvarn.server.api.openai.chat_schema import ChatBody
from kvarn.server.api.openai.completions_schema import CompletionBody
from kvarn.server.api.schema import Body
from kvarn.server.api.validation import parse
from kvarn.server.collections.schema import SearchBody
from kvarn.server.failures import failure_of

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "m", "prompt": "Hi"}


def invalid(field: str) -> InvalidParameter:
    return InvalidParameter(f"{field} is wrong; give another", field=field)


@pytest.mark.parametrize(
    ("model", "body", "error", "param"),
    [
        (ChatBody, CHAT, PromptTooLong(9, 8), "messages"),
        (CompletionBody, TEXT, PromptTooLong(9, 8), "prompt"),
        (ChatBody, CHAT, TemplateError("x"), "messages"),
        (ChatBody, CHAT, ModelNotFound("x"), "model"),
        (SearchBody, {"query": "x", "rerank": "m"}, ModelNotFound("x"), "rerank"),
        (ChatBody, CHAT | {"max_tokens": 5}, invalid("max_tokens"), "max_tokens"),
        (ChatBody, CHAT | {"max_completion_tokens": 5}, invalid("max_tokens"), "max_completion_tokens"),
        (ChatBody, CHAT, invalid("max_tokens"), "messages"),
        (ChatBody, CHAT | {"n": 2}, invalid("n"), "n"),
        (CompletionBody, TEXT, invalid("n"), "prompt"),
        (ChatBody, CHAT | {"guided_regex": "a"}, invalid("constraint"), "guided_regex"),
        (ChatBody, CHAT | {"diffusion": {"cache": "block"}}, invalid("cache"), "diffusion.cache"),
        (ChatBody, CHAT | {"retrieval": {"collection": "c", "filter": {}}}, invalid("filter"), "retrieval.filter"),
        (ChatBody, CHAT, invalid("deadline_s"), None),
        (ChatBody, CHAT, InvalidParameter("x", field=None), None),
    ],
    ids=str,
)
def test_a_failure_names_the_field_that_was_given(
    model: type[Body], body: dict[str, Any], error: KvarnError, param: str | None
) -> None:
    failure = failure_of(error, given_fields(parse(model, body)))
    assert failure.param == param
    if isinstance(error, InvalidParameter) and param not in (None, "messages", "prompt"):
        assert failure.message == f"{param} is wrong; give another"


def test_words_that_are_also_names_stay_as_they_are() -> None:
    given = given_fields(parse(SearchBody, {"query": "x", "rerank": "m"}))
    assert failure_of(ModelNotFound("there is no model 'm'"), given).message == "there is no model 'm'"


def test_without_a_body_a_parameter_is_told_by_its_own_name() -> None:
    assert failure_of(invalid("limit"), NO_FIELDS).param == "limit"
    assert failure_of(RuntimeError("x"), NO_FIELDS).param is None
