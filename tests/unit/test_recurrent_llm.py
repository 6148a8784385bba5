"""A model with recurrent layers through the SDK and the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvarn import LLM, EngineConfig, SamplingParams
from tests.recurrent_model import write_recurrent_model

STORY = "The mill stood by the river, and every morning the miller opened the gate. "
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recurrent_model(tmp_path_factory.mktemp("recurrent") / "tiny.gguf")


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
