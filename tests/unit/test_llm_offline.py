"""Thousands of prompts in one call of llm.generate: each its own answer, in order, and a bar that counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvarn
from kvarn.backends.select import has_native
from tests.chat_model import write_chat_model

COUNT = 10_000
PARAMS = kvarn.SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def prompt(index: int) -> list[int]:
    """Of few lengths and few beginnings, so that many share a prefix and every answer can be looked up."""
    return [3 + (index % 50 + 7 * place) % 90 for place in range(4 + index % 7)]


@pytest.mark.skipif(not has_native(), reason="the native core is not built")
def test_ten_thousand_prompts_get_their_own_answers_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with kvarn.LLM(str(write_chat_model(tmp_path / "tiny.gguf")), context=200) as llm:
        alone = {index: llm.generate(prompt(index), PARAMS).token_ids for index in range(350)}  # they repeat then
        answers = llm.generate([prompt(index) for index in range(COUNT)], PARAMS, progress=True)
        stats = llm.stats()
    assert len(answers) == COUNT
    assert all(answer.token_ids == alone[index % 350] for index, answer in enumerate(answers))
    assert "10000/10000" in capsys.readouterr().err
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
