"""`kvarn chat --url`: the same conversation with a model behind a server, whatever that server does."""

from __future__ import annotations

import threading

import pytest

from kvarn.cli.generate.cited_sources import source_lines
from kvarn.cli.generate.remote import RemoteModel
from kvarn.errors import RequestError
from kvarn.types import FinishReason, SamplingParams, TokenEvent
from tests.unit.bench.canned import (
    HANG_UP,
    MODELS,
    Answer,
    CannedServer,
    OnRequest,
    chunk,
    ended,
    event,
    refused,
    reply,
    said,
    stream_head,
)
from tests.unit.cli.conftest import Kvarn

QUESTION = [{"role": "user", "content": "Hello"}]
GOOD = [stream_head(), chunk(b": waiting\n\n"), said("Good "), said("day"), said(".", "stop"), *ended(5, 3)]


def listing(answer: Answer) -> OnRequest:
    """A server that lists its models and gives this answer to everything else."""
    return lambda _, request: [reply(200, MODELS)] if request.startswith(b"GET /v1/models ") else answer


def test_the_first_model_is_taken_and_its_answer_comes_in_pieces() -> None:
    with CannedServer(listing(GOOD)) as server:
        model = RemoteModel(f"{server.url}/v1", api_key="sk-2")
        events = list(model.stream(QUESTION, SamplingParams(max_tokens=9, temperature=0.5, seed=4)))
        (body,) = server.bodies()
        assert b"authorization: Bearer sk-2" in server.requests[-1]
    assert (model.name, model.context) == ("m", 2048)
    assert [event.text for event in events] == ["Good ", "day", ".", ""]
    completion = events[-1].completion
    assert completion is not None
    assert (completion.text, completion.finish_reason) == ("Good day.", FinishReason.STOP)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 3)
    assert body == {
        "model": "m",
        "messages": QUESTION,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 4,
    }


def test_a_collection_of_the_server_is_asked_for_and_its_sources_are_told() -> None:
    cited = [{"number": 1, "source": "a.md", "lines": {"first": 3, "last": 9}}, {"number": 2, "source": "b", "page": 4}]
    sources = event({"choices": [], "retrieval": {"citations": [*cited, 7]}})
    with CannedServer(listing([stream_head(), sources, said("Good", "stop"), *ended(5, 1)])) as server:
        model = RemoteModel(server.url)
        model.collection = "docs"
        told = list(model.stream(QUESTION, SamplingParams()))
        assert [one.text for one in told] == ["Good", ""]
        assert server.bodies()[0]["retrieval"] == {"collection": "docs"}
    assert _lines(told) == ["[1] a.md:3-9", "[2] b, page 4"]


def test_what_supports_an_answer_of_a_server_is_told() -> None:
    span = {"start": 0, "end": 5}
    sentences = [
        {"span": span, "score": 0.9, "passages": [{"number": 2, "span": span, "score": 0.9}]},
        {"span": {"start": 6, "end": 10}, "score": 0.1, "passages": []},
        {"span": "x"},
    ]
    cited = [{"number": 1, "source": "a.md", "cited": False}, {"number": 2, "document": "b.md", "cited": True}]
    last = event({"choices": [], "retrieval": {"citations": cited, "sentences": sentences}})
    with CannedServer(listing([stream_head(), said("It is. No.", "stop"), last, *ended(5, 1)])) as server:
        told = list(RemoteModel(server.url).stream(QUESTION, SamplingParams()))
    assert _lines(told) == ["[1] a.md, not cited", "[2] b.md, cited", "not in the sources: No."]


def _lines(events: list[TokenEvent]) -> list[str]:
    completion = events[-1].completion
    assert completion is not None
    return list(source_lines(completion))


def test_a_cancelled_answer_keeps_what_was_said() -> None:
    endless = [stream_head(), said("so "), *[0.1] * 300, said("far")]
    with CannedServer(listing(endless)) as server:
        answer = RemoteModel(server.url).stream(QUESTION, SamplingParams())
        threading.Timer(0.3, answer.cancel).start()
        last = list(answer)[-1]
    assert last.completion is not None
    assert (last.completion.text, last.finish_reason) == ("so ", FinishReason.CANCELLED)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([refused(429, "too many requests")], r"refused \(429\): too many requests"),
        ([refused(400, "prompt has 9 tokens", code="context_length_exceeded")], "prompt has 9 tokens; /reset"),
        ([b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 4\r\n\r\nhtml"], r"refused \(502\): Bad Gateway"),
        ([stream_head(), said("a"), event({"error": {"message": "it broke"}})], "it broke"),
        ([stream_head(), said("a"), HANG_UP], "broke off"),
        ([stream_head(), said("a"), b"0\r\n\r\n"], "broke off"),
        ([stream_head(), event("[1, 2]")], "not a JSON object"),
        ([stream_head(), event("{")], "not a JSON object"),
        ([b"220 smtp ready\r\n\r\n", HANG_UP], "did not answer"),
    ],
    ids=["429", "too long", "502", "error event", "hang up", "no DONE", "a list", "no JSON", "no HTTP"],
)
def test_what_a_server_does_wrong_is_told_in_a_sentence(answer: Answer, words: str) -> None:
    with CannedServer(listing(answer)) as server:
        model = RemoteModel(server.url)
        with pytest.raises(RequestError, match=words):
            list(model.stream(QUESTION, SamplingParams()))


def test_a_conversation_goes_on_after_a_refusal_and_remembers_what_was_said(kvarn: Kvarn) -> None:
    def answer(number: int, request: bytes) -> Answer:
        if request.startswith(b"GET"):
            return [reply(200, MODELS)]
        return [refused(429, "not now")] if number == 2 else GOOD

    with CannedServer(answer) as server:
        done = kvarn("chat", "--url", server.url, "-s", "Be kind.", stdin=b"one\ntwo\nthree\n")
        bodies = server.bodies()
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == ["Good day.", "Good day."]
    assert b"refused (429): not now" in done.stderr
    assert [message["content"] for message in bodies[-1]["messages"]] == ["Be kind.", "one", "Good day.", "three"]


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--url", "http://127.0.0.1:1"], "is a server running there?", 1),
        (["--url", "nonsense://x"], "give one such as http://127.0.0.1:8000", 2),
        (["--url", "http://127.0.0.1:1", "--threads", "2"], "--threads cannot be set for a server", 2),
        (["--api-key", "k"], "give its --url too", 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_cannot_work_are_one_sentence(kvarn: Kvarn, arguments: list[str], words: str, code: int) -> None:
    done = kvarn("chat", *arguments)
    assert done.returncode == code
    assert words in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_a_model_the_server_does_not_list_is_refused_with_those_it_does() -> None:
    with CannedServer(listing(GOOD)) as server:
        assert RemoteModel(server.url, "other").name == "other"
        with pytest.raises(RequestError, match="no model 'third'; it lists m, other"):
            RemoteModel(server.url, "third")
    with CannedServer(lambda *_: [reply(200, {"data": 5})]) as server, pytest.raises(RequestError, match="compatible"):
        RemoteModel(server.url)
