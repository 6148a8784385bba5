"""Thirty long prompts of a lower priority beside one request after another of a higher one, on a real model.

What a higher request waits for is counted in rows, which a busy machine does not change; seconds only with --long.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvarn import LLM, EngineConfig, RequestHandle, RequestState, SamplingParams
from tests.assets import smollm2

if TYPE_CHECKING:
    from tests.conftest import Record, Size

pytestmark = pytest.mark.model

NUM_LOW, LOW_ROWS, HIGH_ROWS = 30, 400, 100  # 300 words are some 400 tokens
LOW = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, priority=20)
HIGH = LOW.replace(max_tokens=4, priority=40)
MAX_FACTOR = 2.0  # of what it takes alone


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(smollm2()), config=EngineConfig(policy="priority", context=1024, kv_bytes=2**29)) as llm:
        llm.generate("warm up", HIGH)
        yield llm


class LowPrompts:
    """Always thirty of them: whoever has ended is followed by another."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._seeds = iter(range(10_000, 1_000_000))
        self._handles: list[RequestHandle] = []
        self.num_ended = 0

    def refill(self) -> None:
        running = [handle for handle in self._handles if handle.state is not RequestState.FINISHED]
        self.num_ended += len(self._handles) - len(running)
        new = [self._llm.submit(random_ids(LOW_ROWS, next(self._seeds)), LOW) for _ in range(NUM_LOW - len(running))]
        self._handles = running + new

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()
        for handle in self._handles:
            handle.result(60)


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(1000, 40_000, count).tolist()
    return ids


def first_token(llm: LLM, seed: int) -> tuple[float, int]:
    """Seconds to the first token of a request, and the prompt rows computed meanwhile, its own included."""
    before = llm.stats().prompt_tokens
    stream = llm.stream(random_ids(HIGH_ROWS, seed), HIGH)
    next(stream)
    num_rows = llm.stats().prompt_tokens - before
    (completion,) = [event.completion for event in stream if event.completion is not None]
    return completion.timings.first_token_s, num_rows


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


def test_lower_prompts_take_few_rows_from_a_higher_request(llm: LLM, size: Size, record: Record) -> None:
    number, low = size(10, 50), LowPrompts(llm)
    alone = [first_token(llm, seed) for seed in range(number)]
    beside = []
    try:
        for seed in range(number, 2 * number):
            low.refill()
            beside.append(first_token(llm, seed))
    finally:
        low.cancel()
    (alone_s, _), (beside_s, rows) = zip(*alone, strict=True), zip(*beside, strict=True)
    figures = {
        "alone_p50_ms": 1000 * statistics.median(alone_s),
        "alone_p95_ms": 1000 * p95(list(alone_s)),
        "beside_p50_ms": 1000 * statistics.median(beside_s),
        "beside_p95_ms": 1000 * p95(list(beside_s)),
        "rows_p50": statistics.median(rows),
        "rows_p95": p95(list(rows)),
        "low_ended": low.num_ended,
    }
    print(json.dumps(figures, indent=1))
    record("priority-rows", figures)
    assert figures["rows_p50"] <= MAX_FACTOR * HIGH_ROWS
    if number >= 50:
        assert figures["rows_p95"] <= MAX_FACTOR * HIGH_ROWS
        assert figures["beside_p95_ms"] <= MAX_FACTOR * figures["alone_p95_ms"]
