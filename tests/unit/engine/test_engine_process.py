"""An engine in a process of its own, through kvarn.LLM: what crosses the socket, and what is refused on this side."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvarn
from kvarn import errors
from kvarn.engine.process.messages import PackedError
from kvarn.errors import BackendError, CapacityError, InvalidParameter, KvarnError, PromptTooLong, RequestError
from tests.chat_model import write_chat_model

GREEDY = kvarn.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[kvarn.LLM, kvarn.LLM]]:
    """The same model with an engine in a process of its own, and with one here."""
    path: Path = write_chat_model(tmp_path_factory.mktemp("model") / "tiny")
    config = kvarn.EngineConfig(own_process=True, threads=1, context=256, queue_limit=4)
    with kvarn.LLM(path, config=config) as own, kvarn.LLM(path, threads=1, context=256) as here:
        yield own, here


def test_scores_answers_and_their_events_are_the_same(pair: tuple[kvarn.LLM, kvarn.LLM]) -> None:
    own, here = pair
    assert (own.score([5, 6, 7, 8]) == here.score([5, 6, 7, 8])).all()
    assert own.generate("Hello", GREEDY).token_ids == here.generate("Hello", GREEDY).token_ids
    told = [[(event.text, event.token_id, event.index) for event in llm.stream("Hello", GREEDY)] for llm in pair]
    assert told[0] == told[1]
    assert len(told[0]) == GREEDY.max_tokens
    assert own.stats().generated_tokens == here.stats().generated_tokens


def test_what_this_side_can_tell_is_refused_here(pair: tuple[kvarn.LLM, kvarn.LLM]) -> None:
    own, _ = pair
    kvarn.register_sampler("first", lambda logits, token_ids, draw: 0)
    with pytest.raises(InvalidParameter, match="own_process=False"):
        own.generate("Hello", kvarn.SamplingParams(sampler="first"))
    with pytest.raises(PromptTooLong, match="300"):
        own.generate([5] * 300, GREEDY)
    with pytest.raises(BackendError, match="cannot be run in the engine's process"):
        own.client.call(lambda engine: engine.stats()).result()


def test_a_full_queue_refuses_as_ever(pair: tuple[kvarn.LLM, kvarn.LLM]) -> None:
    own, _ = pair
    with pytest.raises(CapacityError) as refused:
        own.submit("Hello", GREEDY.replace(n=6))
    assert refused.value.retry_after_s > 0
    assert own.generate("Hello", GREEDY).text


def test_after_close_callers_are_told_so(tmp_path: Path) -> None:
    config = kvarn.EngineConfig(own_process=True, threads=1, context=256, max_running=1)
    llm = kvarn.LLM(write_chat_model(tmp_path / "tiny"), config=config)
    handles = [llm.submit("Hello", GREEDY.replace(max_tokens=240)) for _ in range(64)]  # the last waits for the others
    llm.close()
    for ask in (handles[-1].result, lambda: llm.generate("Hello", GREEDY)):
        with pytest.raises(RequestError, match="closed"):
            ask()
    assert not llm.client.is_alive


def test_a_file_that_cannot_be_loaded_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(errors.FormatError) as here:
        kvarn.LLM(tmp_path / "broken.gguf")
    with pytest.raises(errors.FormatError) as own:
        kvarn.LLM(tmp_path / "broken.gguf", config=kvarn.EngineConfig(own_process=True))
    assert str(own.value) == str(here.value)


def test_every_error_comes_back_as_it_was() -> None:
    kinds = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, KvarnError)]
    assert len(kinds) > 20
    for kind in kinds:
        error = kind.__new__(kind, "why")
        error.args = ("why",)
        error.__dict__["retry_after_s"] = 2.5
        error.__cause__ = OSError("disk")
        back = PackedError.of(error).error()
        assert (type(back), back.args, back.__dict__) == (kind, error.args, error.__dict__)
        assert str(back.__cause__) == "OSError: disk"
