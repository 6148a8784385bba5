"""Fill in the middle on Qwen2.5-Coder-0.5B: the exact prompt, and an answer that fits between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import kvarn
from kvarn import SamplingParams
from kvarn.tokenizer.fim import Infill, SourceFile
from tests.assets import qwen_coder, smollm2

pytestmark = pytest.mark.model

GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
PREFIX, SUFFIX, MIDDLE, REPO, FILE = 151659, 151661, 151660, 151663, 151664
BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[kvarn.LLM]:
    with kvarn.LLM(qwen_coder(), context=1024) as loaded:
        yield loaded


def test_the_prompt_has_the_ids_of_the_models_own_tokens(llm: kvarn.LLM) -> None:
    submission = llm.submissions.of_infill(Infill(BEFORE, AFTER), GREEDY, llm.context)
    before, after = (llm.tokenizer.encode(text) for text in (BEFORE, AFTER))
    assert before == [750, 912, 2877, 11, 293, 982, 262, 470, 220]
    assert list(submission.prompt_ids) == [PREFIX, *before, SUFFIX, *after, MIDDLE]
    written = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    assert list(submission.prompt_ids) == llm.tokenizer.encode(written, parse_special=True)
    assert {PREFIX, SUFFIX, MIDDLE, REPO, FILE} <= set(submission.params.stop_token_ids)


def test_other_files_are_marked_as_the_model_was_trained(llm: kvarn.LLM) -> None:
    infill = Infill("a", "b", [SourceFile("X = 1\n", "x.py")])
    ids = llm.submissions.of_infill(infill, GREEDY, llm.context).prompt_ids
    assert [token_id for token_id in ids if token_id >= PREFIX] == [REPO, FILE, FILE, PREFIX, SUFFIX, MIDDLE]


def test_the_answer_fits_between(llm: kvarn.LLM) -> None:
    completion = llm.infill(BEFORE, AFTER, GREEDY)
    assert completion.finish_reason == "stop"
    names: dict[str, object] = {}
    exec(compile(BEFORE + completion.text + AFTER.replace("print", "_ = "), "filled in", "exec"), names)
    assert names["_"] == 3


def test_it_looks_at_what_follows(llm: kvarn.LLM) -> None:
    short = GREEDY.replace(max_tokens=3)
    assert llm.infill("import ", "\n\nprint(json.dumps({}))\n", short).text.startswith("json")
    for name in ("result", "surface"):
        after = f"\n    return {name}\n"
        assert llm.infill("def area(width, height):\n    ", after, short).text.startswith(name)


def test_literal_text_is_not_a_token_and_does_not_fill_in(llm: kvarn.LLM) -> None:
    written = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    assert llm.generate(written, GREEDY).text != llm.infill(BEFORE, AFTER, GREEDY).text
    marked = llm.generate(llm.tokenizer.encode(written, parse_special=True), GREEDY)
    assert marked.text.startswith(llm.infill(BEFORE, AFTER, GREEDY).text)


def test_coroutines_get_the_same(llm: kvarn.LLM) -> None:
    async def ask() -> str:
        async with kvarn.AsyncLLM(str(qwen_coder()), context=256) as shared:
            return (await shared.infill(BEFORE, AFTER, GREEDY)).text

    assert asyncio.run(ask()) == llm.infill(BEFORE, AFTER, GREEDY).text


def test_a_model_without_the_tokens_refuses() -> None:
    with (
        kvarn.LLM(smollm2(), context=256) as plain,
        pytest.raises(kvarn.UnsupportedModel, match="filling in the middle"),
    ):
        plain.infill(BEFORE, AFTER, GREEDY)
