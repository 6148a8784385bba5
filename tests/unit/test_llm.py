"""kvarn.LLM on a tiny model with the reference backend: prompts of every kind, refusals, closing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvarn
from kvarn import LLM, FinishReason, SamplingParams
from tests.chat_model import write_chat_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), backend="reference", context=200) as llm:
        yield llm


def test_a_text_and_its_tokens_give_the_same_completion(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    assert llm.generate("hello", GREEDY).token_ids == llm.generate(ids, GREEDY).token_ids
    assert llm.generate(np.array(ids), GREEDY).token_ids == llm.generate(ids, GREEDY).token_ids


def test_a_list_gives_a_list_in_order(llm: LLM) -> None:
    alone = [llm.generate(text, GREEDY).token_ids for text in ("one", "two", "three")]
    assert [c.token_ids for c in llm.generate(["one", "two", "three"], GREEDY)] == alone
    ids = [llm.tokenizer.encode(text) for text in ("one", "two", "three")]
    assert [c.token_ids for c in llm.generate(ids, GREEDY)] == alone


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    params = [GREEDY.replace(max_tokens=number) for number in (2, 5)]
    answers = llm.generate(["one", "two"], params)
    assert [answer.token_ids for answer in answers] == [
        llm.generate(text, one).token_ids for text, one in zip(("one", "two"), params, strict=True)
    ]
    with pytest.raises(kvarn.InvalidParameter, match="params are 3 and prompts 2"):
        llm.generate(["one", "two"], [GREEDY] * 3)


def test_text_that_nobody_reads_along_is_the_same_as_streamed(llm: LLM) -> None:
    for params in (GREEDY, GREEDY.replace(temperature=2.0, seed=4, max_tokens=40), GREEDY.replace(n=2, seed=1)):
        *_, last = llm.stream("hello", params.replace(n=1))
        assert last.completion is not None
        assert llm.generate("hello", params).text == last.completion.text


def test_an_iterator_of_prompts_or_tokens_is_read_from_its_first_item(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    assert llm.generate(iter(ids), GREEDY).usage.prompt_tokens == len(ids)  # type: ignore[call-overload]
    assert len(llm.generate(iter(["one", "two"]), GREEDY)) == 2  # type: ignore[call-overload]


def test_a_stream_of_several_texts_is_refused_with_what_takes_them(llm: LLM) -> None:
    with pytest.raises(kvarn.InvalidParameter, match="generate several"):
        llm.stream(["one", "two"], GREEDY)  # type: ignore[list-item]


def test_a_stream_tells_the_same_as_generate(llm: LLM) -> None:
    events = list(llm.stream("hello", GREEDY))
    assert events[-1].completion is not None
    assert events[-1].completion.token_ids == llm.generate("hello", GREEDY).token_ids
    assert [event.finish_reason for event in events] == [None] * 7 + [FinishReason.LENGTH]


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.tokenizer.encode("<|user|>hi<|fin|><|assistant|>", parse_special=True)
    assert llm.chat(messages, GREEDY).token_ids == llm.generate(ids, GREEDY).token_ids
    assert [event.token_id for event in llm.stream(messages, GREEDY)] == list(llm.chat(messages, GREEDY).token_ids)


def test_logprobs_come_with_the_entropy_of_each_choice(llm: LLM) -> None:
    completion = llm.generate("hello", GREEDY.replace(logprobs=20))
    for entry in completion.logprobs or ():
        shares = np.exp([logprob for _, logprob in entry.top])
        assert entry.entropy is not None
        # 20 of 260 tokens hold a part of it; the rest is at most as much as if they were all alike.
        rest = max(1e-9, 1.0 - shares.sum())
        part = float(-(shares * np.log(shares)).sum())
        assert part <= entry.entropy <= part - rest * np.log(rest / 240) + 1e-4


def test_score_is_teacher_forced(llm: LLM) -> None:
    completion = llm.generate("hello", GREEDY.replace(logprobs=0))
    ids = [*llm.tokenizer.encode("hello"), *completion.token_ids]
    assert completion.logprobs is not None
    expected = [entry.logprob for entry in completion.logprobs]
    assert llm.score(ids)[-8:] == pytest.approx(expected, abs=1e-4)
    assert llm.score(ids).shape == (len(ids) - 1,)


def test_threads_may_share_an_llm(llm: LLM) -> None:
    expected = {text: llm.generate(text, GREEDY).token_ids for text in "abcd"}
    found = {}

    def ask(text: str) -> None:
        found[text] = llm.generate(text, GREEDY).token_ids

    threads = [threading.Thread(target=ask, args=(text,)) for text in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == expected


def test_a_submitted_request_calls_back_and_has_a_result(llm: LLM) -> None:
    events: list[kvarn.TokenEvent] = []
    handle = llm.submit("hello", GREEDY, on_token=events.append)
    completion = handle.result(30)
    assert completion.token_ids == llm.generate("hello", GREEDY).token_ids
    assert [event.token_id for event in events] == list(completion.token_ids)
    assert [event.token_id for event in handle] == list(completion.token_ids)
    assert handle.state is kvarn.RequestState.FINISHED
    assert {event.request_id for event in events} == {handle.id}


def test_several_answers_to_one_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5, n=3, ignore_eos=True)
    completion = llm.generate("hello", params)
    assert len(completion.alternatives) == 2
    assert completion.token_ids == llm.generate("hello", params.replace(n=1)).token_ids
    assert len({c.token_ids for c in (completion, *completion.alternatives)}) == 3


def test_messages_may_be_submitted(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert llm.submit(messages, GREEDY).result(30).token_ids == llm.chat(messages, GREEDY).token_ids


def test_a_repeated_prompt_is_found_by_its_own_tenant_only(llm: LLM) -> None:
    def cached(tenant: str) -> int:
        return llm.submit("a prompt of some length " * 3, GREEDY, tenant=tenant).result(30).usage.cached_tokens

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0
    with pytest.raises(kvarn.InvalidParameter, match="tenant"):
        llm.submit("a", GREEDY, tenant=5)  # type: ignore[arg-type]


def test_a_progress_bar_counts_answers_on_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    completions = llm.generate(["one", "two", "three"], GREEDY, progress=True)
    assert len(completions) == 3
    printed = capsys.readouterr()
    assert "3/3" in printed.err
    assert printed.out == ""


def test_statistics_tell_what_was_done(llm: LLM) -> None:
    before = llm.stats()
    llm.generate("hello", GREEDY)
    after = llm.stats()
    assert after.generated_tokens - before.generated_tokens == 8
    assert (after.running, after.waiting, after.blocks_used) == (0, 0, 0)
    assert llm.client.is_alive


def test_draining_finishes_what_runs_and_refuses_the_rest(path: Path) -> None:
    with LLM(str(path), backend="reference", context=200) as llm:
        handle = llm.submit("hello", GREEDY)
        assert llm.drain(30)
        assert len(handle.result(0).token_ids) == 8
        with pytest.raises(kvarn.CapacityError):
            llm.generate("hello", GREEDY)


def test_an_llm_that_is_dropped_stops_its_thread(path: Path) -> None:
    def engine_threads() -> int:
        return sum(thread.name == "kvarn-engine" for thread in threading.enumerate())

    before = engine_threads()
    llm = LLM(str(path), backend="reference", context=200)
    assert engine_threads() == before + 1
    stream = llm.stream("hello", GREEDY)
    del llm
    assert len(list(stream)) == 8  # the stream keeps the model
    del stream
    for _ in range(1000):
        if engine_threads() == before:
            break
        time.sleep(0.005)
    assert engine_threads() == before


@pytest.mark.parametrize(
    "prompt",
    [
        *([], [[]], [""], None, 5, 1.5, b"bytes", [1.5], [True], ["a", 5], [-1], [10**9], [[1], "a", None], "\ud800"),
        *({}, {"a": 1}, {1, 2}),
    ],
    ids=repr,
)
def test_prompts_that_are_none_are_refused_and_nothing_is_left_behind(llm: LLM, prompt: Any) -> None:
    with pytest.raises(kvarn.InvalidParameter):
        llm.generate(prompt, GREEDY)
    engine = llm._model.engine
    assert not engine.has_work
    assert engine.kv.num_free == engine.kv.num_blocks


def test_a_prompt_longer_than_the_context_is_refused_not_cut(llm: LLM) -> None:
    with pytest.raises(kvarn.PromptTooLong, match="200 tokens, the context allows 199"):
        llm.generate([5] * 200, GREEDY)


def test_one_bad_prompt_among_several_starts_none_of_them(llm: LLM) -> None:
    with pytest.raises(kvarn.PromptTooLong):
        llm.generate([[5], [5] * 300], GREEDY)
    assert not llm._model.engine.has_work


def test_wrong_params_are_refused(llm: LLM) -> None:
    with pytest.raises(kvarn.InvalidParameter, match="SamplingParams"):
        llm.generate("a", {"max_tokens": 5})  # type: ignore[arg-type]


def test_messages_may_not_be_empty(llm: LLM) -> None:
    with pytest.raises(kvarn.RequestError):
        llm.chat([])


def test_a_model_without_a_template_refuses_to_chat(tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "plain.gguf", **{"tokenizer.chat_template": None})
    with LLM(str(path), backend="reference") as llm, pytest.raises(kvarn.TemplateError):
        llm.chat([{"role": "user", "content": "hi"}])


def test_a_generator_refuses_to_embed(llm: LLM) -> None:
    with pytest.raises(kvarn.UnsupportedModel, match="encoder"):
        llm.embed("text")


def test_a_closed_llm_raises(path: Path) -> None:
    llm = LLM(str(path), backend="reference")
    llm.close()
    llm.close()
    with pytest.raises(kvarn.RequestError, match="closed"):
        llm.generate("a", GREEDY)
    with pytest.raises(kvarn.RequestError, match="closed"):
        llm.score([1, 2])


def test_the_models_recommended_sampling_is_used(tmp_path: Path) -> None:
    path = write_chat_model(tmp_path / "greedy.gguf", **{"general.sampling.temp": 0.0})
    with LLM(str(path), backend="reference") as llm:
        open_temperature = GREEDY.replace(temperature=None)
        assert llm.generate("hello", open_temperature).token_ids == llm.generate("hello", GREEDY).token_ids


def test_a_model_may_be_a_path_object(path: Path) -> None:
    with LLM(path, backend="reference") as given, LLM(str(path), backend="reference") as named:
        assert given.generate("hello", GREEDY).token_ids == named.generate("hello", GREEDY).token_ids


@pytest.mark.parametrize("model", [None, 5, b"bytes", ["smollm2"]], ids=repr)
def test_a_model_that_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(kvarn.ConfigError, match="model is"):
        LLM(model)


def test_options_and_config_together_are_refused() -> None:
    with pytest.raises(kvarn.ConfigError, match="threads"):
        LLM("no such model", threads=1, config=kvarn.EngineConfig())


def test_a_context_beyond_the_models_is_refused(path: Path) -> None:
    with pytest.raises(kvarn.ConfigError, match="2,048"):
        LLM(str(path), backend="reference", context=4096)


def test_small_kv_bytes_bound_the_context(path: Path) -> None:
    with LLM(str(path), backend="reference", kv_bytes=16 * 1024 * 4) as llm:
        assert llm.context < 2048
        completion = llm.generate("hello", GREEDY.replace(max_tokens=None))
        assert completion.usage.total_tokens == llm.context
        assert completion.finish_reason is FinishReason.LENGTH


def test_progress_is_told(path: Path) -> None:
    told: list[tuple[int, int | None, str]] = []
    LLM(str(path), backend="reference", progress=lambda *args: told.append(args)).close()
    done, total, label = told[-1]
    assert done == total
    assert label == "loading"
