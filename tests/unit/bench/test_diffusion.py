"""What a block pays for the keys outside it, on a tiny model."""

from __future__ import annotations

from pathlib import Path

from kvarn import LLM
from kvarn.bench.diffusion import DiffusionBench, measure_attention
from tests.diffusing import write_talking_model


def test_attention_is_timed_and_the_cache_left_as_it_was(tmp_path: Path) -> None:
    path = write_talking_model(tmp_path / "talking.gguf")
    with LLM(str(path), threads=1) as llm:
        free = llm.client.call(lambda engine: engine.kv.num_free).result()
        cost = measure_attention(llm, DiffusionBench(block=8), context=96, rounds=2)
        assert cost.context == 96
        assert llm.client.call(lambda engine: engine.kv.num_free).result() == free
