"""The chunks of a chat with tools: what clients put together is what the whole answer says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvarn.server.api.openai.chat_stream import ChatChoiceStream, ChunkFrame
from kvarn.server.api.openai.envelope import Envelope, finish_word
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.output_stream import AnswerContext, OutputStream
from kvarn.types import FinishReason, TokenEvent, TokenLogprob
from tests.unit.server.output.texts import parse_output
from tests.unit.structured.constrained import tokenizer

CALL = '{"name": "f", "arguments": {"city": "Oslo"}}'
FRAME = ChunkFrame(Envelope("chatcmpl-1", "chat.completion.chunk", 1, "m", "x"), None)
ENFORCED = AnswerContext("s", is_enforced=True)
FORM = OutputFormat("json")


@pytest.mark.parametrize(
    ("text", "content"),
    [(CALL, None), ("Hello", "Hello"), ("", ""), (CALL + "\nDone.", "Done."), (CALL[:-1], CALL[:-1])],
    ids=["call", "text", "nothing", "both", "no call"],
)
@pytest.mark.parametrize("has_scores", [False, True])
def test_content_is_null_if_there_are_only_calls(text: str, content: str | None, has_scores: bool) -> None:
    choices = told(text, has_tools=True, has_scores=has_scores)
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert joined_content(choices) == content
    parsed = parse_output(text, FORM, ["f"])
    assert content == (parsed.content if parsed.tool_calls else parsed.content or "")


@pytest.mark.parametrize("has_scores", [False, True])
def test_without_tools_the_content_begins_empty(has_scores: bool) -> None:
    choices = told("", has_tools=False, has_scores=has_scores)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}


@pytest.mark.parametrize(
    ("text", "reason", "word"),
    [
        (CALL, FinishReason.STOP, "tool_calls"),
        (CALL[:-5], FinishReason.STOP, "stop"),  # by a stop string
        (CALL[:-5], FinishReason.LENGTH, "length"),
        (CALL, FinishReason.LENGTH, "length"),
        (f"{CALL}\n{CALL[:30]}", FinishReason.STOP, "stop"),
        (f"{CALL}\n{CALL[:10]}", FinishReason.STOP, "stop"),
    ],
)
def test_tool_calls_is_the_end_of_answers_whose_calls_are_whole(text: str, reason: FinishReason, word: str) -> None:
    parsed = parse_output(text, FORM, ["f"], ENFORCED)
    assert finish_word(reason, has_whole_calls=parsed.has_whole_calls) == word
    *_, last = told(text, has_tools=True, reason=reason, around=ENFORCED)
    assert last["finish_reason"] == word


def told(
    text: str,
    *,
    has_tools: bool,
    has_scores: bool = False,
    reason: FinishReason = FinishReason.STOP,
    around: AnswerContext | None = None,
) -> list[dict[str, Any]]:
    """The choice of each chunk, the text one character at a time."""
    reader = OutputStream(FORM, ["f"] if has_tools else [], around)
    stream = ChatChoiceStream(0, FRAME, tokenizer("byte"), reader, has_tools=has_tools)
    score = TokenLogprob(1, -1.0) if has_scores else None
    events = [TokenEvent(character, 1, index, logprob=score) for index, character in enumerate(text)]
    events.append(TokenEvent("", 2, len(text), finish_reason=reason, logprob=score))
    written = "".join(stream.chunks(event) for event in events)
    chunks = [json.loads(line.removeprefix("data: ")) for line in written.split("\n\n") if line]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def joined_content(choices: list[dict[str, Any]]) -> str | None:
    """As the official client adds them up: text replaces null, and is appended to text."""
    content: str | None = None
    for given in (choice["delta"].get("content") for choice in choices):
        content = given if content is None else content + (given or "")
    return content
