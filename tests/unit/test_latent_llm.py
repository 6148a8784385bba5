"""A model with latent attention through the SDK: what works, and what is refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvarn import LLM, EngineConfig, SamplingParams
from kvarn.errors import ConfigError
from tests.latent_model import write_latent_model

STORY = "The mill stood by the river, and every morning the miller opened the gate. "
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=16, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_latent_model(tmp_path_factory.mktemp("latent") / "tiny.gguf")


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
    assert len({answer.text, *(one.text for one in answer.alternatives)}) == 3


def test_a_cache_of_eight_bits_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="latent attention, whose cache is f16 or f32"):
        LLM(str(path), config=EngineConfig(context=512, kv_dtype="q8_0"))
