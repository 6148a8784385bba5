"""A model with recurrent layers through the SDK and the command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvarn import LLM, EngineConfig, SamplingParams
from kvarn.backends.native.backend import NativeBackend
from kvarn.engine.embed_score import batch_of
from kvarn.kv.cache import KVCache
from tests.recurrent_model import write_recurrent_model, write_state_space_model

STORY = "The mill stood by the river, and every morning the miller opened the gate. "
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True, logprobs=1)


WRITERS = {"attention beside it": write_recurrent_model, "states alone": write_state_space_model}


@pytest.fixture(scope="module", params=WRITERS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("recurrent") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), context=512) as opened:
        yield opened


def test_answers_are_the_same_alone_together_and_from_the_cache(llm: LLM) -> None:
    prompts = [STORY * 2, STORY, STORY * 2 + "Then", "Once"]
    alone = [llm.generate(prompt, PARAMS.replace(reuse_cache=False)) for prompt in prompts]
    for _ in range(2):
        together = [handle.result(60) for handle in [llm.submit(prompt, PARAMS) for prompt in prompts]]
        assert [(one.token_ids, one.logprobs) for one in together] == [(one.token_ids, one.logprobs) for one in alone]
    assert together[0].usage.cached_tokens >= 128


def test_several_choices_share_the_prompt(llm: LLM) -> None:
    answer = llm.generate(STORY * 2, PARAMS.replace(n=3))
    texts = {answer.text, *(one.text for one in answer.alternatives)}
    assert len(texts) == 3


def test_texts_are_scored_as_they_are_generated(llm: LLM) -> None:
    first = llm.generate(STORY, PARAMS.replace(temperature=0.0))
    assert first.logprobs is not None
    beside = llm.submit(STORY * 3, PARAMS)  # something runs meanwhile
    scores = llm.score([*llm.tokenizer.encode(STORY), *first.token_ids])[-len(first.token_ids) :]
    np.testing.assert_allclose(scores, [one.logprob for one in first.logprobs], atol=1e-4)
    assert len(beside.result(60).token_ids) == PARAMS.max_tokens


def test_few_slots_let_requests_wait(path: Path) -> None:
    prompts = [f"{number} {STORY}" for number in range(6)]
    with LLM(str(path), context=512) as llm:
        alone = [llm.generate(prompt, PARAMS.replace(reuse_cache=False)).token_ids for prompt in prompts]
    with LLM(str(path), config=EngineConfig(context=512, max_running=1)) as llm:
        handles = [llm.submit(prompt, PARAMS) for prompt in prompts]
        assert [handle.result(60).token_ids for handle in handles] == alone


def test_pages_of_states_go_back_when_idle_and_answers_stay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr("kvarn.engine.idle_memory.COMPACT_AFTER_S", 0.01)
    monkeypatch.setattr("kvarn.engine.idle_memory.FORGET_AFTER_S", 0.02)
    give_back = NativeBackend.return_states

    def noted(self: NativeBackend, slots: Iterable[int]) -> None:
        found = list(slots)
        returned.extend(found)
        give_back(self, found)

    monkeypatch.setattr(NativeBackend, "return_states", noted)
    with LLM(str(path), context=512) as llm:
        first = llm.generate(STORY * 2, PARAMS)
        assert eventually(lambda: len(set(returned)) >= 3)  # two of the request, and at least one snapshot
        assert llm.generate(STORY * 2, PARAMS).logprobs == first.logprobs
        assert llm.stats().state_slots_used == 0
        assert llm.stats().state_slots_total >= 4


def test_scores_leave_no_snapshots_that_nobody_reads() -> None:
    kv = KVCache(8, 16, num_states=12)
    batch = batch_of(kv, ["text"], [np.arange(40, dtype=np.int32)], 0)
    assert batch.states is not None
    assert batch.states.saved_rows.tolist() == []  # not behind the 32nd, where a request would leave one
    assert kv.states is not None
    assert kv.states.num_used == 1


def eventually(is_true: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    return is_true()
