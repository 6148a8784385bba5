"""Texts among the pins of a canvas: where their tokens lie, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvarn import LLM, DiffusionParams, SamplingParams
from kvarn.errors import InvalidParameter
from kvarn.fill.pins import with_pinned_ids

CONTEXT = 512


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-diffusion", threads=1) as llm:
        yield llm


def test_a_pinned_text_lies_where_it_was_pinned_and_reads_the_same(llm: LLM) -> None:
    for text in (" They were happy.", "They were happy.", "\n\nThe end", " élan"):
        pinned = with_pinned_ids(DiffusionParams(pinned={7: text, 0: 5}), llm.tokenizer, CONTEXT).pinned_ids
        ids = [pinned[index] for index in sorted(pinned) if index]
        assert sorted(pinned) == [0, *range(7, 7 + len(ids))]
        assert pinned[0] == 5
        assert b"".join(map(llm.tokenizer.token_bytes, ids)).decode() == text


def test_the_answer_has_the_text_as_it_was_pinned(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, diffusion=DiffusionParams(pinned={8: " They were happy."}))
    answer = llm.generate("Tom and his dog", params)
    ids = llm.tokenizer.encode("\n They were happy.", add_special=False)
    pinned = with_pinned_ids(params.diffusion or DiffusionParams(), llm.tokenizer, CONTEXT).pinned_ids
    assert [answer.token_ids[index] for index in pinned] == list(pinned.values())
    assert len(pinned) < len(ids) + 1
    by_ids = params.replace(diffusion=DiffusionParams(pinned=pinned))
    assert llm.generate("Tom and his dog", by_ids).token_ids == answer.token_ids


@pytest.mark.parametrize(
    ("pinned", "words"),
    [
        ({3: ""}, "is empty"),
        ({3: " They were happy.", 4: 9}, "index 4 is pinned too"),
        ({3: " They were", 4: " happy."}, "index 4 is pinned too"),
        ({0: "x" * (64 * CONTEXT + 1)}, "more than a context"),
        ({3: 1.5}, "pinned"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_pins_that_cannot_be_are_refused_by_name(llm: LLM, pinned: dict[int, str | int], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as error:
        with_pinned_ids(DiffusionParams(pinned=pinned), llm.tokenizer, CONTEXT)
    assert words in str(error.value)


def test_a_pinned_text_beyond_the_answer_is_refused(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, diffusion=DiffusionParams(pinned={6: " They were happy."}))
    with pytest.raises(InvalidParameter, match="at most 8 tokens"):
        llm.generate("Tom", params)
