"""What is wrong with a body is told in plain words, by the name of the field, whatever pydantic calls it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic_core import ErrorDetails
from pydantic_core._pydantic_core import list_all_errors
from pydantic_core.core_schema import ErrorType

from kvarn.server.api.anthropic.schema import MessagesBody
from kvarn.server.api.openai.chat_schema import ChatBody
from kvarn.server.api.openai.completions_schema import CompletionBody
from kvarn.server.api.openai.embeddings_schema import EmbeddingsBody
from kvarn.server.api.responses.schema import ResponsesBody
from kvarn.server.api.schema import Body, InvalidField
from kvarn.server.api.validation import ADVICE, OTHER_ADVICE, parse, refusal_of
from kvarn.server.collections.rerank_schema import RerankBody
from tests.unit.server.test_body_bounds import bodies, cases, schemas_of_routes

LONG = "x" * 2_000_000
# Every kind of value, and objects that name themselves wrongly.
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**70, 1.5, 1e300, "", "x", "5", "é", LONG, [], [1], ["x"], [[]], [{}], [None], {}),
    *({"type": "x"}, {"type": 5}, {"type": LONG}, {"role": "x"}, {"role": 5}, {"a": 1}, {"": {}}, {"1": None}),
    *({LONG: 1}, [[1], []], [1, "x"], ["x", 1], ["x"] * 5000, {str(number): 1 for number in range(400)}),
)
CHAT_HI = [{"role": "user", "content": "Hi"}]
BASES: dict[str, dict[str, Any]] = {  # bodies that are right, in which one field is replaced
    "/v1/chat/completions": {"model": "smollm2", "messages": CHAT_HI, "max_tokens": 2},
    "/v1/completions": {"model": "smollm2", "prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"model": "smollm2", "input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "smollm2", "messages": CHAT_HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "smollm2", "messages": CHAT_HI},
    "/v1/embeddings": {"model": "minilm", "input": "Hi"},
    "/infill": {"model": "smollm2", "input_prefix": "a", "input_suffix": "b", "n_predict": 2},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": CHAT_HI},
    "/rerank": {"model": "smollm2", "query": "q", "documents": ["a", "b"]},
    "/v1/collections": {"name": "c"},
    "/v1/collections/{name}/documents": {"documents": [{"text": "a"}]},
    "/v1/collections/{name}/documents/delete": {"ids": ["a"]},
    "/v1/collections/{name}/search": {"query": "q"},
}
INTERNAL = re.compile(
    r"instance of|found using|discriminator|\btags?\b|[Ii]nput should|valid (string|dictionary|list|integer|number)"
    r"|\bNone\b|\bTrue\b|\bFalse\b|\bdict|pydantic|_type\(\)|_role\(\)|union|constrained|validat|[Vv]alue error|"
    r"extract|permitted|Field required|\bFunction\b|\[key\]"
)
MAX_MESSAGE = 800


def class_names() -> Iterator[str]:
    def below(model: type[Body]) -> Iterator[str]:
        for one in model.__subclasses__():
            yield one.__name__
            yield from below(one)

    return below(Body)


def refusal(model: type[Body], data: Any) -> InvalidField | None:
    try:
        parse(model, data)
    except InvalidField as error:
        return error
    return None


def check_words(error: InvalidField, names: re.Pattern[str]) -> None:
    told = str(error)
    # What the client sent itself, and the choices it has, stand in quotation marks.
    words = re.sub(r"'[^']*'", "''", told.removeprefix(error.field or ""))
    assert not INTERNAL.search(words), told
    assert not names.search(words), told
    assert OTHER_ADVICE not in told
    assert len(told) <= MAX_MESSAGE
    assert len(error.field or "") <= 200


@pytest.mark.parametrize(("path", "schema"), list(schemas_of_routes()), ids=[path for path, _ in schemas_of_routes()])
def test_every_wrong_value_at_every_place_is_told_in_plain_words(path: str, schema: dict[str, Any]) -> None:
    model = bodies()[schema["title"]]
    names = re.compile(r"\b(" + "|".join(sorted(set(class_names()))) + r")\b")
    num_refused = 0
    for name, place in cases(schema).items():
        for value in VALUES:
            data = place(value)
            whole = BASES.get(path, {}) | data if name and isinstance(data, dict) else data
            if isinstance(whole, dict) and (error := refusal(model, whole)) is not None:
                num_refused += 1
                check_words(error, names)
                assert error.field is not None or error.code == "too_many_fields", (name, str(error))
    assert num_refused > len(VALUES)


KNOWN = {one["type"]: one for one in list_all_errors()}


@pytest.mark.parametrize("kind", [kind for kind in get_args(ErrorType) if kind not in ("value_error", "missing")])
def test_no_kind_of_error_that_pydantic_has_brings_its_own_words(kind: ErrorType) -> None:
    context = KNOWN[kind].get("example_context") or None
    error = ErrorDetails(type=kind, loc=("field",), msg="Secret", input={"a": 1})
    told = refusal_of({"field": {"a": 1}}, [error if context is None else {**error, "ctx": context}])
    words = re.sub(r"'[^']*'", "''", str(told))
    assert str(told).startswith("field")
    assert "Secret" not in str(told)
    assert not INTERNAL.search(words), told


def test_every_advice_is_for_an_error_that_there_is() -> None:
    assert set(ADVICE) <= set(get_args(ErrorType))


HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("model", "fields", "param", "words"),
    [
        (ChatBody, {"messages": [{"content": "hi"}]}, "messages.0.role", "is missing; give 'system', 'developer'"),
        (ChatBody, {"messages": [HI, {"role": "robot"}]}, "messages.1.role", "is 'robot'; give 'system'"),
        (ChatBody, {"messages": ["hi there"]}, "messages.0", "is a string; give an object"),
        (ChatBody, {"messages": [HI], "truncate": "right"}, "truncate", "is 'right'; give 'left'"),
        (ChatBody, {"messages": [HI], "tool_choice": "some"}, "tool_choice", "is 'some'; give 'none', 'auto' or"),
        (ChatBody, {"messages": [HI], "tool_choice": 5}, "tool_choice", "is 5; give "),
        (ChatBody, {"messages": [HI], "stream_options": 5}, "stream_options", "is 5; give an object"),
        (ChatBody, {"messages": [HI], "stop": 5}, "stop", "is 5; give a text or a list"),
        (ChatBody, {"messages": [HI], "stop": ["x"] * 17}, "stop", "is a list of length 17; give at most 16 items"),
        (ChatBody, {"messages": [HI], "logit_bias": {"a": 1}}, "logit_bias.a", "has a name that cannot be used"),
        (ChatBody, {"messages": [HI], "response_format": {}}, "response_format.type", "is missing; give it"),
        (
            ChatBody,
            {"messages": [HI], "response_format": {"type": "xml"}},
            "response_format.type",
            "is 'xml'; give 'text', 'json_object' or 'json_schema'",
        ),
        (ChatBody, {"messages": [HI], "": 1}, "''", "is no field known here"),
        (ResponsesBody, {"input": [{"type": "image"}]}, "input.0.type", "images are not supported"),
        (ResponsesBody, {"input": [{"type": "web"}]}, "input.0.type", "is 'web'; give 'message', 'function_call'"),
        (ResponsesBody, {"input": [{"content": "hi"}]}, "input.0.role", "is missing; give"),
        (
            ResponsesBody,  # as OpenAI has it, whose clients' types do not allow it either
            {"input": [{"role": "assistant", "content": None}]},
            "input.0.content",
            "is null; give a text or a list",
        ),
        (MessagesBody, {"messages": [HI | {"role": "robot"}], "max_tokens": 1}, "messages.0.role", "is 'robot'; give"),
        (EmbeddingsBody, {"input": ["a", "b", "c", 5]}, "input.3", "is 5; give texts only"),
        (EmbeddingsBody, {"input": ["a", ""]}, "input.1", "give at least one character"),
        (EmbeddingsBody, {"input": [[1], [2, -1]]}, "input.1.1", "is -1; token ids are whole numbers"),
        (EmbeddingsBody, {"input": [1, 2, "x"]}, "input.2", "token ids are whole numbers"),
        (EmbeddingsBody, {"input": ""}, "input", "give at least one character"),
        (CompletionBody, {"prompt": ["a", "b", None]}, "prompt.2", "is null; give texts only"),
        (CompletionBody, {"prompt": [[1, 2], []]}, "prompt.1", "give at least one character or token"),
        (RerankBody, {"query": "q", "documents": ["a", 5]}, "documents.1", "is 5; give a text or an object"),
        (RerankBody, {"query": "q", "documents": [{"text": 5}]}, "documents.0.text", "is 5; give a text"),
    ],
    ids=str,
)
def test_the_field_at_fault_and_its_value_are_named(
    model: type[Body], fields: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(model, {"model": "m"} | fields)
    assert error is not None
    assert error.field == param
    assert str(error).startswith(f"{param}")
    assert words in str(error)


def test_a_prompt_is_never_repeated() -> None:
    """Messages are logged; what stands in the place of a word of the protocol is, as far as one looks at it."""
    for fields in ({"messages": ["my secret"]}, {"messages": "my secret"}, {"messages": [HI], "stop": [["my secret"]]}):
        assert "secret" not in str(refusal(ChatBody, {"model": "m"} | fields))
