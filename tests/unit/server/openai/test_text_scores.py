"""Scores of /v1/responses: those of the tokens of the text, however the events were batched and the text held back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvarn.server.api.openai.logprobs import TextScores
from kvarn.server.api.responses.response_stream import ResponseStream
from kvarn.server.api.responses.response_writer import ResponseWriter
from kvarn.server.chat.delta_stream import AnswerPart
from kvarn.server.chat.output.call_forms.detect import THINK
from kvarn.server.chat.output.deltas import ContentDelta
from kvarn.server.chat.output.formats import OutputFormat
from kvarn.server.chat.output.output_stream import OutputStream
from kvarn.tokenizer.incremental import IncrementalDecoder
from kvarn.tokenizer.tokenizer import Tokenizer
from kvarn.types import TokenLogprob
from tests.unit.structured.constrained import tokenizer

FORM = OutputFormat("hermes", THINK)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWERS = {
    "text": "Hello, wörld \U0001f600!",
    "reasoning": "<think>\nHm, 日本.\n</think>\n\nYes: 日本.",
    "call": f"Let me see.\n{CALL}",
    "all": f"<think>Hm.</think> One \U0001f600\n{CALL} two.",
    "no call": "a <tool_call>nothing</tool_call> b",
    "call only": CALL,
}


@pytest.mark.parametrize("kind", ["byte", "sentence"])
@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_the_scores_are_those_of_the_tokens_of_the_text(text: str, kind: str) -> None:
    words = tokenizer(kind)
    ids = [*words.encode(text, add_special=False), words.eos_ids[0]]
    wanted = tokens_of_the_text(words, ids)
    assert scored(words, ids, [len(ids)]) == wanted
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.randint(0, len(ids)) for _ in range(rng.randint(0, 6)))
        assert scored(words, ids, [*cuts, len(ids)], num_held=rng.randint(0, 5)) == wanted


def test_a_token_that_is_partly_text_counts_once() -> None:
    scores = text_scores("ab", "cd", "ef")
    assert [one.token_id for one in scores.take(1, 3)] == [0, 1]
    assert [one.token_id for one in scores.take(3, 4)] == []
    assert [one.token_id for one in scores.take(5, 6)] == [2]


def test_a_character_in_pieces_belongs_to_all_its_tokens() -> None:
    data = "\U0001f600".encode()
    assert len(text_scores(b"a" + data[:1], data[1:3], data[3:] + b"b").take(1, 2)) == 3
    assert len(text_scores(b"a" + data[:1], data[1:3], data[3:] + b"b").take(0, 1)) == 1


def test_tokens_of_other_parts_are_dropped() -> None:
    assert [one.token_id for one in text_scores("<think>", "Hm", "</think>", "Yes", "").take(17, 20)] == [3]


class Spelled:
    """A vocabulary of the given tokens."""

    drops_first_space = False

    def __init__(self, *tokens: bytes) -> None:
        self._tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def token_piece(self, token_id: int) -> tuple[bytes, bool]:
        return self._tokens[token_id], not self._tokens[token_id]


def text_scores(*tokens: str | bytes) -> TextScores:
    words: Any = Spelled(*(token if isinstance(token, bytes) else token.encode() for token in tokens))
    scores = TextScores(words, IncrementalDecoder(words))
    scores.add(TokenLogprob(token_id, -1.0) for token_id in range(len(tokens)))
    return scores


def scored(words: Tokenizer, ids: list[int], ends: list[int], *, num_held: int = 0) -> list[float]:
    """What a response says of the tokens, given in batches that end at `ends`; the last characters are held back."""
    stream, decoder = ResponseStream({"id": "resp_1"}), IncrementalDecoder(words)
    writer = ResponseWriter(stream, words, IncrementalDecoder(words))
    reader = OutputStream(FORM, ["f"])
    told: list[dict[str, Any]] = []
    text, begin, num_told = "", 0, 0
    for end in ends:
        is_last = end == len(ids)
        text += "".join(map(decoder.push, ids[begin:end])) + (decoder.flush() if is_last else "")
        num_certain = len(text) if is_last else max(num_told, len(text) - num_held)
        deltas = [*reader.push(text[num_told:num_certain]), *(reader.end() if is_last and begin < end else ())]
        scores = [TokenLogprob(ids[index], -float(index)) for index in range(begin, end)]
        told += writer.events(AnswerPart(deltas, scores))
        begin, num_told = end, num_certain
    items = stream.fail("", "")[-1]["response"]["output"]
    whole = [one["logprob"] for item in items if item["type"] == "message" for one in item["content"][0]["logprobs"]]
    parts = [
        one["logprob"] for event in told if event["type"].endswith("text.delta") for one in event.get("logprobs", ())
    ]
    assert parts == whole
    return whole


def tokens_of_the_text(words: Tokenizer, ids: list[int]) -> list[float]:
    """By definition: the bytes of the answer that are content, and the tokens that wrote them."""
    spelled = [b"" if words.is_control(one) else words.token_bytes(one) for one in ids]
    if words.drops_first_space:
        spelled[0] = spelled[0].removeprefix(b" ")
    text = b"".join(spelled).decode()
    reader = OutputStream(FORM, ["f"])
    deltas = [*reader.push(text), *reader.end()]
    content: set[int] = set()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            start = len(text[: text.index(delta.text)].encode())
            content.update(range(start, start + len(delta.text.encode())))
    wanted, at = [], 0
    for index, data in enumerate(spelled):
        if content & set(range(at, at + len(data))):
            wanted.append(-float(index))
        at += len(data)
    return wanted
