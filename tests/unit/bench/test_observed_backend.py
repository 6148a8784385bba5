"""An observer sees the engine's forwards and samples, changes no answer, and is gone afterwards."""

from __future__ import annotations

from pathlib import Path

from kvarn import LLM, SamplingParams
from kvarn.backends.batch import Batch
from kvarn.bench.observed_backend import observed

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class Calls:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.seconds: list[float] = []

    def forward_begins(self, batch: Batch, now: float) -> None:
        self.rows.append(len(batch.token_ids))

    def call_ended(self, seconds: float) -> None:
        self.seconds.append(seconds)


def test_an_observer_sees_every_forward_and_sample_and_then_no_more(tiny: Path) -> None:
    calls = Calls()
    with LLM(str(tiny), threads=1) as llm:
        backend = llm.client.call(lambda engine: engine.backend).result()
        before = llm.generate([7, 8, 9], GREEDY.replace(reuse_cache=False))
        with observed(llm.client, calls):
            seen = llm.generate([7, 8, 9], GREEDY.replace(reuse_cache=False))
        after = llm.generate([7, 8, 9], GREEDY)
        assert llm.client.call(lambda engine: (engine.backend, engine.decoder.backend)).result() == (backend, backend)
    assert before.token_ids == seen.token_ids == after.token_ids
    assert calls.rows == [3, 1, 1, 1]
    assert len(calls.seconds) == 8
    assert min(calls.seconds) > 0
